"""A cross-encoder: its losses, its pairs, its heads, and what its export scores elsewhere."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from tests.bases import base_of
from tests.facts import LLAMA, TINY_BERT, experiment, write_facts
from tests.wording import refused
from trainer import tasks
from trainer.data import left_out
from trainer.protocol.abilities import Embeds, Reranks
from trainer.protocol.task import Places
from trainer.tasks.retriever.config import Cross
from trainer.tasks.retriever.cross import losses, metrics, trained
from trainer.tasks.retriever.cross.losses import Lists, of_lists

FORM = "retriever, cross"
QUERY = "where is the key"
WORDS = [*QUERY.split(), "a", "old", "map", "of", "harbour", "lies", "under", "third", "stone"]
WORDS += ["ada", "keeps", "red"]
PASSAGES = ["ada keeps the red key", "the old map of the harbour lies under the third stone", "a"]
WEIGHTS = ("ndcg2pp", "ndcg2", "ndcg1", "lambdarank")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The facts, and a tokenizer of words that joins pairs as BERT's does."""
    folder = write_facts(tmp_path_factory.mktemp("facts"))
    names = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *WORDS]
    words = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    words.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 2)],
    )
    special = {"cls_token": "[CLS]", "pad_token": "[PAD]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **special,
    ).save_pretrained(folder / "words")
    return folder


def loaded(folder: Path, **changes: Any) -> Any:
    cfg = tasks.parse(experiment(FORM, folder, **changes))
    return tasks.load(cfg, Places(folder, folder / "cache", folder))


def exported(task: Any, folder: Path) -> Any:
    """The folder of a model with uneven weights, as the task reads it again."""
    model = task.model()
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
        for name, p in model.named_parameters()
    }
    task.export(weights, folder)
    return task.load_export(folder)


def scores(task: Any, model: Any) -> Tensor:
    lists = task.lists_of([(QUERY, [{"text": text} for text in PASSAGES])])
    with torch.no_grad():
        return task.relevance(model, lists)


# Losses
# --------------------------------------------------------------------------------------------------


def some_lists(*, is_ragged: bool = True) -> Lists:
    generator = torch.Generator().manual_seed(1)
    labels = torch.tensor([[1.0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 2, 0, 3]])
    counts = torch.tensor([5, 3, 4]) if is_ragged else torch.tensor([5, 5, 5])
    is_there = torch.arange(5) < counts[:, None]
    scores_QN = 2 * torch.randn(3, 5, generator=generator)
    labels = labels.masked_fill(~is_there, 0.0)
    return Lists(scores_QN.masked_fill(~is_there, 0.0).requires_grad_(), labels, is_there)


def by_list(lists: Lists) -> list[tuple[Tensor, Tensor]]:
    """(scores, labels) of each list alone."""
    parts = zip(lists.scores_QN, lists.labels_QN, lists.is_there_QN, strict=True)
    return [(scores_N[there], labels_N[there]) for scores_N, labels_N, there in parts]


def gaps(scores_N: Tensor, labels_N: Tensor) -> Tensor:
    """The gaps between the scores of a more and of a less relevant passage."""
    places = [(i, j) for i, a in enumerate(labels_N) for j, b in enumerate(labels_N) if a > b]
    return torch.stack([scores_N[i] - scores_N[j] for i, j in places])


