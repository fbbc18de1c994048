"""Ranks that share rows: what a stretch of a stream holds, what of a dictionary is refused, and what
DeepSpeed and the memory plan are told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bases import DECODERS, base_of
from tests.facts import LLAMA, OF_TASK, experiment, write_facts
from tests.families import ids_of
from tests.forked import TRAINER, run
from tests.wording import Fault, fault, refused, says
from trainer import tasks
from trainer.config import deepspeed_config as dc
from trainer.config.schema import Optim, Train
from trainer.data.mixed.by_source import source_of_labels
from trainer.data.order import Sharding
from trainer.errors import ConfigError
from trainer.models import base_source
from trainer.models.losses import IGNORED
from trainer.models.packed.layout import grids_of, pack_labelled
from trainer.models.packed.stock import Rows
from trainer.models.stretches import exchange
from trainer.models.stretches.bases import problems
from trainer.models.stretches.stretch import stretch_of
from trainer.plan.memory.deepspeed_terms import Zero
from trainer.protocol.abilities import RankPlace, refuse_sharing
from trainer.protocol.task import Places
from trainer.runtime import distributed
from trainer.training.options import Options
from trainer.training.run_plan import RunPlan, plan

BATCHES = [[9, 3, 12], [40, 1, 5, 1, 14], [29], [3], [1]]
CASES = [(lengths, ranks) for lengths in BATCHES for ranks in (2, 3, 4)]


def _batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    rows = ids_of(lengths, 3)
    return pack_labelled(rows, [[place % 3 for place in range(len(ids))] for ids in rows])


def test_the_fastest_way_is_not_looked_for_among_files_that_share_nothing(tmp_path: Path) -> None:
    facts = write_facts(tmp_path / "facts")
    values = experiment("causal_lm", facts, base=LLAMA)
    (tmp_path / "groups.py").write_text(f"EXP_GROUPS = {{'one': [{values!r}]}}\n")
    (tmp_path / "two.json").write_text(
        json.dumps({**dc.read("zero2"), "sequence_parallel_size": 2})
    )
    argv = ["-e", "one", "--exp_configs", str(tmp_path / "groups.py"), "--data_path", str(facts)]
    argv += ["--cache_dir", str(tmp_path / "cache"), "--deepspeed", str(tmp_path / "two.json")]
    done = run(*TRAINER, "plan", *argv, "--device", "2xh200", "--fastest")
    assert done.returncode == 2, done.stdout + done.stderr
    says("sharing_of_fastest", done.stderr, count=2)


# Stretches
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lengths", "ranks"), CASES)
def test_stretches_hold_every_token_and_every_target_once(lengths: list[int], ranks: int) -> None:
    batch = _batch(lengths)
    parts = [stretch_of(batch, RankPlace(number, ranks)) for number in range(ranks)]
    length, total = len(parts[0]["tokens"]), sum(lengths)
    assert {len(part["tokens"]) for part in parts} == {length}
    assert 0 <= ranks * length - total < ranks
    for name in ("tokens", "position"):
        assert torch.equal(torch.cat([part[name] for part in parts])[:total], batch[name])
    scored = torch.cat([part["scored"] + part["before"] for part in parts])
    assert torch.equal(scored, batch["scored"])
    targets = [part["labels"][part["scored"] + 1] for part in parts]
    assert torch.equal(torch.cat(targets), batch["labels"][batch["scored"] + 1])
    assert all(IGNORED not in of_part for of_part in targets)


@pytest.mark.parametrize(("lengths", "ranks"), CASES)
def test_a_stretch_knows_where_all_rows_lie(lengths: list[int], ranks: int) -> None:
    batch = _batch(lengths)
    part = stretch_of(batch, RankPlace(ranks - 1, ranks))
    end = ranks * len(part["tokens"])
    kept = len(lengths) + 1
    assert torch.equal(part["starts"][:kept], batch["starts"])
    assert part["starts"].dtype == part["stretches"].dtype == torch.int32
    assert part["starts"][-1] == part["stretches"][-1] == end == len(part["cells"])
    cells = torch.cat([grid.flatten() for grid in grids_of(part)])
    assert int(cells.sum()) == end
    assert cells[part["cells"]].all()
    assert Rows.of(part).ranks == ranks
    assert Rows.of(batch).ranks == 1


def test_every_label_of_a_stretch_is_of_the_source_of_its_row() -> None:
    lengths, source_B = [9, 3, 12], torch.tensor([4, 5, 6])
    batch = _batch(lengths)
    whole = source_of_labels(batch, source_B, torch.tensor(len(batch["scored"])))
    parts = [stretch_of(batch, RankPlace(number, 2)) for number in range(2)]
    found = [source_of_labels(one, source_B, torch.tensor(len(one["scored"]))) for one in parts]
    assert torch.equal(torch.cat(found), whole)


def test_a_field_whose_place_is_unknown_is_no_part_of_a_stretch() -> None:
    with pytest.raises(AssertionError):
        stretch_of(_batch([4]) | {"weights": torch.ones(4)}, RankPlace(0, 2))


def test_heads_that_come_from_all_ranks_stand_in_the_order_of_tokens_and_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P ranks in one process: `exchanged` is what all of them would do."""
    ranks, heads, tokens, width = 2, 4, 6, 3
    whole = torch.arange(heads * tokens * width, dtype=torch.float32).view(1, heads, tokens, width)
    parts = whole.chunk(ranks, dim=2)
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(distributed, "exchanged", lambda x: sent.append(x) or x)
    for part in parts:
        exchange.to_heads(part, ranks)
    for rank in range(ranks):
        received = torch.stack([one[rank] for one in sent])
        monkeypatch.setattr(distributed, "exchanged", lambda x, got=received: got)
        found = exchange.to_heads(parts[rank], ranks)
        own = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
        assert torch.equal(found, whole[:, own])


