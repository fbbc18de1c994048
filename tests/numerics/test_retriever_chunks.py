"""Chunks of tokens (loss.chunk_tokens): the same vectors, losses and gradients as without, in
pieces that keep to their budget; and "auto", the largest that fits, which a run keeps.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.facts import experiment, write_facts
from tests.numerics.test_recomputation import _size, options
from tests.ranks import run_alone
from tests.unit.test_retriever_task import loaded, texts, training_rows
from tests.wording import refused
from trainer.commands.plan import subject_for
from trainer.config.auto import CHUNKS, with_chunk_tokens
from trainer.devices import LARGE_CUBLAS
from trainer.launch.run import run
from trainer.plan.memory import fake_step
from trainer.plan.memory.measure import measuring, with_value
from trainer.plan.memory.plan import make
from trainer.runtime import distributed
from trainer.runtime.preemption import Preemption
from trainer.tasks.retriever.batches import chunks_of
from trainer.tasks.retriever.model import most_calls, pieces_of
from trainer.training.run_plan import plan

WHOLE: dict[str, Any] = {"query_chunk": None, "passage_chunk": None}
ROWS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("facts"))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 120), st.booleans())
@settings(deadline=None)
def test_a_chunk_keeps_to_its_tokens_and_has_texts_of_like_length(
    sizes: list[int], budget: int, is_packed: bool
) -> None:
    chunks = chunks_of(np.array(sizes), budget, is_packed)
    assert sorted(np.concatenate(chunks)) == list(range(len(sizes)))
    longest_first = [sizes[place] for chunk in chunks for place in chunk]
    assert longest_first == sorted(sizes, reverse=True)
    used = [
        sum(sizes[place] for place in chunk) if is_packed else len(chunk) * sizes[chunk[0]]
        for chunk in chunks
    ]
    assert all(
        tokens <= budget or len(chunk) == 1 for tokens, chunk in zip(used, chunks, strict=True)
    )
    for tokens, chunk, following in zip(used, chunks, chunks[1:], strict=False):
        one_more = sizes[following[0]] if is_packed else sizes[chunk[0]]
        assert tokens + one_more > budget, "no chunk could have held one more"


def task_of(folder: Path, is_packed: bool, **loss: Any) -> Any:
    task = loaded(folder, loss={**WHOLE, **loss}, data={"passages": 3})
    task.is_packed = is_packed
    return task


def stepped(task: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of eight queries in double precision, and its gradients."""
    model = task.model().double().train()
    (loss,) = task.losses(model, [task.collate(training_rows(task, ROWS))])
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize("is_packed", [True, False])
def test_losses_and_gradients_are_those_without_chunks(is_packed: bool, folder: Path) -> None:
    wanted, gradients = stepped(task_of(folder, is_packed))
    for tokens in (1, 50, 130, 10_000, "auto"):
        found, own = stepped(task_of(folder, is_packed, chunk_tokens=tokens))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("is_packed", [True, False])
def test_texts_and_vectors_are_in_their_order(is_packed: bool, folder: Path) -> None:
    plain = task_of(folder, is_packed)
    chunked = task_of(folder, is_packed, chunk_tokens=60)
    rows = training_rows(plain, ROWS)
    model = plain.model().double().eval()
    wanted, found = (model(**texts(task.collate(rows))) for task in (plain, chunked))
    for side, vectors in wanted.items():
        torch.testing.assert_close(found[side], vectors)
    passages = [task.describe(task.collate(rows)) for task in (plain, chunked)]
    for name in (f"passage {number}" for number in range(1, 3 * ROWS + 1)):
        ids = [one[name].ids if one[name].is_real is None else one[name].ids[one[name].is_real.bool()]
               for one in passages]  # fmt: skip
        assert ids[0].tolist() == ids[1].tolist()


@pytest.mark.parametrize("is_packed", [True, False])
def test_texts_that_are_only_encoded_are_in_one_piece_under_auto(
    is_packed: bool, folder: Path
) -> None:
    plain, auto = (task_of(folder, is_packed, chunk_tokens=one) for one in (None, "auto"))
    rows = [row["query"] for row in training_rows(plain, ROWS)]
    assert len(pieces_of(auto._batches.lay_out(rows, "query"), "query")) > 1  # pyright: ignore
    (piece,) = pieces_of(auto.laid_out(rows, "query"), "query")
    (wanted,) = pieces_of(plain.laid_out(rows, "query"), "query")
    assert piece.keys() == wanted.keys()
    assert all(torch.equal(piece[name], tensor) for name, tensor in wanted.items())


