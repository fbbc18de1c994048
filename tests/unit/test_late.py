"""Late interaction: MaxSim, which tokens have a vector, and what an export holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from tests.bases import base_of
from tests.facts import LLAMA, experiment, write_facts
from tests.wording import Fault, fault, refused
from trainer import tasks
from trainer.commands.vectors.forms import writer_of
from trainer.models.lean.maxsim import maxsim
from trainer.protocol.abilities import Embeds, EmbedsTokens, Reranks
from trainer.protocol.task import DRAW, EPOCH, Places
from trainer.retrieval.late import token_embeddings
from trainer.tasks.retriever.late import trained

FORM = "retriever, late"
QUERY = "where is the key"
WORDS = [*QUERY.split(), ",", ".", "a", "old", "map", "of", "harbour", "lies", "under", "stone"]
PASSAGES = ["the key , of a harbour .", "a", ", .", "the old map of the harbour lies under a stone"]
MASK, COMMA = 4, 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The facts, and a tokenizer of words with a mask token."""
    folder = write_facts(tmp_path_factory.mktemp("facts"))
    names = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]", *WORDS]
    words = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    words.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 2)]
    )
    special = {"cls_token": "[CLS]", "pad_token": "[PAD]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", mask_token="[MASK]", **special
    ).save_pretrained(folder / "words")
    return folder


def loaded(folder: Path, **changes: Any) -> Any:
    changes = {"tokenizer": str(folder / "words"), **changes}
    cfg = tasks.parse(experiment(FORM, folder, **changes))
    return tasks.load(cfg, Places(folder, folder / "cache", folder))