@pytest.mark.parametrize(
    ("heads", "ranks", "times"), [(8, 2, 1), (2, 4, 2), (1, 4, 4), (6, 4, 2), (3, 3, 1)]
)
def test_key_value_heads_are_repeated_until_ranks_divide_them(
    heads: int, ranks: int, times: int
) -> None:
    assert exchange.repeats(heads, ranks) == times


# What DeepSpeed is told
# --------------------------------------------------------------------------------------------------


def _built(world: int, **keys: Any) -> dict[str, Any]:
    train = Train(steps=1, global_batch=8, micro_batch=2, precision="fp32")
    file = {**dc.read("zero2"), **keys}
    return dc.build(file, train=train, optim=Optim(lr=1e-3), world=world, source="mine.json")


def test_deepspeed_sees_as_many_data_parallel_ranks_as_there_are() -> None:
    ds = _built(8, sequence_parallel_size=4)
    assert ds["gradient_accumulation_steps"] == 2  # two groups, of two rows each
    engine = dc.for_engine(ds)
    assert "sequence_parallel_size" not in engine
    assert engine["train_batch_size"] == 2 * 8
    assert engine["zero_optimization"]["overlap_comm"] == dc.for_engine(_built(4))[
        "zero_optimization"
    ].get("overlap_comm")
    assert Zero.of(ds, accumulates=True).world == 8
    assert dict(dc.summary(ds))["batch"].endswith("x 2 groups of 4 devices that share rows")


@pytest.mark.parametrize("value", [0, -2, 1.5, "2", True, None])
def test_a_number_of_sharing_ranks_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        _built(2, sequence_parallel_size=value)
    says("deepspeed_value", caught.value, key="sequence_parallel_size")


def test_ranks_that_are_no_multiple_are_refused() -> None:
    with refused("sharing_of_ranks", count=4, ranks=6):
        _built(6, sequence_parallel_size=4)


def test_compiled_blocks_are_refused() -> None:
    train = Train(steps=1, global_batch=8, micro_batch=2, precision="fp32", compile=True)
    file = {**dc.read("zero2"), "sequence_parallel_size": 2}
    with refused("sharing_compiled", count=2):
        dc.build(file, train=train, optim=Optim(lr=1e-3), world=2, source="mine.json")


# What is refused of an experiment
# --------------------------------------------------------------------------------------------------


