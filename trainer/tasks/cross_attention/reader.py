"""Answers questions about contexts with a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from trainer.config.block import validate
from trainer.data import vocabulary
from trainer.errors import ConfigError, DataError
from trainer.models.weights import generation_file
from trainer.protocol.abilities import GREEDY, Search
from trainer.tasks.cross_attention.config import Data
from trainer.tasks.cross_attention.decoder import export
from trainer.tasks.cross_attention.decoder.context import Context, Past
from trainer.tasks.cross_attention.decoder.generation import most_prompt_tokens, stream_tokens
from trainer.tasks.cross_attention.text.prompts import Prompts

if TYPE_CHECKING:
    from trainer.protocol.task import Encoded

_PARTIAL = "\ufffd"  # stands for a character of which only some tokens are written yet


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
        """precision: None: that of training. savedir_base: the folder of runs that holds the base's
        run, if the base comes from one; None: two folders up.

        Raises ConfigError when the folder is no export, ResumeError when its base has changed.
        """
        folder = Path(folder)
        content = export.read_description(folder)
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
            tokenizer,
            validate(Data, content["data"], source=str(folder / export.DESCRIPTION)),
            ends=lambda: generation_file.ends_of_base(str(folder), None),
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
        sides = [
            _check(texts, f"question {question!r}")
            for question, texts in zip(questions, contexts, strict=True)
        ]
        rows = [
            {"question": q, "contexts": c, "answers": [""]}
            for q, c in zip(questions, sides, strict=True)
        ]
        encoded = [self.prompts.encode(row) for row in rows]
        return [
            best.text
            for best, *_ in self.prompts.answers(
                self.model, encoded, search=search, device=self.device
            )
        ]

    def read(self, contexts: str | Sequence[str]) -> Reading:
        """One context, or several that belong together, encoded once and kept on the device."""
        return Reading(self, _check(contexts, "what is to be read"))


class Reading:
    """A context that a reader has encoded; it answers any number of questions."""

    def __init__(self, reader: Reader, contexts: list[str]) -> None:
        self._reader, self._contexts = reader, contexts
        # None: the question stands before the context, which is then encoded for each question
        self._kept = None if reader.prompts.data.question_on_context else self._encode_question("")

    def answer(self, question: str, *, search: Search = GREEDY) -> str:
        """The best answer to one question; nothing is encoded again."""
        reader = self._reader
        how: dict[str, Any] = {"search": search, "device": reader.device}
        past = self._past(question)
        ((best, *_),) = reader.prompts.answers(
            reader.model, [self._row(question)], past=past, **how
        )
        return best.text

    def stream(self, question: str) -> Iterator[str]:
        """The most likely answer, piece by piece as it is generated."""
        reader = self._reader
        prompts, most = reader.prompts, reader.prompts.data.answer_tokens
        prompt = prompts.asked([self._row(question)], most_prompt_tokens(reader.model, most))
        tokens: list[int] = []
        num_yielded, text = 0, ""
        for token in stream_tokens(
            reader.model,
            **{name: ids.to(reader.device) for name, ids in prompt.items()},
            past=self._past(question),
            max_new_tokens=most,
            eos_token_id=prompts.ends,
        ):
            tokens.append(token)
            text = prompts.text(tokens)
            sure = len(text.rstrip(_PARTIAL))
            if sure > num_yielded:
                yield text[num_yielded:sure]
                num_yielded = sure
        if text[num_yielded:]:
            yield text[num_yielded:]

    def _row(self, question: str) -> Encoded:
        row = {"question": question, "contexts": self._contexts, "answers": [""]}
        return self._reader.prompts.encode(row)

    def _encode_question(self, question: str) -> Context:
        reader = self._reader
        batch = reader.prompts.contexts([self._row(question)], "context")
        ids, mask = (
            batch[f"context_{name}"].to(reader.device) for name in ("input_ids", "attention_mask")
        )
        with torch.no_grad():
            return reader.model.context(*reader.model.encode(ids, mask))

    def _past(self, question: str) -> Past:
        context = self._encode_question(question) if self._kept is None else self._kept
        return Past(DynamicCache(config=self._reader.model.backbone.config), context)


def _check(contexts: str | Sequence[str], what: str) -> list[str]:
    """The texts as a list; DataError when all are blank."""
    texts = [contexts] if isinstance(contexts, str) else list(contexts)
    if not any(text.strip() for text in texts):
        raise DataError(
            f"{what} has no context that is not blank: this model reads its answers out of one. "
            "Give a text, or a list of them."
        )
    return texts


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