def exported(task: Any, folder: Path) -> Any:
    """The folder of a model with uneven weights, as the task reads it again."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
        for name, p in task.model().named_parameters()
    }
    task.export(weights, folder)
    return task.load_export(folder)


def vectors(task: Any, model: Any, texts: list[str], side: str) -> list[Tensor]:
    """The vectors of each text."""
    ids = task.ids([{"text": text} for text in texts], side=side)
    with torch.no_grad():
        found = task.token_vectors(model.eval(), ids, side=side)
    return list(found.vectors.split(found.lengths.tolist()))


# MaxSim
# --------------------------------------------------------------------------------------------------


def lists(lengths: list[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(lengths), 6)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def by_hand(queries: list[Tensor], passages: list[Tensor]) -> Tensor:
    rows = [[(q @ p.T).max(dim=1).values.sum() for p in passages] for q in queries]
    return torch.stack([torch.stack(row) for row in rows])


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest result of an operation has."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_maxsim_is_its_formula_within_any_budget() -> None:
    of_queries, of_passages = [3, 1, 5], [2, 4, 1, 70]
    weights = torch.randn(3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    wanted, largest = None, {}
    for budget in (None, 1, 2 * sum(of_passages), 10**6):
        queries, passages = lists(of_queries, 1), lists(of_passages, 2)
        with Largest() as seen:
            if budget is None:
                parts = queries.split(of_queries), passages.split(of_passages)
                scores = by_hand(*(list(part) for part in parts))
            else:
                lengths = torch.tensor(of_queries), torch.tensor(of_passages)
                scores = maxsim(queries, lengths[0], passages, lengths[1], budget=budget)
            (scores * weights).sum().backward()
        largest[budget] = seen.numel
        found = (scores.detach(), queries.grad, passages.grad)
        wanted = found if wanted is None else wanted
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert largest[1] == passages.numel(), "the products of one vector are fewer"
    assert largest[10**6] == 9 * 77


def test_autocast_makes_no_score_coarser() -> None:
    queries, passages = lists([3, 1], 1).float(), lists([2, 4], 2).float()
    arguments = (queries, torch.tensor([3, 1]), passages, torch.tensor([2, 4]))
    with torch.autocast("cpu", torch.bfloat16):
        found = maxsim(*arguments)
    assert torch.equal(found, maxsim(*arguments))


# Which tokens have a vector
# --------------------------------------------------------------------------------------------------


def test_punctuation_of_passages_has_no_vector_and_mask_tokens_of_queries_do(folder: Path) -> None:
    task = loaded(folder, late={"skip": ["a"]})
    (ids,) = task.ids([{"text": PASSAGES[0]}], side="passage")
    kept = [task.tokenizer.decode([ids[at]]) for at in task.vectors.places(ids, "passage")]
    assert kept == ["[CLS]", "the", "key", "of", "harbour", "[SEP]"]
    query = [0, COMMA, 2]
    assert task.vectors.expanded(query) == [*query, *[MASK] * 13]
    assert task.vectors.places(query, "query") == [0, 1, 2], "a query's own marks count"
    assert task.vectors.places([COMMA, COMMA], "passage") == [0, 1], "a passage has a vector"
    plain = loaded(folder, late={"expand": False, "skip_punctuation": False})
    assert plain.vectors.expanded(query) == query
    assert plain.vectors.places(ids, "passage") == [*range(len(ids))]


def test_a_tokenizer_without_a_mask_token_fills_up_with_its_end(folder: Path) -> None:
    task = loaded(folder, tokenizer=str(folder / "tokenizer"))
    assert task.tokenizer.mask_token is None
    assert task.vectors.mask == task.tokenizer.eos_token_id


def test_streams_of_passages_have_the_vectors_of_padded_rows(folder: Path, tmp_path: Path) -> None:
    task = loaded(folder, data={"passage_tokens": 32})
    model = exported(task, tmp_path)
    packed = vectors(task, model, PASSAGES, "passage")
    assert [len(own) for own in packed] == [7, 3, 2, 12], "two special tokens each"
    torch.testing.assert_close(packed[0].norm(dim=-1), torch.ones(7))
    task.is_packed = False
    padded = vectors(task, task.load_export(tmp_path), PASSAGES, "passage")
    for got, want in zip(packed, padded, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_mask_tokens_change_other_vectors_only_where_tokens_attend_to_them(
    name: str, folder: Path
) -> None:
    base = base_of("retriever", name)
    found = {}
    for how, late in {
        "alone": {"expand": False},
        "hidden": {},
        "seen": {"attend": True},
    }.items():
        task = loaded(folder, base=base, late=late)
        found[how] = vectors(task, task.model(), [QUERY, "a"], "query")
    for alone, hidden in zip(found["alone"], found["hidden"], strict=True):
        assert len(hidden) == 16
        torch.testing.assert_close(hidden[: len(alone)], alone, rtol=0, atol=1e-5)
    own = len(found["alone"][0])
    if name == "bert":  # a decoder's tokens see none of those behind them
        assert (found["seen"][0][:own] - found["alone"][0]).abs().max() > 1e-3
    assert (found["seen"][0][own:] - found["hidden"][0][own:]).abs().max() > 1e-3


def test_recomputed_blocks_read_hidden_mask_tokens_as_they_are(folder: Path) -> None:
    """Streams are recomputed with attention of their own, which padded queries do not have."""
    gradients = {}
    for every in (False, True):
        task = loaded(folder, train={"gradient_checkpointing": every})
        rows = [task.encode(row) for _, row in zip(range(3), task.rows("train"), strict=False)]
        batch = task.collate([{**row, DRAW: [n], EPOCH: [0]} for n, row in enumerate(rows)])
        model = task.model().train()
        for loss in task.losses(model, [batch]):
            loss.backward()
        gradients[every] = {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in gradients[False].items():
        torch.testing.assert_close(gradients[True][name], gradient, rtol=1e-4, atol=1e-5)


# Scores
# --------------------------------------------------------------------------------------------------


def test_pairs_have_the_scores_of_their_vectors(folder: Path) -> None:
    for mean in (False, True):
        task = loaded(folder, late={"mean": mean})
        model = task.model().eval()
        queries = [QUERY, "old map"]
        wanted = by_hand(
            vectors(task, model, queries, "query"), vectors(task, model, PASSAGES, "passage")
        )
        wanted = wanted / 16 if mean else wanted
        texts = [(query, [{"text": text} for text in PASSAGES]) for query in queries]
        with torch.no_grad():
            found = task.relevance(model, task.lists_of([*texts, (QUERY, [{"text": "a"}])]))
        torch.testing.assert_close(found[:-1].view(2, -1), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(found[-1], wanted[0, 1], rtol=0, atol=1e-5)
    assert isinstance(task, EmbedsTokens)
    assert isinstance(task, Reranks)
    assert not isinstance(task, Embeds)
    rows = [{"query": QUERY, "ctxs": [{"text": PASSAGES[0]}]}, {"query": "a", "ctxs": None}]
    scored, alone = trained.predict(task, model, rows, None)  # type: ignore[arg-type]
    assert scored["scores"] == pytest.approx([float(wanted[0, 0])], abs=1e-5)
    assert len(alone["vectors"]) == 16


def test_a_validation_orders_the_passages_of_each_query(folder: Path) -> None:
    task = loaded(folder, data={"passages": 3})
    rows = [task.encode(row) for _, row in zip(range(3), task.rows("valid"), strict=False)]
    model = task.model().eval()
    with torch.no_grad():
        found = task.scores(model, task.collate(rows))
        one_by_one = [task.scores(model, task.collate([row])) for row in rows]
    assert set(found) == {"loss", "mrr@10", "ndcg@10", "recall@1"}
    for name, ratio in found.items():
        alone = sum(one[name].value() for one in one_by_one) / 3
        assert ratio.value() == pytest.approx(alone, abs=1e-5), name


# Exports
# --------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_the_projection_of_an_export(folder: Path, tmp_path: Path) -> None:
    first = exported(loaded(folder), tmp_path)
    again = loaded(folder, base=str(tmp_path), train={"seed": 7}).model()
    assert torch.equal(again.head.weight, first.head.weight)
    other = loaded(folder, train={"seed": 7}).model()
    assert not torch.equal(other.head.weight, loaded(folder).model().head.weight)
    with refused("another_projection", width=8, there=16):
        loaded(folder, base=str(tmp_path), late={"width": 8}).model()


def test_an_export_says_how_its_vectors_are_made(folder: Path, tmp_path: Path) -> None:
    task = loaded(folder, late={"mean": True, "skip": ["map"]}, data={"query_tokens": 9})
    own = vectors(task, exported(task, tmp_path), [QUERY], "query")
    other = loaded(folder, late={"width": 8, "expand": False})
    found = vectors(other, other.load_export(tmp_path), [QUERY], "query")
    assert len(found[0]) == 9
    torch.testing.assert_close(found[0], own[0])
    assert other.late.mean
    assert other.vectors.skipped_words[0] == "map"


@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_adapters_keep_their_projection(export: str, folder: Path, tmp_path: Path) -> None:
    lora = {"r": 2, "targets": ["q_proj"], "export": export}
    task = loaded(folder, base=LLAMA, lora=lora)
    model = task.model()
    weights = {name: p.detach() + 0.1 for name, p in model.named_parameters() if p.requires_grad}
    assert {"head.weight"} < set(weights)
    task.export(weights, tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.get(name, parameter))
    ours = vectors(task, model, [QUERY], "query")[0]
    read = vectors(task, task.load_export(tmp_path), [QUERY], "query")[0]
    torch.testing.assert_close(read, ours, rtol=1e-5, atol=1e-5)
    usage = trained.usage(task.cfg, tmp_path)
    assert usage.library == ("peft" if export == "adapter" else "sentence-transformers")


def test_the_projection_of_colberts_authors_lies_beside_its_body(
    folder: Path, tmp_path: Path
) -> None:
    exported(loaded(folder), tmp_path)
    from safetensors.torch import load_file

    file = tmp_path / "model.safetensors"
    body = load_file(file)
    weight = torch.arange(16.0 * 32).view(16, 32)
    save_file({**body, "linear.weight": weight}, file, metadata={"format": "pt"})
    for name in ("modules.json", "late_config.json"):
        (tmp_path / name).unlink()
    assert torch.equal(loaded(folder, base=str(tmp_path)).model().head.weight, weight)


def test_an_encoder_keeps_the_order_of_its_rows(folder: Path) -> None:
    task = loaded(folder)
    model = task.model().eval()
    encode = token_embeddings.encoder_of(task, model, side="passage", batch=2)
    found, lengths = encode([{"id": text, "text": text} for text in PASSAGES])
    for text, own in zip(PASSAGES, np.split(found, np.cumsum(lengths)[:-1]), strict=True):
        (wanted,) = vectors(task, model, [text], "passage")
        assert np.allclose(own, wanted.numpy(), atol=1e-6), text


# Bad input
# --------------------------------------------------------------------------------------------------


_OF_TOKENS = {"chunk_tokens": 64, "query_chunk": None, "passage_chunk": None}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (
            {"encoder": {"pooling": "mean"}},
            fault("block_of_other_form", block="encoder", form="late"),
        ),
        ({"cross": {"loss": "margin"}}, fault("block_of_other_form", block="cross", form="late")),
        ({"loss": {"matryoshka": {"dims": [8]}}}, fault("late_matryoshka")),
        ({"loss": _OF_TOKENS}, fault("late_chunk_tokens")),
        ({"data": {"passages": 1}}, fault("late_without_negatives")),
        ({"late": {"attend": True, "expand": False}}, fault("attend_without_expand")),
    ],
)
def test_keys_that_have_no_meaning_are_refused(
    changes: dict[str, Any], wanted: Fault, folder: Path
) -> None:
    with refused(wanted):
        tasks.parse(experiment(FORM, folder, **changes))


def test_a_block_of_late_interaction_is_refused_elsewhere(folder: Path) -> None:
    values = {**experiment("retriever", folder), "late": {"width": 8}}
    with refused("block_of_other_form", block="late", form="bi"):
        tasks.parse(values)


def test_flags_of_other_vectors_are_refused(folder: Path) -> None:
    task = loaded(folder)
    how: dict[str, Any] = {"side": "passage", "dtype": "float16", "dims": None, "factor": 2.0}
    assert writer_of(task, **how).of_plan == {"pool_factor": 2.0, "mean": False}
    for flag, given in (("--dims", {"dims": 4}), ("--layers", {"layers": 1})):
        with refused("flag_of_other_form", flag=flag, form="bi", own="late"):
            writer_of(task, **{**how, **given})
    for factor in (float("nan"), float("inf")):
        with refused("limit_finite", flag="--pool_factor", value=factor):
            writer_of(task, **{**how, "factor": factor})


def test_a_model_that_does_not_fit_is_refused(folder: Path) -> None:
    with refused("wider_than_states", width=33, states=32):
        loaded(folder, late={"width": 33}).model()
    with refused("query_beyond_positions", tokens=65, positions=64):
        loaded(folder, data={"query_tokens": 65}).model()
    with refused("no_such_token", word="zebra"):
        loaded(folder, late={"skip": ["zebra"]})


def test_an_export_of_another_form_is_refused(folder: Path, tmp_path: Path) -> None:
    places = Places(folder, folder / "cache", folder)
    late, bi = loaded(folder), tasks.load(tasks.parse(experiment("retriever", folder)), places)
    bi.export({name: p.detach() for name, p in bi.model().named_parameters()}, tmp_path / "bi")
    with refused("export_of_other_form", folder=tmp_path / "bi", form="bi"):
        late.load_export(tmp_path / "bi")
    exported(late, tmp_path / "late")
    with refused("export_of_other_form", folder=tmp_path / "late", form="late"):
        bi.load_export(tmp_path / "late")
    (tmp_path / "bi" / "retriever_config.json").unlink()
    with refused("ranking_head_absent", folder=tmp_path / "bi"):
        late.load_export(tmp_path / "bi")
    (tmp_path / "late" / "late_config.json").write_text("{}")
    with refused("late_config_torn", folder=tmp_path / "late"):
        late.load_export(tmp_path / "late")


def test_a_base_whose_projection_does_more_is_refused(folder: Path, tmp_path: Path) -> None:
    exported(loaded(folder), tmp_path)
    path = tmp_path / "1_Dense" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bias": True}))
    with refused("projection_of_another_kind", folder=tmp_path):
        loaded(folder, base=str(tmp_path)).model()
