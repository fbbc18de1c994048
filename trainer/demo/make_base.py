"""Makes the base of the demo: `python -m trainer.demo.make_base --out FOLDER`.

It is a T5 of 755,456 weights that an ordinary run of Lathe trains from nothing on made-up texts
(`fragments` of trainer/data/lookup.py): it gets a fragment of a sentence and some passages, and
writes the passage that holds the fragment. It has read no question, and none of the names that the
demo asks about.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.api.training import fine_tune
from trainer.config.groups import vary
from trainer.config.schema import EmbeddedTokenizer
from trainer.data.vocabulary import embedded_tokenizer
from trainer.demo import rows
from trainer.errors import EXIT_OK
from trainer.files.atomic import new_folder, refusals, refuse_existing
from trainer.launch.ending import end
from trainer.recipes.lookup_groups import FID_COPIES, TOKENIZER

BASE = vary(
    FID_COPIES,
    tokenizer="tokenizer",  # beside the rows
    train={
        "steps": 2000,
        "global_batch": 32,
        "micro_batch": 32,
        "eval_every": 250,
        "save_every": 250,
    },
    schedule={"shape": "linear"},
    data={"source": "files", "contexts": 5, "answer_tokens": 16},
)
MOST_BYTES = 4_000_000  # of a base that is part of the package
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_README = """\
# The base of Lathe's demo

A T5 that was trained from random weights on made-up sentences about people who do not exist: from a
fragment of a sentence and some passages it writes the passage that holds the fragment. Texts and
weights are Lathe's own, under its licence (Apache-2.0). It is made again by
`python -m trainer.demo.make_base --out FOLDER`.
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    out: Annotated[Path, typer.Option("--out", help="The folder of the base, a new one.")],
    work: Annotated[
        Path, typer.Option("--work", help="The folder of the rows and of the run.")
    ] = Path("out/demo_base"),
) -> None:
    """Make the base of the demo. Given again, it goes on where it was stopped."""
    end(lambda: make(out, work, BASE))


def make(out: Path, work: Path, values: dict[str, Any]) -> int:
    """Write the rows below `work`, train there, and copy the model to `out`. Returns the exit code.

    values: the experiment. ConfigError when `out` exists, StorageError when the disk refuses.
    """
    refuse_existing(out)
    data, cache = work / "rows", work / "cache"
    rows.write(data, rows.fragments(passages=values["data"]["contexts"]))
    with refusals(data):
        tokenizer(cache).save_pretrained(str(data / values["tokenizer"]))
    run = fine_tune(values, data, savedir_base=work / "runs", cache_dir=cache)
    with new_folder(out) as folder:
        for name in _FILES:
            shutil.copyfile(run.folder / "final" / name, folder / name)
        (folder / "README.md").write_text(_README)
    typer.echo(f"{out}: {sum(path.stat().st_size for path in out.iterdir()):,} bytes")
    return EXIT_OK


def tokenizer(cache_dir: Path) -> PreTrainedTokenizerFast:
    """The embedded tokenizer of the made-up corpus, with a space before every text, as T5's has: an
    answer then has the tokens that it has inside a passage, and copying it is learnt far sooner.
    """
    made = embedded_tokenizer(EmbeddedTokenizer(**TOKENIZER), cache_dir)
    backend = made.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return made


if __name__ == "__main__":
    app()
