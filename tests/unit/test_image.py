"""Dockerfile and compose.yaml: read, linted, and carried out without Docker in an environment of its
own; what a container starts is started, and is healthy.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from jobs.serve import access, offers
from jobs.serve import app as server
from tests.commands_of_pages import files_of, parsed
from tests.dockerfile import APT, Image, Instruction, chain, clean_image, read
from tests.jobs.conftest import wait_until
from tests.unit.pages import ROOT

PAGE = ROOT / "docs" / "install.md"
DOCKERFILE, COMPOSE = ROOT / "Dockerfile", ROOT / "compose.yaml"
OVERRIDE = "compose.override.yaml"
BASES = {
    "cpu": "python:3.11-slim-bookworm",
    "cuda": "nvidia/cuda:13.0.1-base-ubuntu24.04",
}


def instructions(base: str = "cpu") -> list[Instruction]:
    """What is carried out for a build with --build-arg BASE=`base`."""
    return chain(read(DOCKERFILE.read_text()), {"BASE": base})


def service(text: str = COMPOSE.read_text()) -> dict[str, Any]:
    """The one service of a compose file."""
    (only,) = yaml.safe_load(text)["services"].values()
    return only


def program(name: str) -> str:
    """A linter, the one that was installed beside Python if there is one; the test is skipped
    without any.
    """
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = shutil.which(name, path=places)
    return found or pytest.skip(f"{name} is not installed: pip install -e '.[dev]'")


@pytest.mark.parametrize("base", BASES)
def test_an_image_is_made_from_a_base_of_a_stated_version_and_runs_as_nobody_special(
    base: str,
) -> None:
    steps = instructions(base)
    assert steps[0] == Instruction("FROM", BASES[base])
    arguments = dict(one.rest.partition("=")[::2] for one in steps if one.word == "ARG")
    (user,) = [one.rest for one in steps if one.word == "USER"]
    assert user == "${OWNER}:${OWNER}"
    assert int(arguments["OWNER"]) > 0
    last = max(number for number, one in enumerate(steps) if one.word == "RUN")
    assert last < steps.index(Instruction("USER", user))
    assert [one.rest.startswith(APT) for one in steps if one.word == "RUN"].count(True) == 1


def test_torch_without_cuda_is_asked_of_its_own_index_and_for_gpus_of_the_usual_one() -> None:
    indexes = [
        one.rest.partition("=")[2]
        for base in BASES
        for one in instructions(base)
        if one.word == "ARG" and one.rest.startswith("TORCH_INDEX")
    ]
    assert indexes == ["https://download.pytorch.org/whl/cpu", ""]


def test_what_is_copied_is_there_and_is_sent_to_docker_and_is_all_of_the_package() -> None:
    copied = {
        source for one in instructions() if one.word == "COPY" for source in one.rest.split()[:-1]
    }
    sent = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    assert copied == {path.name for line in sent for path in ROOT.glob(line)}
    assert {"trainer", "jobs", "ds_configs", "constraints.txt"} <= copied
    assert {path.name for path in ROOT.glob("*.py")} <= copied


def test_the_extras_of_the_image_are_extras_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (line,) = [one.rest for one in instructions() if one.rest.startswith("EXTRAS=")]
    assert {"serve", "lora", "gpu"} <= set(line.partition("=")[2].split(",")) <= set(known)


def test_the_linter_of_dockerfiles_has_nothing_to_say() -> None:
    done = subprocess.run(
        [program("hadolint"), str(DOCKERFILE)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["compose.yaml", OVERRIDE])
def test_a_compose_file_is_one(name: str) -> None:
    compose_spec = pytest.importorskip("compose_spec")
    compose_spec.PyCompose.from_yaml(compose_texts()[name]).to_spec()


def compose_texts() -> dict[str, str]:
    """Our compose file, and the one that the page on installation tells to write for GPUs."""
    return {**files_of(PAGE), "compose.yaml": COMPOSE.read_text()}


def test_the_linter_of_compose_files_finds_no_way_out_of_the_container() -> None:
    if importlib.util.find_spec("compose_lint") is None:
        pytest.skip("compose-lint is not installed: pip install -e '.[dev]'")
    command = [sys.executable, "-m", "compose_lint", "--fail-on", "high", str(COMPOSE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_service_of_the_compose_file_is_started_with_options_that_exist() -> None:
    made = service()
    name, *words = made["command"]
    assert parsed((name,))[0] == "serve"
    options = get_command(server.program).make_context(name, words).params
    assert options["token_file"] == Path("/data/tokens.json")
    assert options["savedir_base"] == Path("/data/results")
    assert made["volumes"] == ["data:/data"]
    assert yaml.safe_load(COMPOSE.read_text())["volumes"] == {"data": {}}
    assert (made["read_only"], made["cap_drop"]) == (True, ["ALL"])
    assert all(port.startswith("127.0.0.1:") for port in made["ports"])


def test_a_client_on_the_published_port_is_not_refused_by_its_host(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    access.add_token(tokens, "anna", "run", {})
    config = offers.read(None)
    gate = access.gate(
        host="0.0.0.0",
        port=8100,
        token_file=tokens,
        names=config.hosts,
        origins=config.origins,
        requests_per_minute=config.requests_per_minute,
    )
    address, port, _ = service()["ports"][0].split(":")
    assert gate.is_our_host(f"{address}:{port}")
    assert gate.is_our_host(f"localhost:{port}")
    assert not gate.is_our_host("evil.example:8100")


def test_the_file_for_gpus_asks_for_them_and_takes_the_other_base() -> None:
    made = service(compose_texts()[OVERRIDE])
    assert made["build"]["args"]["BASE"] in BASES
    (devices,) = made["deploy"]["resources"]["reservations"]["devices"]
    assert devices["capabilities"] == ["gpu"]


def lines_of_the_page(start: str) -> list[list[str]]:
    """The words of every command line on the page on installation that begins so."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(start)]


