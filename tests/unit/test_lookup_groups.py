"""The groups on the made-up corpus: what their shapes promise of its texts."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from trainer.config.schema import EmbeddedTokenizer
from trainer.data import lookup
from trainer.data.vocabulary import embedded_tokenizer
from trainer.recipes.lookup_groups import GEMMA, TOKENIZER


def test_the_last_token_of_a_fact_sees_all_of_it_in_the_window_of_the_first_blocks(
    tmp_path: Path,
) -> None:
    tokenizer = embedded_tokenizer(EmbeddedTokenizer(**TOKENIZER), tmp_path)
    texts = [row["context"] for row in islice(lookup.contexts("valid"), 50)]
    facts = [f" {fact}." for text in texts for fact in text.rstrip(".").split(". ")]
    lengths = [len(tokenizer(fact)["input_ids"]) for fact in facts]
    assert len(facts) == 50 * lookup.FACTS
    assert max(lengths) == GEMMA["config"]["sliding_window"]
