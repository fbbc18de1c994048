"""The Tinker SDK as people have it, unmodified, against a server that trains: every public method of
its clients, each async twin too. How each ends is the table of docs/steps-over-http.md
(LATHE_WRITE_PAGES=1 writes it).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jobs.serve.offers import Offer
from jobs.serve.steps.experiments import Driven
from service import TINY_CHAT
from tests.clients.environments import environment
from tests.serve.conftest import own_queue, serving

PROGRAMS = Path(__file__).with_name("programs")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "steps-over-http.md"
START, END = "<!-- made by tests/clients -->\n", "<!-- end of the walk -->\n"
METHODS, TWINS = 108, 43  # of tinker 0.38.0, and how many of them are async twins
NAME = "tiny/chat"  # a folder where the program runs, in the place of a model of the Hub
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="tinker wants Python 3.11")


def lay_tokenizer(folder: Path) -> None:
    """A tokenizer as the Hub has it: the service hands out its name, never its files."""
    folder.mkdir(parents=True)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    words.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def run_program(name: str, folder: Path, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A program with the SDK in its own environment. torch is that of the tests, behind it."""
    world = {"url": url, "model": NAME, "torch": sysconfig.get_path("purelib")}
    python = environment("tinker") / "bin" / "python"
    own = {"HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    own |= {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    return subprocess.run(
        [str(python), str(PROGRAMS / name), json.dumps(world), *words],
        cwd=folder,
        env=own,
        capture_output=True,
        text=True,
        timeout=3000,
    )


def as_table(results: dict[str, str]) -> str:
    """The rows of the page: a method, how it ends, and its async twin if it has one."""
    lines = ["| method | | async twin |", "|---|---|---|"]
    words: dict[str, str] = {}
    for call, result in results.items():
        if call.endswith("_async"):
            continue
        twin = results.get(f"{call}_async")
        kinds = [one.partition(":")[0] if one else "-" for one in (result, twin)]
        if result.startswith("refused"):
            words[call] = reason_of(result)
        lines.append(f"| `{call}` | {kinds[0]} | {kinds[1]} |")
    refusals = [f"- `{call}`: {reason}" for call, reason in words.items()]
    return "\n".join([*lines, "", "What is refused, and in which words:", "", *refusals]) + "\n"


def reason_of(result: str) -> str:
    """The words of a refusal without what the SDK lays around them."""
    match = re.search(r"'message': (['\"])(.*?)\1, 'type'", result)
    text = match[2] if match else result.removeprefix("refused: ").partition(": ")[2]
    return text.strip()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_public_method_of_the_sdk_ends_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    lay_tokenizer(home / NAME)
    # the walk has eight runs: none of them has to wait until another one is put aside
    driven = Driven(name=NAME, max_tokens=128, put_aside_s=60)
    offer = Offer(experiment=TINY_CHAT, driven=driven)
    with own_queue(tmp_path / "queue"), serving(tmp_path / "base", models={"tiny": offer}) as one:
        monkeypatch.setenv("LATHE_QUEUE_CPUS", "8")
        done = run_program("tinker_walk.py", home, one.url)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"call"')]
    results = {line["call"]: line["result"] for line in lines}
    failed = {call: result for call, result in results.items() if result.startswith("fails")}
    assert not failed
    twins = [call for call in results if call.endswith("_async")]
    assert (len(results), len(twins)) == (METHODS, TWINS)
    before, _, rest = PAGE.read_text().partition(START)
    said, _, after = rest.partition(END)
    if os.environ.get("LATHE_WRITE_PAGES"):
        PAGE.write_text(f"{before}{START}\n{as_table(results)}\n{END}{after}")
        said = f"\n{as_table(results)}\n"
    assert said == f"\n{as_table(results)}\n"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_supervised_loop_learns_and_a_reinforced_one_gets_more_reward(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    offer = Offer(experiment=TINY_CHAT, driven=Driven(name=NAME, max_tokens=128))
    with own_queue(tmp_path / "queue"), serving(tmp_path / "base", models={"tiny": offer}) as one:
        done = run_program("tinker_loops.py", home, one.url)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["losses"][-1] < result["losses"][0] / 2
    first, last = result["rewards"][:4], result["rewards"][-4:]
    assert sum(last) / 4 > sum(first) / 4 + 0.2


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_messages_are_those_of_the_installed_sdk() -> None:
    from jobs.serve.steps import wire

    code = (
        "from tinker.proto import tinker_public_pb2 as p; print(p.DESCRIPTOR.serialized_pb.hex())"
    )
    python = environment("tinker") / "bin" / "python"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    ours = wire.file_descriptor().SerializeToString(deterministic=True)
    assert bytes.fromhex(done.stdout) == ours