def test_the_program_understands_what_the_page_types_into_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chat.py").write_text(files_of(ROOT / "docs" / "recipes.md")["chat.py"])
    monkeypatch.chdir(tmp_path)
    names: list[str] = []
    for words in lines_of_the_page("docker run") + lines_of_the_page("docker compose run"):
        (image,) = [number for number, word in enumerate(words) if word in ("lathe", "lathe:cuda")]
        names.append(parsed(tuple(words[image + 1 :]))[0])
    assert names == ["train", "train", "token"]


def test_the_page_installs_extras_that_exist_by_our_name() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = lines_of_the_page(".venv/bin/pip install") + lines_of_the_page("pip wheel")
    requests = [words[-1] for words in lines if words[-1] != "torch"]
    assert len(requests) == 4
    for request in requests:
        name, extras = re.fullmatch(r"(\.|[\w-]+)\[([\w,]+)\]", request).groups()  # type: ignore[union-attr]
        assert name in (".", project["name"])
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (told,) = re.findall(r"are extras\. (.*?) are those", PAGE.read_text(), re.S)
    named = set(re.findall(r"`(\w+)`", told))
    assert {"lora", "serve", "bits"} <= named <= set(project["optional-dependencies"])


# Carried out
# --------------------------------------------------------------------------------------------------


def in_place(made: Image, words: list[str], port: int) -> list[str]:
    """The words of the compose file for this machine: the image's places, the loopback, a free port."""
    changed = [made.placed(word).replace(":8100", f":{port}") for word in words]
    return ["127.0.0.1" if word == "0.0.0.0" else word for word in changed]


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_the_run_lines_make_an_environment_in_which_the_service_is_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A venv and a home of their own; apt-get's lines are left out. Takes 2 GB and some minutes."""
    monkeypatch.setenv("PIP_RETRIES", "1")  # of torch's own index, where only another one has it
    made = clean_image(tmp_path, ROOT, {"OWNER": f"{os.getuid()}"})
    made.build(instructions())
    assert len(made.left_out) == 1
    assert len(made.done) == sum(one.word == "RUN" for one in instructions()) - 1
    home = Path(made.environment["HOME"])
    assert home == tmp_path / "data"
    said = made.run(made.command(["train", "--version"])).stdout
    assert "torch 2." in said, said
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token = made.run(
        made.command(["token", "--token_file", "/data/tokens.json", "--name", "a", "--role", "run"])
    )
    assert token.stdout.startswith("lathe-")
    words = in_place(made, made.command(service()["command"]), port)
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [*words, "--port", str(port)],
            cwd=made.workdir,
            env=made.environment,
            stdout=log,
            stderr=log,
        )
        try:
            _, *probe = in_place(made, service()["healthcheck"]["test"], port)

            def is_healthy() -> bool:
                assert server.poll() is None, (tmp_path / "log").read_text()
                return (
                    subprocess.run(probe, env=made.environment, capture_output=True).returncode == 0
                )

            wait_until(is_healthy, bool, within_s=600)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    assert (home / "results" / "_service").is_dir()
    places = subprocess.run(["du", "-sm", tmp_path / "opt"], capture_output=True, text=True).stdout
    print(f"SHOW image: {places.split()[0]} MB in /opt/lathe")


# The reader itself
# --------------------------------------------------------------------------------------------------


def test_a_target_is_what_its_stages_say_in_their_order() -> None:
    text = "ARG BASE=a\nFROM x:1 AS a\nENV A=1\nFROM y:2 AS b\nENV B=1\n# no\nFROM ${BASE} AS c\nRUN d \\\n    e\n"
    first, second, third = chain(read(text), {})
    assert (first.rest, second.rest, third.rest) == ("x:1", "A=1", "d e")
    assert [one.rest for one in chain(read(text), {"BASE": "b"})] == ["y:2", "B=1", "d e"]


def test_a_run_line_that_fails_ends_the_build(tmp_path: Path) -> None:
    made = clean_image(tmp_path, ROOT, {})
    with pytest.raises(subprocess.CalledProcessError):
        made.build(read("WORKDIR /data\nRUN false && true\nRUN true\n"))
    made = clean_image(tmp_path, ROOT, {})
    made.build(read("ENV PLACE=/data/here\nWORKDIR /data\nRUN echo ${PLACE} > file\n"))
    assert (tmp_path / "data" / "file").read_text() == f"{tmp_path}/data/here\n"