PLAIN: dict[str, Any] = {
    "pointwise": lambda s, y: F.binary_cross_entropy_with_logits(s, (y > 0).float()),
    "margin": lambda s, y: F.margin_ranking_loss(
        gaps(s, y), torch.zeros(1), torch.ones(1), margin=1.5
    ),
    "ranknet": lambda s, y: -F.logsigmoid(0.7 * gaps(s, y)).mean(),
    "softmax": lambda s, y: F.cross_entropy(s, y / y.sum()),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_loss_is_its_plain_formula_of_each_list(name: str) -> None:
    lists = some_lists()
    if name == "pointwise":
        labels = (lists.labels_QN > 0).float()
        lists = Lists(lists.scores_QN, labels, lists.is_there_QN)
    got = of_lists(lists, Cross(loss=name, margin=1.5, sigma=0.7))  # type: ignore[arg-type]
    wanted = torch.stack([PLAIN[name](*one) for one in by_list(lists)])
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def lambda_by_hand(scores_N: Tensor, labels_N: Tensor, how: Cross) -> Tensor:
    """Wang et al. 2018, pair by pair."""
    order = sorted(range(len(scores_N)), key=lambda at: -scores_N[at].item())
    top = how.top or len(order)
    discount = [float(torch.log2(torch.tensor(1.0 + rank))) for rank in range(1, len(order) + 2)]
    ideal = sorted((2 ** float(y) - 1 for y in labels_N), reverse=True)[:top]
    best = sum(gain / d for gain, d in zip(ideal, discount, strict=False))
    gain = [(2 ** float(labels_N[at]) - 1) / best for at in order]
    terms = []
    for i, at in enumerate(order):
        for j, other in enumerate(order):
            if min(i, j) >= top or (how.weights != "ndcg1" and labels_N[at] <= labels_N[other]):
                continue
            gap, far = abs(gain[i] - gain[j]), abs(i - j)
            rank = abs(1 / discount[i] - 1 / discount[j]) * gap
            step = abs(1 / discount[far - 1] - 1 / discount[far]) * gap if far else 0.0
            weight = {"ndcg1": gain[i] / discount[i], "lambdarank": rank, "ndcg2": step}
            weight["ndcg2pp"] = how.mu * step + rank
            loss = -torch.log2(torch.sigmoid(how.sigma * (scores_N[at] - scores_N[other])))
            terms.append(weight[how.weights] * loss)
    return torch.stack(terms).mean()


@pytest.mark.parametrize("top", [None, 2])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_lambda_loss_has_the_published_weights(weights: str, top: int | None) -> None:
    how = Cross(loss="lambda", weights=weights, top=top, sigma=0.8, mu=4.0)  # type: ignore[arg-type]
    lists = some_lists()
    wanted = torch.stack([lambda_by_hand(*one, how) for one in by_list(lists)])
    torch.testing.assert_close(of_lists(lists, how), wanted, rtol=1e-6, atol=1e-6)


def test_a_list_without_a_negative_adds_nothing_and_no_gradient_is_nan() -> None:
    for loss in ("margin", "ranknet", "softmax", "lambda"):
        is_there = torch.tensor([[True, False], [True, True]])
        scores_QN = torch.zeros(2, 2, requires_grad=True)
        lists = Lists(scores_QN, torch.tensor([[1.0, 0.0], [1.0, 0.0]]), is_there)
        got = of_lists(lists, Cross(loss=loss))  # type: ignore[arg-type]
        assert float(got[0]) == 0.0
        got.sum().backward()
        assert scores_QN.grad is not None
        assert scores_QN.grad.isfinite().all()
        assert scores_QN.grad[0].tolist() == [0.0, 0.0]


class Fixed(nn.Module):
    """What a loss of sentence-transformers sees of a CrossEncoder: each text is its own score."""

    num_labels, device = 1, torch.device("cpu")

    def preprocess(self, pairs: Any, **_: Any) -> dict[str, Tensor]:
        return {"scores": torch.stack([passage for _, passage in pairs])}

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return features


@pytest.mark.long
@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="not installed")
def test_losses_are_those_of_sentence_transformers() -> None:
    """Which takes the mean over a batch where ours is a sum over lists: of lists of one length."""
    from sentence_transformers.cross_encoder import losses as theirs
    from sentence_transformers.cross_encoder.losses import lambda_loss as schemes

    lists = some_lists(is_ragged=False)
    columns = [["q"] * 3, list(lists.scores_QN)]
    labels = list(lists.labels_QN)
    of_weights = {
        "ndcg2pp": schemes.NDCGLoss2PPScheme(mu=10.0),
        "ndcg2": schemes.NDCGLoss2Scheme(),
        "ndcg1": schemes.NDCGLoss1Scheme(),
        "lambdarank": schemes.LambdaRankScheme(),
    }
    for name, scheme in of_weights.items():
        for top in (None, 2):
            how = Cross(loss="lambda", weights=name, top=top)  # type: ignore[arg-type]
            # theirs is the mean over all pairs of the batch: one list at a time is a mean over it
            wanted = [
                theirs.LambdaLoss(Fixed(), weighting_scheme=scheme, k=top)(  # type: ignore[arg-type]
                    [[q], [s]], [y]
                )
                for q, s, y in zip(*columns, labels, strict=True)
            ]
            got = of_lists(lists, how)
            torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-6, atol=1e-6)
    ranknet = [
        theirs.RankNetLoss(Fixed(), reduction_log="natural")([["q"], [s]], [y])  # type: ignore[arg-type]
        for s, y in zip(columns[1], labels, strict=True)
    ]
    got = of_lists(lists, Cross(loss="ranknet"))
    torch.testing.assert_close(got, torch.stack(ranknet), rtol=1e-6, atol=1e-6)


# Pairs, heads and exports
# --------------------------------------------------------------------------------------------------


