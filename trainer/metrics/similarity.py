"""The similarity of a text to references, by optional extras: ROUGE, METEOR, BERTScore."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch

from trainer.errors import ConfigError, nearest

log = logging.getLogger(__name__)

Measure = Literal["rouge", "meteor", "bertscore"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
BERTSCORE_MODEL = "roberta-large"  # the choice of bert-score for English (Zhang et al. 2020)

_LIBRARIES = {
    "rouge": "rouge_score.rouge_scorer",
    "meteor": "nltk.translate.meteor_score",
    "bertscore": "torchmetrics",
}
# the layer whose states bert-score compares, from its table; for other models the last layer
_LAYERS = {"roberta-large": 17}
_ROUGE = {
    "rouge1": "rouge1",
    "rouge2": "rouge2",
    "rougel": "rougeL",
}  # our names, and the library's


def check(measures: Sequence[str]) -> None:
    """ConfigError for an unknown measure, or one whose library is absent; it names the extra."""
    for name in measures:
        if name not in MEASURES:
            raise ConfigError(f"--measure {name}: no such measure. {nearest(name, list(MEASURES))}")
        try:
            importlib.import_module(_LIBRARIES[name])
        except ImportError as error:
            raise ConfigError(
                f"--measure {name}: {error}. Install it: pip install -e '.[{name}]'."
            ) from None


def can_read(text: str) -> bool:
    """Whether ROUGE reads most of a text. rouge-score reads a to z and digits alone: a text in
    another script scores 0 against itself, or by its numbers and foreign names.
    """
    letters = [letter for letter in text if letter.isalpha()]
    if not letters:
        return any(letter in "0123456789" for letter in text)
    return 2 * sum(letter.isascii() for letter in letters) >= len(letters)


def similarities(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    measures: Sequence[str],
    bertscore_model: str = BERTSCORE_MODEL,
) -> list[dict[str, float]]:
    """The scores of each prediction, 0.0 to 1.0: the best over its references, at least one.

    rouge: rouge1, rouge2, rougel, F-measures without stemming. meteor: over NLTK's word_punct
    tokens. bertscore: F1, without baseline and idf. Source: the measures of ServiceNow/xc-cache.
    """
    scores: list[dict[str, float]] = [{} for _ in predictions]
    pairs = list(zip(predictions, references, strict=True))
    if "rouge" in measures:
        unread = sum(not any(map(can_read, answers)) for _, answers in pairs)
        if unread:
            log.warning(
                "--measure rouge: %d of %d references are in another script than a to z, all that "
                "ROUGE reads: their score says little. Take bertscore, or em and f1",
                *(unread, len(pairs)),
            )
        of_pair = _rouge()
        for of_row, (text, answers) in zip(scores, pairs, strict=True):
            each = [of_pair(text, reference) for reference in answers]
            of_row |= {name: max(one[name] for one in each) for name in _ROUGE}
    if "meteor" in measures:
        for of_row, (text, answers) in zip(scores, pairs, strict=True):
            of_row["meteor"] = _meteor(text, answers)
    if "bertscore" in measures:
        for of_row, best in zip(scores, _bertscore(pairs, bertscore_model), strict=True):
            of_row["bertscore"] = best
    return scores


def _rouge() -> Callable[[str, str], dict[str, float]]:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(_ROUGE.values()))

    def of_pair(text: str, reference: str) -> dict[str, float]:
        scores = scorer.score(reference, text)
        return {name: float(scores[theirs].fmeasure) for name, theirs in _ROUGE.items()}

    return of_pair


def _meteor(text: str, references: Sequence[str]) -> float:
    from nltk.tokenize import wordpunct_tokenize
    from nltk.translate.meteor_score import meteor_score

    try:
        return float(
            meteor_score(
                [wordpunct_tokenize(reference) for reference in references],
                wordpunct_tokenize(text),
            )
        )
    except LookupError:  # NLTK's own; it says where it looked, on many lines
        raise ConfigError(
            "--measure meteor: NLTK has no WordNet on this machine, by which METEOR knows "
            "synonyms. Get it: python -m nltk.downloader wordnet."
        ) from None


def _bertscore(pairs: Sequence[tuple[str, Sequence[str]]], name: str) -> list[float]:
    from torchmetrics.functional.text import bert_score
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model, report = AutoModel.from_pretrained(
            name, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--measure bertscore: {name!r} is neither a folder nor a model that the Hub gives out "
            f"({reason}). Name one by --bertscore_model."
        ) from None
    lost = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if lost:
        raise ConfigError(
            f"--measure bertscore: the files of {name!r} lack {', '.join(lost[:3])}, and random "
            "numbers in their place would be another measure in every run. Name another by "
            "--bertscore_model."
        )
    longest = min(tokenizer.model_max_length, 512)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def f1(text: str, reference: str) -> float:
        # One pair a call: torchmetrics 1.9 sorts both sides by length, and puts them back in
        # another order.
        how: dict[str, Any] = {
            "model": model,
            "user_tokenizer": tokenizer,
            "num_layers": _LAYERS.get(name),
        }
        scores: Any = bert_score(
            [text], [reference], truncation=True, max_length=longest, device=model.device, **how
        )
        return float(scores["f1"])

    return [max(f1(text, reference) for reference in references) for text, references in pairs]
