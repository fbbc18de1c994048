"""A trained model at work: contexts and questions in, answers out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from trainer.config.schema import validate
from trainer.data import vocabulary
from trainer.errors import ConfigError, DataError
from trainer.tasks.abilities import GREEDY, Search
from trainer.tasks.cross_attention.config import Data
from trainer.tasks.cross_attention.decoder import export
from trainer.tasks.cross_attention.text.prompts import Prompts


class Reader:
    """The model of a best/, final/ or exported folder, with its tokenizer and templates."""

    def __init__(
        self,
        folder: str | Path,
        *,
        precision: str | None = None,
        device: str = "cpu",
        savedir_base: Path | None = None,
        cache_dir: Path = Path("tmp-cache"),
    ) -> None:
        """precision: None: as it was trained. savedir_base: where the run of its base lies, if it
        has one; None: two folders up.

        Raises ConfigError when the folder is no export, ResumeError when its base is another by
        now.
        """
        folder = Path(folder)
        content = export.described(folder)
        if "data" not in content:
            raise ConfigError(
                f"{folder / export.DESCRIPTION} says nothing of prompts: an old export. Export "
                "it again."
            )
        places = export.places_of(folder, cache_dir)
        if savedir_base is not None:
            places = export.Places(places.data_path, places.cache_dir, savedir_base)
        tokenizer = vocabulary.load_tokenizer(str(folder), data_path=None, cache_dir=cache_dir)
        self.prompts = Prompts(
            tokenizer, validate(Data, content["data"], source=str(folder / export.DESCRIPTION))
        )
        self.device = _device(device)
        self.model = export.load(folder, places, precision=precision or content["precision"]).to(
            self.device
        )

    def answer(
        self, question: str, contexts: str | Sequence[str], *, search: Search = GREEDY
    ) -> str:
        """The best answer to one question about its contexts."""
        return self.answers([question], [contexts], search=search)[0]

    def answers(
        self,
        questions: Sequence[str],
        contexts: Sequence[str | Sequence[str]],
        *,
        search: Search = GREEDY,
    ) -> list[str]:
        """The best answer to each question, all in one batch.

        contexts: for each question one text, or several.
        """
        if len(questions) != len(contexts):
            raise DataError(
                f"{len(questions)} questions and {len(contexts)} contexts: give one list of "
                "contexts for each question."
            )
        given = [[texts] if isinstance(texts, str) else list(texts) for texts in contexts]
        for question, texts in zip(questions, given, strict=True):
            if not any(text.strip() for text in texts):
                raise DataError(
                    f"question {question!r} has no context that is not blank: this model reads "
                    "its answers out of one. Give a text, or a list of them."
                )
        rows = [
            {"question": q, "contexts": c, "answers": [""]}
            for q, c in zip(questions, given, strict=True)
        ]
        encoded = [self.prompts.encode(row) for row in rows]
        return [
            best
            for best, *_ in self.prompts.answers(
                self.model, encoded, search=search, device=self.device
            )
        ]


def _device(name: str) -> torch.device:
    """ConfigError where there is no such device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device={name!r}: {reason}. Use cpu, cuda or cuda:N.") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"device={name!r}: torch {torch.__version__} sees {count} CUDA device(s) here. Use "
            "cpu, or see that CUDA_VISIBLE_DEVICES and the driver show one."
        )
    return device