def test_a_pair_is_what_the_tokenizer_makes_of_it_and_each_text_keeps_its_limit(
    folder: Path,
) -> None:
    limits = {"query_tokens": 5, "passage_tokens": 9}
    task = loaded(folder, tokenizer=str(folder / "words"), data=limits)
    (query,) = task.pairs.cut(task.pairs.plain([QUERY], "query"), "query")
    whole = task.pairs.plain([{"text": PASSAGES[1]}], "passage")
    (passage,) = task.pairs.cut(whole, "passage")
    theirs = task.tokenizer(QUERY, " ".join(PASSAGES[1].split()[:7]))
    assert task.pairs.join(query, passage) == theirs["input_ids"]
    assert task.pairs.types(query, passage) == theirs["token_type_ids"]
    (lost,) = task.pairs.cut_of(whole, "passage").lost
    assert lost == len(PASSAGES[1].split()) - 7


BASES = ("bert", "roberta", "distilbert", "modernbert", "llama", "qwen3", "gemma3")


@pytest.mark.parametrize("name", BASES)
def test_transformers_gives_an_export_our_scores_and_streams_are_rows(
    name: str, folder: Path, tmp_path: Path
) -> None:
    base = base_of("retriever", name)
    limits = {"query_tokens": 16, "passage_tokens": 32}
    task = loaded(folder, base=base, tokenizer=str(folder / "words"), data=limits)
    model = exported(task, tmp_path)
    ours = scores(task, model)
    assert ours.dtype == torch.float32
    assert len(set(ours.tolist())) == len(PASSAGES)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert theirs.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    batch = tokenizer([QUERY] * 3, PASSAGES, padding=True, return_tensors="pt")
    if name == "distilbert" or (name not in BASES[:4]):
        batch.pop("token_type_ids")
    with torch.no_grad():
        wanted = theirs(**batch).logits.squeeze(-1)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
    task.is_packed = False
    padded = scores(task, task.load_export(tmp_path))
    torch.testing.assert_close(padded, ours, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="not installed")
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_cross_encoder_of_sentence_transformers_gives_an_export_our_scores(
    name: str, folder: Path, tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    base = base_of("retriever", name)
    task = loaded(folder, base=base, tokenizer=str(folder / "words"))
    model = exported(task, tmp_path)
    theirs = CrossEncoder(str(tmp_path), device="cpu")
    assert theirs.max_seq_length == 16 + 48
    got = theirs.predict([(QUERY, text) for text in PASSAGES], convert_to_tensor=True)
    torch.testing.assert_close(scores(task, model), got, rtol=0, atol=1e-5)


def test_a_run_goes_on_from_the_head_of_a_classifier_and_from_a_pooler_alone(
    folder: Path, tmp_path: Path
) -> None:
    task = loaded(folder)
    first = exported(task, tmp_path / "first")
    again = loaded(folder, base=str(tmp_path / "first")).model()
    for name, values in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], values), name
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "first")
    theirs.bert.save_pretrained(tmp_path / "body")
    other = loaded(folder, base=str(tmp_path / "body"), train={"seed": 7}).model()
    assert torch.equal(other.head.hidden.weight, first.head.hidden.weight)
    assert not torch.equal(other.head.output.weight, first.head.output.weight)


@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_adapters_keep_their_head(export: str, folder: Path, tmp_path: Path) -> None:
    lora = {"r": 2, "targets": ["q_proj"], "export": export}
    task = loaded(folder, base=LLAMA, lora=lora)
    model = task.model()
    weights = {name: p.detach() + 0.1 for name, p in model.named_parameters() if p.requires_grad}
    assert {"head.output.weight"} < set(weights)
    task.export(weights, tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.get(name, parameter))
    ours = scores(task, task.load_export(tmp_path))
    torch.testing.assert_close(ours, scores(task, model.eval()), rtol=1e-5, atol=1e-5)
    if export == "merged":
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
        ids = [
            task.pairs.join(query, one)
            for query, rows in task.lists_of([(QUERY, [{"text": PASSAGES[0]}])])
            for one in rows
        ]
        with torch.no_grad():
            got = theirs(torch.tensor(ids)).logits[0]
        torch.testing.assert_close(ours[:1], got, rtol=1e-5, atol=1e-5)


# Rows, metrics and bad input
# --------------------------------------------------------------------------------------------------


def test_a_batch_has_whole_lists_with_their_positives_first(folder: Path) -> None:
    task = loaded(folder, data={"passages": 4})
    rows = [task.encode(row) for _, row in zip(range(3), task.rows("valid"), strict=False)]
    batch = task.collate(rows)
    assert int(task.units(batch)) == 3
    assert batch["relevance"][:, 0].tolist() == [1.0] * 3
    assert len(batch["starts"]) - 1 == len(batch["slots"]) == int(batch["is_there"].sum())


