"""docs/llms.txt and skills/lathe/SKILL.md, for programs that read and write experiments: made from the
pages of keys, commands and recipes, and from the menu of the site.

Sources: https://llmstxt.org (H1, blockquote, sections of links with notes), https://agentskills.io (front
matter with name and description; the name is that of the folder).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from typer.main import get_command

from tests.commands_of_pages import files_of
from tests.unit.pages import ROOT, assert_made
from tests.unit.test_site import pages_of
from trainer import lathe

tomllib = pytest.importorskip("tomllib")  # Python 3.10 has none

DOCS, SKILL = ROOT / "docs", "../skills/lathe/SKILL.md"
OPTIONAL = ("I change the code", "Results and log")  # llmstxt.org: what may be skipped is so called
SENTENCE_ENDS = re.compile(r"(?<!et al\.)(?<=\.)\s(?=[A-Z`*\d])")
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
HEAD = """An experiment is one plain dictionary in a file of groups. `lathe train FILE.py --data_path DATA --dry_run` checks one and
trains nothing; every error says what it got, what it wants and how to mend it. Links lead to Markdown."""
DESCRIPTION = (
    "Write, check, run and compare fine-tuning experiments with Lathe (DeepSpeed): language models by "
    "LoRA or whole, retrievers, Fusion-in-Decoder, verifiers, summarisers; on one GPU, on several, or as "
    "jobs of Slurm, Kubernetes or Ray. Use it when a file has EXP_GROUPS or somebody names lathe."
)
RULES = """# Lathe

One experiment is one plain dictionary. A file of groups holds `EXP_GROUPS = {"name": [dictionary, ...]}`; its id is a digest
of the dictionary, and its run lies in `results/<id>/`.

1. Write the dictionary. `lathe keys TASK [KEY]` says what a key may be; an unknown key is refused with the nearest one.
2. Check it: `lathe train FILE.py --data_path DATA --dry_run` trains nothing and names every mistake at once. `lathe plan FILE.py
   --data_path DATA --device 80GiB` says memory and time without a GPU.
3. Train it: the same line without `--dry_run`. Given again it resumes; `-r 1` starts over. `-j slurm` sends it.
4. Read `lathe results` and `results/<id>/metrics.jsonl`. Exit code 2 is bad input: change what the message names. 75 is a
   preemption: give the same line again.

A running service is used by tools instead: docs/agents.md.
"""


def anchor(heading: str) -> str:
    """The anchor of a heading, as the site and code hosts make it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def first_sentence(text: str) -> str:
    """The first sentence of a paragraph that says something of its subject, as plain text without the
    targets of links; "" where the text does not begin with prose.
    """
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    if re.match(r"[|#<!-]|```|$", paragraph):
        return ""
    sentences = SENTENCE_ENDS.split(LINK.sub(r"\1", paragraph))
    told = [one for one in sentences if not one.startswith("Made from ")]
    return told[0].rstrip(".:") if told else ""


def sections(page: str, level: int) -> list[tuple[str, str]]:
    """The headings of a page at a level, and the text below each."""
    text = re.sub(r"^```.*?^```\n", "", (DOCS / page).read_text(), flags=re.M | re.S)
    _, *parts = re.split(rf"^{'#' * level} ", text, flags=re.M)
    return [(part.partition("\n")[0], part.partition("\n")[2].split("\n#")[0]) for part in parts]


def item(name: str, target: str, note: str) -> str:
    return f"- [{name}]({target})" + (f": {note}" if note else "")


def menu() -> Iterator[str]:
    """The pages of the site as sections, those that may be skipped last."""
    with (ROOT / "zensical.toml").open("rb") as file:
        tabs = tomllib.load(file)["project"]["nav"]
    optional: list[str] = []
    for tab in tabs:
        ((title, below),) = tab.items()
        lines = [page_item(page) for page in pages_of(below)]
        if title in OPTIONAL:
            optional += lines
        else:
            yield from ("", f"## {title}", "", *lines)
    yield from lists()
    yield from ("", "## Optional", "", *optional)


def page_item(page: str) -> str:
    title, _, text = (DOCS / page).read_text().removeprefix("# ").partition("\n")
    return item(title, page, first_sentence(text))


def commands() -> list[tuple[str, str, str]]:
    """(words behind `lathe`, heading, what it does) of every command of the page."""
    parts = [*sections("commands.md", 2)[:1], *sections("commands.md", 3)]
    both = [heading.split()[-1] for heading, _ in parts]
    found: list[tuple[str, str, str]] = []
    for heading, text in parts:
        name = heading.strip("`").split()[-1]
        if name == "trainval.py":
            name = "train"
        elif heading.startswith("`lathe-jobs") and both.count(heading.split()[-1]) > 1:
            name = f"jobs {name}"
        found.append((name, heading, first_sentence(text)))
    return found


