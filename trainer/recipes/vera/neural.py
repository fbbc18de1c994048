"""The question converter: a seq2seq model that makes `sentence </s> choice` a statement. Imports
torch.

Texts are sorted by length and generated in batches, greedily. Every answer is appended to a cache
beside others of the same weights, so a conversion that was interrupted goes on where it was, and a
text is never converted twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from trainer.errors import ConfigError
from trainer.files.atomic import refusals
from trainer.models.weights import absent

log = logging.getLogger(__name__)

_MAX_LENGTH = 256  # of a statement, as in the original
_LOG_EVERY = 50  # batches


class QuestionConverter:
    """A callable: texts -> statements, in the same order. Weights are read when the first text is
    not in the cache.
    """

    def __init__(
        self, source: str, *, cache_dir: Path, batch: int = 64, device: str | None = None
    ) -> None:
        """source: a folder or Hub id of any T5. batch: texts per forward. ConfigError for a model
        that is not there.
        """
        self.source, self.cache_dir, self.batch = source, cache_dir, batch
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.num_generated = 0
        self._model: Any = None
        self._tokenizer: Any = None
        self._digest = ""

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """One statement for each text.

        ConfigError when another process writes the cache of these weights.
        """
        if not texts:
            return []
        self._load()
        path = self.cache_dir / "question_converter" / f"{self._digest[:16]}.jsonl"
        with refusals(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(f"{path}.lock", timeout=0):
                return self._convert(texts, path)
        except Timeout:
            raise ConfigError(
                f"{path} is being written by another conversion. Wait for it, or use another "
                "--cache_dir."
            ) from None

    def _convert(self, texts: Sequence[str], path: Path) -> list[str]:
        statements: dict[str, str] = {}  # by text
        if path.is_file():
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:  # a last line that was cut off is dropped, from the file too
                with refusals(path):
                    path.write_bytes(whole)
            statements = dict(json.loads(line) for line in whole.decode().splitlines() if line)
        missing = list(dict.fromkeys(text for text in texts if text not in statements))
        log.info(
            "question converter: %d texts, %d of them in %s",
            len(texts),
            len(texts) - len(missing),
            path,
        )
        with refusals(path), path.open("a", encoding="utf-8") as cache:
            for number, batch in enumerate(self._batches(missing), start=1):
                for text, statement in zip(batch, self._generate(batch), strict=True):
                    statements[text] = statement
                    cache.write(json.dumps([text, statement], ensure_ascii=False) + "\n")
                cache.flush()
                self.num_generated += len(batch)
                if number % _LOG_EVERY == 0:
                    log.info("question converter: %d batches done", number)
        return [statements[text] for text in texts]

    def _load(self) -> None:
        if self._model is not None:
            return
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.source, trust_remote_code=False)
            self._model, report = AutoModelForSeq2SeqLM.from_pretrained(
                self.source, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"--converter {self.source}: cannot be loaded ({reason}). Give the folder or Hub "
                "id of a T5."
            ) from None
        absent.refuse_named(report["missing_keys"], self.source)
        self._digest = _digest(self._model, self._tokenizer)
        self._model = self._model.to(self.device).eval()

    def _batches(self, texts: Sequence[str]) -> Iterator[list[str]]:
        """The longest first, so that memory that does not suffice is noticed at once."""
        ids = self._tokenizer(list(texts))["input_ids"] if texts else []
        order = sorted(range(len(texts)), key=lambda index: -len(ids[index]))
        for start in range(0, len(order), self.batch):
            yield [texts[index] for index in order[start : start + self.batch]]

    @torch.inference_mode()
    def _generate(self, texts: list[str]) -> list[str]:
        encoded = self._tokenizer(texts, padding=True, return_tensors="pt").to(self.device)
        ids = self._model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_length=_MAX_LENGTH,
            num_beams=1,
            do_sample=False,
        )
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [text.strip() for text in texts]


def _digest(model: Any, tokenizer: Any) -> str:
    """What the answers depend on: every weight, the sizes of the model and the vocabulary."""
    digest = hashlib.sha256(model.config.to_json_string(use_diff=True).encode())
    digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().cpu().numpy())
    return digest.hexdigest()