def test_a_positive_among_its_negatives_is_left_out_and_told(folder: Path, tmp_path: Path) -> None:
    one, other = {"docid": "1", "text": "a key"}, {"docid": "2", "text": "a ship"}
    again = {"docid": "3", "text": "a  key"}
    row = {"query_id": "q", "query": "key", "positive_passages": [one]}
    row["negative_passages"] = [again, other]
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    task = loaded(folder, data={"files": {"train": "train.jsonl"}})
    task.places = Places(tmp_path, tmp_path, tmp_path)
    with left_out.reading() as notes:
        (read,) = task.rows("train")
    assert [one["id"] for one in read["negatives"]] == ["2"]
    assert "positives of their query" in notes.line()


def test_equal_scores_count_against_the_model() -> None:
    is_there = torch.ones(1, 3, dtype=torch.bool)
    labels = torch.tensor([[1.0, 0.0, 0.0]])
    of_equal = metrics.of_lists(Lists(torch.zeros(1, 3), labels, is_there))
    assert of_equal["mrr@10"].value() == pytest.approx(1 / 3)
    assert of_equal["ndcg@10"].value() == pytest.approx(0.5)
    best = metrics.of_lists(Lists(torch.tensor([[1.0, 0.0, 0.0]]), labels, is_there))
    assert {one.value() for one in best.values()} == {1.0}


def test_predictions_are_the_scores_of_the_passages_of_each_row(folder: Path) -> None:
    task = loaded(folder)
    model = task.model().eval()
    raw = {"query": QUERY, "ctxs": [{"text": text} for text in PASSAGES]}
    row = trained.row_to_predict(task, raw, "row 1")
    (got,) = trained.predict(task, model, [row], None)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.tensor(got["scores"]), scores(task, model))
    assert isinstance(task, Reranks)
    assert not isinstance(task, Embeds)
    with refused("passages_to_score_absent", at="row 2"):
        trained.row_to_predict(task, {"query": QUERY}, "row 2")


@pytest.mark.parametrize(
    ("changes", "block"),
    [
        ({"form": "cross", "encoder": {"normalize": True}}, "encoder"),
        ({"form": "cross", "loss": {"mask_duplicates": True}}, "loss"),
        ({"form": "bi", "cross": {"loss": "margin"}}, "cross"),
    ],
)
def test_a_block_of_the_other_form_is_refused(
    changes: dict[str, Any], block: str, folder: Path
) -> None:
    values = {**experiment(FORM, folder), **changes}
    with refused("block_of_other_form", block=block, form=changes["form"]):
        tasks.parse(values)


def test_a_positive_alone_teaches_a_cross_encoder_nothing(folder: Path) -> None:
    with refused("list_of_one", passages=1):
        tasks.parse(experiment(FORM, folder, data={"passages": 1}))


def test_an_export_of_the_other_form_is_refused(folder: Path, tmp_path: Path) -> None:
    values = experiment("retriever", folder)
    places = Places(folder, folder / "cache", folder)
    bi = tasks.load(tasks.parse(values), places)
    bi.export({name: p.detach() for name, p in bi.model().named_parameters()}, tmp_path / "bi")
    with refused("export_of_other_form", folder=tmp_path / "bi", form="bi"):
        loaded(folder).load_export(tmp_path / "bi")
    exported(loaded(folder), tmp_path / "cross")
    with refused("export_of_other_form", folder=tmp_path / "cross", form="cross"):
        bi.load_export(tmp_path / "cross")


def test_a_base_without_a_known_head_is_refused(folder: Path) -> None:
    with refused("base_without_head", family="t5"):
        loaded(folder, base=base_of("retriever", "t5", vocab_size=384))


def test_pairs_beyond_the_positions_of_a_base_are_refused(folder: Path) -> None:
    with refused("pairs_beyond_positions", tokens=80, positions=64):
        loaded(folder, base=TINY_BERT, data={"passage_tokens": 64}).model()


def test_lists_of_pairs_stand_where_their_scores_are_put() -> None:
    is_there = torch.tensor([[True, True, False], [True, True, True]])
    batch = {"is_there": is_there, "relevance": torch.zeros(2, 3)}
    batch["slots"] = is_there.flatten().nonzero()[:, 0]
    lists = losses.lists_of(torch.arange(5.0), batch)
    assert lists.scores_QN.tolist() == [[0.0, 1.0, 0.0], [2.0, 3.0, 4.0]]