def keys() -> list[tuple[str, list[str], list[str]]]:
    """(heading, names at the top, keys that must be there) of every section of the page."""
    found: list[tuple[str, list[str], list[str]]] = []
    for heading, text in sections("keys.md", 2):
        lines = re.findall(r"^- `([\w.]+)`: (.*?)(?=^- |\Z)", text, re.M | re.S)
        needed: list[str] = []
        blocks = {""}
        for key, about in lines:
            if "; required" in about and key.rpartition(".")[0] in blocks:
                needed.append(key)
                blocks |= {key} if about.startswith("`block`") else set()
        found.append((heading, [key for key, _ in lines if "." not in key], needed))
    return found


def lists() -> Iterator[str]:
    """Sections for keys, commands and recipes, one line for each."""
    yield from ("", "## Keys", "")
    for heading, names, _ in keys():
        yield item(heading, f"keys.md#{anchor(heading)}", ", ".join(names))
    yield from ("", "## Commands", "")
    for name, heading, text in commands():
        yield item(f"lathe {name}", f"commands.md#{anchor(heading)}", text)
    yield from ("", "## Recipes", "")
    for title, text in sections("recipes.md", 3):
        yield item(title, f"recipes.md#{anchor(title)}", first_sentence(text))


def llms() -> str:
    """The whole of llms.txt."""
    with (ROOT / "zensical.toml").open("rb") as file:
        about = tomllib.load(file)["project"]
    start = [f"# {about['site_name']}", "", f"> {about['site_description']}", "", HEAD]
    return "\n".join([*start, *menu()]) + "\n"


def skill() -> str:
    """The whole of SKILL.md."""
    front = yaml.safe_dump({"name": "lathe", "description": DESCRIPTION}, width=10_000)
    lines = ["---", front.rstrip(), "---", "", RULES.rstrip(), "", "## A file of groups", ""]
    (text,) = [text for name, text in files_of(DOCS / "recipes.md").items() if name == "chat.py"]
    lines += ["```python", text.rstrip(), "```", "", "## Keys that must be there", ""]
    lines += [
        f"- {heading}: {', '.join(f'`{key}`' for key in needed)}" for heading, _, needed in keys()
    ]
    lines += ["", "## Commands", ""]
    lines += [f"- `lathe {name}`: {text}" for name, _, text in commands()]
    lines += ["", "## Recipes", "", "They stand in docs/recipes.md under these headings:", ""]
    lines += [f"- {title}" for title, _ in sections("recipes.md", 3)]
    return "\n".join(lines) + "\n"


def test_the_list_for_programs_is_up_to_date() -> None:
    assert_made("llms.txt", llms(), __file__)


def test_the_skill_is_up_to_date() -> None:
    assert_made(SKILL, skill(), __file__)


def test_the_list_has_the_layout_of_llmstxt_and_every_link_leads_somewhere() -> None:
    title, blank, quote, *rest = (DOCS / "llms.txt").read_text().splitlines()
    assert (title, blank, quote[:2]) == ("# Lathe", "", "> ")
    body = "\n".join(rest).partition("\n## ")[2]
    lines = [line for line in body.splitlines()[1:] if line and not line.startswith("## ")]
    assert [
        line for line in lines if not re.match(r"- \[[^\]]+\]\([\w./#-]+\)(: \S.*)?$", line)
    ] == []
    headings = {
        page: {
            anchor(line.lstrip("# ")) for line in page.read_text().splitlines() if line[:1] == "#"
        }
        for page in DOCS.glob("**/*.md")
    }
    for _, target in LINK.findall(body):
        page, _, place = target.partition("#")
        assert (DOCS / page).is_file(), target
        assert not place or place in headings[DOCS / page], target


def test_the_skill_has_a_front_matter_and_is_short() -> None:
    text = (DOCS / SKILL).read_text()
    _, front, body = text.split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["name"] == (DOCS / SKILL).resolve().parent.name
    assert 1 <= len(about["description"]) <= 1024
    assert len(text.splitlines()) < 200
    assert all(word in body for word in ("lathe keys", "--dry_run", "EXP_GROUPS"))


def test_every_command_that_is_listed_is_one() -> None:
    program: Any = get_command(lathe.app)
    for name, _, text in commands():
        assert text, name
        context = program.make_context("lathe", [*name.split(), "--help"], resilient_parsing=True)
        rest = [*context._protected_args, *context.args]
        assert program.resolve_command(context, rest)[0] == name.split()[0]
    names = [name for name, _, _ in commands()]
    assert len(set(names)) == len(names) > 40