def _planned(folder: Path, values: dict[str, Any], world: int = 2, **how: Any) -> RunPlan:
    file = folder / "shared.json"
    file.write_text(json.dumps({**dc.read("zero0"), "sequence_parallel_size": 2}))
    options = Options(folder / "out", cache_dir=folder / "cache", deepspeed=str(file))
    return plan(values, options, world=world, rank=world - 1, **how)


def test_a_plan_says_which_rows_a_rank_gets_and_its_place(tmp_path: Path) -> None:
    values = experiment("causal_lm", tmp_path, base=LLAMA)
    sharding: Sharding = _planned(tmp_path, values, world=4).sharding
    assert (sharding.groups, sharding.group, sharding.place) == (2, 1, RankPlace(1, 2))


@pytest.mark.parametrize("task", sorted(set(OF_TASK) - {"causal_lm"}))
def test_other_tasks_are_refused(task: str, tmp_path: Path) -> None:
    with refused("sharing_of_run", count=2, reason=f"task '{task}' reads each row on one rank"):
        _planned(tmp_path, experiment(task, tmp_path))


def test_a_client_and_ranks_that_may_be_lost_are_refused(tmp_path: Path) -> None:
    values = experiment("causal_lm", tmp_path, base=LLAMA)
    with refused("sharing_of_run", count=2, reason="--survive goes on with any number of ranks"):
        _planned(tmp_path, values, may_be_smaller=True)
    driven = {**values, "data": {"source": "client", "max_tokens": 64}, "lora": {}}
    driven["train"] = {"steps": 1, "global_batch": 4, "micro_batch": 2, "precision": "fp32"}
    reason = 'with data.source="client" the ranks follow a log of whole rows'
    with refused("sharing_of_run", count=2, reason=reason):
        _planned(tmp_path, driven)


@pytest.mark.parametrize(
    ("name", "ranks", "complaint"),
    [
        ("llama", 3, fault("sharing_of_heads", count=3, heads=4)),
        ("gpt_bigcode", 8, fault("sharing_of_heads", count=8, heads=4)),
        ("dynamic", 2, fault("sharing_of_rotations", count=2, types="'dynamic'")),
        ("by kind", 2, fault("sharing_of_rotations", count=2, types="'longrope'")),
        ("gpt2", 2, fault("sharing_of_padded", count=2)),
    ],
)
def test_a_base_that_ranks_cannot_share_is_refused_before_its_weights_are_read(
    name: str, ranks: int, complaint: Fault, tmp_path: Path
) -> None:
    bases = {
        "dynamic": _with_rope(base_of("causal_lm", "llama", vocab_size=384), "dynamic"),
        "by kind": _with_rope(base_of("causal_lm", "gemma3", vocab_size=384), "longrope"),
        "gpt2": {"config": {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4}},
    }
    base = bases.get(name) or base_of("causal_lm", name, vocab_size=384)
    write_facts(tmp_path)
    values = experiment("causal_lm", tmp_path) | {"base": base}
    task = tasks.load(tasks.parse(values), Places(tmp_path, tmp_path / "c", tmp_path))
    with refused(complaint):
        refuse_sharing(task, ranks)
    refuse_sharing(task, 1)


def _with_rope(base: dict[str, Any], rope_type: str) -> dict[str, Any]:
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    config = dict(base["config"])
    if rope_type == "longrope":
        config["rope_parameters"] = {
            kind: rope | {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
            for kind in config["rope_parameters"]
        }
    else:
        config["rope_parameters"] = rope
    return {**base, "config": config}


def test_every_decoder_that_is_packed_can_be_shared_by_two(tmp_path: Path) -> None:
    for name in DECODERS:
        values = experiment("causal_lm", tmp_path) | {
            "base": base_of("causal_lm", name, vocab_size=384)
        }
        write_facts(tmp_path)
        task: Any = tasks.load(tasks.parse(values), Places(tmp_path, tmp_path / "c", tmp_path))
        assert task.sharing_problems(2) == [], name
        config = base_source.config_of(task.cfg.base, task.places)
        assert list(problems(config, 4)) == [], name
