"""A language model as both halves of an encoder-decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bases import decoder
from tests.wording import refused
from trainer.config.groups import with_steps
from trainer.config.identity import exp_id
from trainer.config.schema import Adapted, ExperimentBase
from trainer.models import base_model, base_source
from trainer.protocol.task import Places

LM = {"task": "causal_lm"}


def places_with(family: str, folder: Path) -> Places:
    """Those of a run whose base, LM, has been trained."""
    final = folder / exp_id(LM) / "final"
    decoder(family).save_pretrained(final)
    (final / "tokenizer.json").write_text("{}")
    return Places(None, folder / "cache", folder)


def base(window: int | None = None) -> ExperimentBase:
    return ExperimentBase(experiment=LM, adapted=Adapted(window=window))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return places_with("gemma3", tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def adapted(places: Places) -> Any:
    return base_model.load(base(), places, precision="fp32", kind="seq2seq_lm").eval()


def test_both_halves_begin_with_the_weights_of_the_language_model(
    adapted: Any, places: Places
) -> None:
    model = decoder("gemma3").model
    layers, last = model.layers, len(model.layers) - 1
    for half in (adapted.model.encoder.text_model, adapted.model.decoder):
        assert torch.equal(half.embed_tokens.weight, model.embed_tokens.weight)
        for mine, theirs in zip(half.layers, layers, strict=True):
            own, given = mine.state_dict(), theirs.state_dict()
            for part in ("self_attn.q_proj", "self_attn.k_norm", "self_attn.o_proj", "mlp.up_proj"):
                assert torch.equal(own[f"{part}.weight"], given[f"{part}.weight"]), part
            first = own["pre_self_attn_layernorm.weight"]
            assert torch.equal(first, given["input_layernorm.weight"])
    own = adapted.model.decoder
    assert torch.equal(
        own.layers[last].post_self_attn_layernorm.weight,
        layers[last].post_attention_layernorm.weight,
    )
    assert torch.equal(own.norm.weight, model.norm.weight)
    ends = adapted.model.encoder.text_model.norm.weight
    assert torch.equal(ends, layers[last].input_layernorm.weight)


def test_the_encoders_last_block_begins_as_the_identity_and_can_learn(adapted: Any) -> None:
    ids = torch.arange(4, 12)[None]
    encoder = adapted.model.encoder.text_model
    seen: list[torch.Tensor] = []
    hook = encoder.layers[-1].register_forward_hook(
        lambda module, given, out: seen.extend((given[0], out))
    )
    states = adapted.model.encoder(input_ids=ids).last_hidden_state
    hook.remove()
    assert torch.equal(seen[0], seen[1])
    states.square().sum().backward()
    assert encoder.layers[-1].post_self_attn_layernorm.weight.grad.abs().max() > 0


def test_a_folder_is_made_once_for_each_window_with_the_tokenizer(places: Places) -> None:
    first = Path(str(base_source.resolve(base(), places)))
    assert str(first) == base_source.resolve(base(), places)
    assert (first / "tokenizer.json").read_text() == "{}"
    given = decoder("gemma3").config.sliding_window
    wider = base_source.config_of(base(6), places)
    assert base_source.config_of(base(), places).decoder.sliding_window == given
    assert (wider.decoder.sliding_window, wider.encoder.text_config.sliding_window) == (6, 6)


def test_another_family_is_refused(tmp_path: Path) -> None:
    with refused("family_of_adapted", family="llama", wanted="gemma3_text"):
        base_source.resolve(base(), places_with("llama", tmp_path))


def test_a_base_stays_adapted_where_all_steps_are_changed() -> None:
    first = {"task": "causal_lm", "train": {"steps": 9}}
    second = {"task": "summariser", "base": {"experiment": first, "adapted": {"window": 12}}}
    changed = with_steps([first, second], 2)
    assert changed[1]["base"] == {"experiment": changed[0], "adapted": {"window": 12}}