def test_a_rank_with_fewer_chunks_runs_one_again_to_no_effect(folder: Path) -> None:
    task = task_of(folder, True, chunk_tokens=60)
    batch = texts(task.collate(training_rows(task, ROWS)))
    found: list[tuple[dict[str, Tensor], list[Tensor], int]] = []
    own = most_calls(batch)
    for calls in ((0, 0), (own[0] + 2, own[1] + 3)):
        model = task.model().double().train()
        ran: list[None] = []
        model.query_model.register_forward_hook(lambda *_, ran=ran: ran.append(None))
        vectors = model(**batch, chunks=(None, None), calls=calls)
        forwards = len(ran)
        (vectors["queries"].square().sum() + vectors["passages"][:, 0].sum()).backward()
        found.append((vectors, [one.grad for one in model.parameters()], forwards))
        assert len(ran) == 2 * forwards - 1, "each chunk but the last runs again in backward"
    assert found[1][2] == found[0][2] + 5
    for side, vectors in found[0][0].items():
        torch.testing.assert_close(found[1][0][side], vectors)
    torch.testing.assert_close(found[1][1], found[0][1])


def test_chunks_of_rows_and_of_tokens_are_refused_together(folder: Path) -> None:
    with refused("chunks_of_two_kinds", tokens=50, queries=2):
        loaded(folder, loss={"query_chunk": 2, "chunk_tokens": 50})


# "auto"
# --------------------------------------------------------------------------------------------------


def _auto(folder: Path) -> dict[str, Any]:
    values = experiment("retriever", folder, loss={**WHOLE, "chunk_tokens": "auto"})
    return with_value(values, "train.micro_batch", 8)


SIZES = (48, 96, 192, 384, 768, 1536)  # the longest text's, up to all of a micro-batch


def _begun_and_gone_on(folder: Path) -> tuple[dict[int, int], list[tuple[int, list[Any]]]]:
    """The peak of each size of chunks; and what runs chose, with their losses: on a device that has
    no room for the largest peak, then from its middle on one that has room for all.
    """
    distributed.init()
    values = _auto(folder)
    with measuring(fake_step.answer_all):
        subject = subject_for(values, options(folder), 1).of_processor()  # as the run plans it
        peaks = {
            tokens: make(
                replace(
                    subject,
                    values=with_value(values, CHUNKS, tokens),
                    cfg=with_chunk_tokens(subject.cfg, tokens),
                ),
                cublas=LARGE_CUBLAS,
            ).total
            for tokens in SIZES
        }
    found: list[tuple[int, list[Any]]] = []
    for nbytes in (_size(max(peaks.values()) - 1), 2**35):
        given = options(folder, device=f"{nbytes / 2**20}MiB")
        planned = plan(values, given, world=1, rank=0)
        assert run(planned, given, Preemption()) == 0
        resolved = json.loads((planned.folder / "resolved.json").read_text())
        lines = (planned.folder / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line).get("loss") for line in lines]
        found.append((resolved["loss"]["chunk_tokens"], losses))
        shutil.rmtree(planned.folder / "checkpoints" / "step-6")
        (planned.folder / "status.json").unlink()
    return peaks, found


@pytest.mark.long
def test_auto_is_the_most_that_fits_and_a_run_keeps_it(tmp_path: Path) -> None:
    peaks, (first, again) = run_alone(_begun_and_gone_on, write_facts(tmp_path))
    assert peaks[SIZES[0]] < peaks[SIZES[-1]]
    fitting = max(size for size, peak in peaks.items() if peak < max(peaks.values()))
    assert first[0] == again[0] == fitting
    assert first[1] == again[1]
    assert len(first[1]) > 6


def test_auto_without_a_device_is_refused(folder: Path, tmp_path: Path) -> None:
    given = replace(options(folder), savedir_base=tmp_path)
    planned = plan(_auto(folder), given, world=1, rank=0)
    with refused("chunks_without_device"):
        run(planned, given, Preemption())
