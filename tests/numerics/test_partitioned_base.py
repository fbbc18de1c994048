"""A base that is a folder of weights under ZeRO-3: every family, every kind of file, several ranks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from tests.bases import DECODERS, ROTARY
from tests.families import FILES, write
from tests.ranks import run_on_ranks
from trainer.models import base_model, families
from trainer.protocol.task import Places

T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BERT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
BASES: dict[str, tuple[base_model.Kind, str, dict[str, Any]]] = {
    **{name: ("causal_lm", *base) for name, base in DECODERS.items()},
    "t5 v1.0": ("seq2seq_lm", "t5", T5),
    "t5 v1.1": (
        "seq2seq_lm",
        "t5",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5 encoder": ("encoder", "t5", T5),
    "mt5 encoder": ("encoder", "mt5", T5),
    "umt5 encoder": ("encoder", "umt5", T5),
    "bert": ("encoder", "bert", BERT),
}
MIXED = ("gpt_bigcode", "llama 3.2", "t5 v1.1", "t5 encoder", "bert")  # tied or not, cut or whole


def zero3() -> dict[str, Any]:
    from trainer.runtime import distributed

    # without all three sizes deepspeed 0.19.8 does not notice how many ranks it sees
    sizes = {"train_batch_size": distributed.world(), "train_micro_batch_size_per_gpu": 1}
    sizes |= {"gradient_accumulation_steps": 1}
    return sizes | {"zero_optimization": {"stage": 3}}


def saved(folder: Path, name: str, files: str) -> Path:
    """A folder of random weights; the output layer of a T5 v1.1 is its own."""
    kind, family, values = BASES[name]
    config = AutoConfig.for_model(family, **values)
    torch.manual_seed(0)
    # what is published as T5 has its decoder, also where only the encoder is read
    model = base_model._model_class(config, "seq2seq_lm" if family in families.T5 else kind)(config)
    if name == "t5 v1.1":
        model.lm_head.weight = torch.nn.Parameter(torch.randn(96, 32) * 0.1)
        model.all_tied_weights_keys.pop("lm_head.weight", None)
    folder = folder / f"{name} {files}".replace(" ", "_")
    write(model, folder, files)
    return folder


def load(folder: Path, kind: base_model.Kind, precision: str = "fp32") -> PreTrainedModel:
    places = Places(None, folder / "cache", folder / "runs")
    return base_model.load(str(folder), places, precision=precision, kind=kind)


def names_by_weight(model: PreTrainedModel) -> list[list[str]]:
    """The names of every weight, those of a tied one together."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(names.values())


def _compared(folders: dict[str, tuple[Path, base_model.Kind]]) -> dict[str, str]:
    """By case: what is wrong with a base that was read partitioned; nothing, it is hoped."""
    import deepspeed

    from trainer.runtime import distributed
    from trainer.training import engine

    wrong: dict[str, str] = {}
    for case, (folder, kind) in folders.items():
        with engine.partitioned_loading(zero3()):
            model: Any = load(folder, kind)
        stock = load(folder, kind)
        if names_by_weight(model) != names_by_weight(stock):
            wrong[case] = f"tied {names_by_weight(model)}, not {names_by_weight(stock)}"
        for name, parameter in model.named_parameters():
            share = -(-parameter.ds_numel // distributed.world())
            if parameter.ds_tensor.numel() != share or parameter.numel() > 0:
                wrong[case] = f"{name}: {parameter.ds_tensor.numel()} numbers held, not {share}"
            with deepspeed.zero.GatheredParameters([parameter]):
                if not torch.equal(parameter, stock.get_parameter(name)):
                    wrong[case] = f"{name} is not what the file holds"
    return wrong


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(1, [(name, "one file") for name in MIXED], marks=pytest.mark.long),
        (2, [(name, "shards") for name in BASES]),
        pytest.param(
            2,
            [(name, files) for name in MIXED for files in FILES if files != "shards"],
            marks=pytest.mark.long,
        ),
        pytest.param(3, [(name, "shards") for name in MIXED], marks=pytest.mark.long),
    ],
    ids=["one rank", "two ranks", "other files on two ranks", "three ranks"],
)
def test_every_rank_holds_its_share_of_what_the_files_hold(
    world: int, cases: list[tuple[str, str]], tmp_path: Path
) -> None:
    folders = {
        f"{name} from {files}": (saved(tmp_path, name, files), BASES[name][0])
        for name, files in cases
    }
    assert run_on_ranks(world, _compared, folders) == [{}] * world


def _anonymous_bytes() -> int:
    """Memory of this process that no file backs, bytes."""
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    ]
    return int(line.split()[1]) * 1024


def _peak_of_loading(folder: Path) -> int:
    from trainer.training import engine

    with engine.partitioned_loading(zero3()):
        peaks, ended = [_anonymous_bytes()], threading.Event()

        def watch() -> None:
            while not ended.is_set():
                peaks.append(_anonymous_bytes())
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        model = load(folder, "causal_lm")
        ended.set()
        watcher.join()
    assert model.num_parameters() >= 0
    return max(peaks) - peaks[0]


def test_no_rank_holds_more_than_its_share_and_the_largest_layer(tmp_path: Path) -> None:
    config = ROTARY | {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 2048}
    config |= {"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8}
    llama: Any = base_model._model_class(AutoConfig.for_model("llama", **config), "causal_lm")
    model = llama(AutoConfig.for_model("llama", **config))
    model.save_pretrained(tmp_path, max_shard_size="50MB")
    whole = sum(parameter.nbytes for parameter in model.parameters())
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    del model
    for peak in run_on_ranks(2, _peak_of_loading, tmp_path):
        assert peak < whole / 2 + layer + 0.05 * whole, (
            f"{peak / 2**20:.0f} MiB; the model has {whole / 2**20:.0f}, a layer {layer / 2**20:.0f}"
        )
