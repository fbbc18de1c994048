"""The packed Fusion-in-Decoder against a stock T5 that is fed padded passages: its slow, obvious
twin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from tests.numerics.test_engine import ds_for
from tests.ranks import run_on_ranks
from tests.tolerance import CANCELS, assert_all_close, assert_close, assert_same_step, depth_of
from tests.wording import refused
from trainer.config.schema import Optim
from trainer.data.padding import pad_right
from trainer.models.losses import IGNORED
from trainer.models.packed.layout import pack_targets
from trainer.protocol.task import Batch
from trainer.tasks.fid.config import Reader
from trainer.tasks.fid.fused_layout import pack
from trainer.tasks.fid.model import FiD, Generation

# B questions, P passages of all of them, L tokens of the longest, S tokens of a question, D width

VOCABULARY = 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 24,
    "decoder_start_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5_v1_1": {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "num_decoder_layers": 2,
    },
}
# Many passages beside a single one, passages of one token, and lengths on both sides of a bucket's
# edge.
LENGTHS = [[5, 1, 40, 17, 1, 33], [3], [32, 8]]
LABELS = [[7, 20, 1], [9, 1], [30, 31, 32, 33, 1]]

every_family = pytest.mark.parametrize("family", FAMILIES)
every_attention = pytest.mark.parametrize("attention", ["padded", "bucketed"])

Questions = list[list[list[int]]]


def t5(family: str = "t5", *, dropout: float = 0.0) -> Any:
    config = T5Config(dropout_rate=dropout, **SIZES, **FAMILIES[family])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: Any = T5ForConditionalGeneration(config)
        if (
            not config.scale_decoder_outputs
        ):  # T5 v1.1; transformers 5 ties all the same, until it loads two tensors
            model.lm_head.weight = nn.Parameter(torch.randn(VOCABULARY, 32) / 4)
        return lively(model)


@torch.no_grad()
def lively(model: Any) -> Any:
    """Attention made to matter: with T5's own initialisation the last token alone decides the next
    one.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".q.weight"):
            parameter *= 3
        elif name.endswith("EncDecAttention.o.weight"):
            parameter *= 8
        elif name.endswith("relative_attention_bias.weight"):
            parameter.normal_(std=0.5)
    return model


# As tests/tolerance.py means them: the sums of every layer. A gradient has passed them twice, and
# the score of an answer those of each of its tokens.
DEPTH = depth_of(t5("t5_v1_1"))
STATES = {"what": "states", "depth": DEPTH, "margin": 0.6}
GRADIENTS = {"what": "gradients of states", "depth": 2 * DEPTH, "margin": 0.4, "cancels": CANCELS}
STEP: dict[str, Any] = {"depth": DEPTH, "loss": 0.15, "gradients": 1.2}
LOSSES = {"what": "loss", "depth": DEPTH, "margin": STEP["loss"]}
SCORES = {"what": "passage scores", "depth": DEPTH, "margin": 0.7}
ANSWER_SCORES = {"what": "scores of answers", "depth": 12 * DEPTH, "margin": 0.1}


def reader(
    family: str = "t5",
    attention: Any = "bucketed",
    *,
    dropout: float = 0.0,
    recompute: int | None = None,
    **how: Any,
) -> FiD:
    """recompute: every so many encoder blocks; None: none of them."""
    given = Reader(attention=attention, **how)
    return FiD(t5(family, dropout=dropout), given, recompute_every=recompute)


def questions(lengths: Sequence[Sequence[int]] = LENGTHS, *, seed: int = 0) -> Questions:
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
            for length in of_question
        ]
        for of_question in lengths
    ]


def labels(targets: Sequence[Sequence[int]] = LABELS) -> Tensor:
    ids, mask = pad_right(targets, 0)
    return ids.masked_fill(mask == 0, IGNORED)


def packed(
    asked: Questions | None = None, targets: Sequence[Sequence[int]] = LABELS, **how: Any
) -> Batch:
    return pack(asked or questions(), **{"bucketed": True, **how}) | pack_targets(targets)


# The twin
# --------------------------------------------------------------------------------------------------


def padded_states(model: Any, asked: Questions) -> tuple[Tensor, Tensor]:
    """(P, L, D) and (P, L): every passage through the stock encoder, padded on the right to the
    longest.
    """
    ids, mask = pad_right([passage for question in asked for passage in question], 0)
    return model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state, mask


def fused(model: Any, asked: Questions) -> tuple[Tensor, Tensor]:
    """(B, S, D) and (B, S): the passages of a question one after the other, padding included, as
    published.
    """
    states, mask = padded_states(model, asked)
    counts = [len(question) for question in asked]
    of_questions = [own.flatten(0, 1) for own in states.split(counts)]
    masks = [own.flatten() for own in mask.split(counts)]
    pad = nn.utils.rnn.pad_sequence
    return pad(of_questions, batch_first=True), pad(masks, batch_first=True)


def padded_loss(model: Any, asked: Questions, targets: Tensor) -> Tensor:
    """() the sum over labelled tokens, by the stock model as it is."""
    states, mask = fused(model, asked)
    out = model(
        encoder_outputs=BaseModelOutput(states),
        attention_mask=mask,
        labels=targets,
        use_cache=False,
    )
    return out.loss * (targets != IGNORED).sum()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By the names that they have in a stock T5."""
    return {
        name.removeprefix("t5."): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


# Encoder, loss and gradients
# ------------------------------------------------------------------------------------------


@every_attention
@every_family
def test_the_packed_encoder_equals_the_stock_one_and_so_do_its_gradients(
    family: str, attention: str
) -> None:
    model, twin, asked = reader(family, attention), t5(family), questions()
    states, mask = padded_states(twin, asked)
    want, got = states[mask.bool()], model.encode(packed(asked, bucketed=attention == "bucketed"))
    assert_close(got, want, **STATES)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    for result in (got, want):
        (result * weights).sum().backward()
    assert_all_close(gradients_of(model), gradients_of(twin), **GRADIENTS)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@every_family
def test_flex_attention_gives_the_same_states(family: str) -> None:
    asked = questions()
    with torch.no_grad():
        states, mask = padded_states(t5(family), asked)
        got = reader(family, "flex").encode(packed(asked))
    assert_close(got, states[mask.bool()], **STATES)


def test_flex_attention_refuses_to_train_without_cuda() -> None:
    with refused("flex_without_cuda"):
        reader(attention="flex")(**packed())


@every_attention
@every_family
def test_loss_and_gradients_equal_those_of_padded_fusion_in_decoder(
    family: str, attention: str
) -> None:
    model, twin = reader(family, attention), t5(family)
    loss = model(**packed(bucketed=attention == "bucketed"))["loss"]
    want = padded_loss(twin, questions(), labels())
    loss.backward()
    want.backward()
    assert_same_step((loss, gradients_of(model)), (want, gradients_of(twin)), **STEP)


def test_a_batch_of_single_tokens_works() -> None:
    asked, targets = [[[5]], [[6]]], [[1], [1]]
    want = padded_loss(t5(), asked, labels(targets))
    assert_close(reader()(**packed(asked, targets))["loss"], want, **LOSSES)


@torch.no_grad()
def test_room_for_whole_passages_changes_nothing_without_a_position_bias() -> None:
    close, roomy = (reader()(**packed(cross_width=width))["loss"].item() for width in (None, 50))
    assert_close(roomy, close, **LOSSES)


@torch.no_grad()
def test_the_order_of_passages_changes_neither_loss_nor_answers() -> None:
    model, asked = reader().eval(), questions()
    turned = [[*question[2:], *question[:2]] for question in asked]
    one, other = (model(**packed(order))["loss"].item() for order in (asked, turned))
    assert_close(other, one, **LOSSES)
    answers = [
        model(generation=Generation(9), **packed(order))["tokens"] for order in (asked, turned)
    ]
    assert torch.equal(*answers)


@torch.no_grad()
def test_a_question_scores_its_passages_alike_in_any_company() -> None:
    model, asked = reader().eval(), questions()
    together = model(score_passages=True, **packed(asked))["passage_scores"]
    alone = [
        model(score_passages=True, **packed([question], [target]))["passage_scores"]
        for question, target in zip(asked, LABELS, strict=True)
    ]
    assert_close(together, torch.cat(alone), **SCORES)
    assert together.std() > 1e-3


@torch.no_grad()
def test_passage_scores_are_means_of_raw_attention_scores_at_the_first_step() -> None:
    model, asked = reader().eval(), questions()
    states, mask = fused(model.t5, asked)
    inputs: list[tuple[Any, Tensor]] = []
    for block in model.t5.decoder.block:
        block.layer[1].EncDecAttention.register_forward_pre_hook(
            lambda module, args: inputs.append((module, args[0]))
        )
    start = torch.zeros(len(asked), 1, dtype=torch.int64)
    model.t5.decoder(input_ids=start, encoder_hidden_states=states, encoder_attention_mask=mask)
    raw: list[Tensor] = []  # (B, H, S) of each layer
    for module, hidden in inputs:
        q, k = (
            part.unflatten(-1, (module.n_heads, -1))
            for part in (module.q(hidden), module.k(states))
        )
        raw.append(torch.einsum("bqhc,bshc->bhs", q, k))
    score = torch.stack(raw).mean((0, 2))
    longest = max(len(passage) for question in asked for passage in question)
    want = [
        score[row, place * longest : place * longest + len(passage)].mean().item()
        for row, question in enumerate(asked)
        for place, passage in enumerate(question)
    ]
    assert_close(
        model(score_passages=True, **packed(asked))["passage_scores"].tolist(), want, **SCORES
    )


# Recomputation
# --------------------------------------------------------------------------------------------------


def loss_and_gradients(model: FiD, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(11)
    loss = model.train()(**batch)["loss"]
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("every", [1, 2])
@every_attention
def test_recomputing_blocks_gives_identical_gradients(
    attention: str, every: int, dropout: float
) -> None:
    batch = packed(bucketed=attention == "bucketed")
    (loss, gradients), (again, recomputed) = (
        loss_and_gradients(reader(attention=attention, dropout=dropout, recompute=how), batch)
        for how in (None, every)
    )
    assert torch.equal(loss, again)
    assert len(gradients) == len(recomputed)
    assert all(torch.equal(one, other) for one, other in zip(gradients, recomputed, strict=True))


@pytest.mark.parametrize(("every", "runs"), [(None, [1, 1, 1]), (1, [2, 2, 2]), (2, [2, 1, 2])])
def test_backward_runs_every_so_many_blocks_once_more(every: int | None, runs: list[int]) -> None:
    model, calls = reader(recompute=every), Counter[int]()
    for number, block in enumerate(model.t5.encoder.block):
        block.layer[0].SelfAttention.q.register_forward_hook(
            lambda *_, number=number: calls.update([number])
        )
    loss_and_gradients(model, packed())
    assert [calls[number] for number in range(3)] == runs
    calls.clear()
    model.eval()(**packed())["loss"].backward()
    assert [calls[number] for number in range(3)] == [1, 1, 1]


# Dropout
# --------------------------------------------------------------------------------------------------


def dropouts_run(model: nn.Module, run: Any) -> Counter[str]:
    """How often each nn.Dropout runs in `run()`, by its name in a stock T5."""
    counts = Counter[str]()
    hooks = [
        module.register_forward_hook(
            lambda *_, name=name: counts.update([name.removeprefix("t5.")])
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout)
    ]
    run()
    for hook in hooks:
        hook.remove()
    return counts


@every_family
def test_every_dropout_of_the_stock_model_runs_as_often(family: str) -> None:
    model, twin = reader(family, dropout=0.1).train(), t5(family, dropout=0.1).train()
    want = dropouts_run(twin, lambda: padded_loss(twin, questions(), labels()))
    assert dropouts_run(model, lambda: model(**packed())) == want
    assert want["encoder.dropout"] == 2
    assert len(want) == sum(isinstance(module, nn.Dropout) for module in twin.modules())


def deviation(run: Any, exact: Tensor, *, draws: int = 150) -> float:
    """Mean square by which dropout moves the states that `run()` gives."""
    torch.manual_seed(5)
    with torch.no_grad():
        return torch.stack([((run() - exact) ** 2).mean() for _ in range(draws)]).mean().item()


@pytest.mark.parametrize("where", ["attention", "everywhere"])
@every_attention
def test_dropout_is_as_strong_as_in_the_stock_encoder(attention: str, where: str) -> None:
    asked = questions([[30, 12, 7, 40]])
    batch = packed(asked, [[1]], bucketed=attention == "bucketed")
    model, twin = reader(attention=attention, dropout=0.2).train(), t5(dropout=0.2).train()
    if where == "attention":
        for module in (*model.modules(), *twin.modules()):
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    with torch.no_grad():
        exact, mask = padded_states(t5(), asked)
    real = mask.bool()
    want = deviation(lambda: padded_states(twin, asked)[0][real], exact[real])
    assert want > 1e-4
    assert deviation(lambda: model.encode(batch), exact[real]) == pytest.approx(want, rel=0.1)


@torch.no_grad()
def test_reader_dropout_replaces_the_bases_everywhere() -> None:
    model = reader(dropout=0.4).train()
    FiD(model.t5, Reader(dropout=0.0))
    one, other = (model(**packed())["loss"].item() for _ in range(2))
    assert one == other
    model = FiD(t5(), Reader(dropout=0.4))
    attentions = [
        module for module in model.modules() if hasattr(module, "relative_attention_num_buckets")
    ]
    assert {module.dropout for module in attentions} == {0.4}
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.4}


# Generation
# --------------------------------------------------------------------------------------------------


def eager_to_end(model: FiD) -> FiD:
    """The same model, likelier to write the end token: answers then have several lengths."""
    with torch.no_grad():
        model.t5.lm_head.weight[1] *= 3
    return model.eval()


@pytest.mark.parametrize(("beams", "answers"), [(1, 1), (3, 1), (4, 3)])
@every_family
@torch.no_grad()
def test_answers_equal_those_of_stock_generation_on_padded_passages(
    family: str, beams: int, answers: int
) -> None:
    model = eager_to_end(reader(family))
    asked = [
        question for seed in range(6) for question in questions([[5, 9]], seed=seed)
    ] + questions()
    states, mask = fused(model.t5, asked)
    want = model.t5.generate(
        encoder_outputs=BaseModelOutput(states),
        attention_mask=mask,
        max_length=12,
        num_beams=beams,
        num_return_sequences=answers,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    how = Generation(12, num_beams=beams, num_answers=answers)
    made = model(generation=how, **packed(asked, [[1]] * len(asked)))
    ends = [ids.index(1) if 1 in ids else len(ids) for ids in want.sequences.tolist()]
    assert len(set(ends)) > 1, "answers of several lengths are the point"
    assert torch.equal(made["tokens"], want.sequences)
    assert made["tokens"].shape[0] == len(asked) * answers
    if beams > 1:
        assert_close(made["scores"], want.sequences_scores, **ANSWER_SCORES)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("how", [{}, {"cross_attention_every": 2}], ids=["whole", "sparse"])
@torch.no_grad()
def test_a_decoder_of_more_blocks_than_the_encoder_answers(how: Any, beams: int) -> None:
    config = T5Config(**SIZES | {"num_decoder_layers": 5})
    torch.manual_seed(3)
    stock: Any = lively(T5ForConditionalGeneration(config))
    with pytest.raises(IndexError):  # when this passes, cache_of may go
        stock.generate(torch.tensor([[5, 6]]), max_length=4, do_sample=False)
    model = FiD(stock, Reader(**how)).eval()
    batch = packed()
    got = model(generation=Generation(6, num_beams=beams), **batch)["tokens"]
    states = model.fuse(model.encode(batch), batch)
    want = stock.generate(
        encoder_outputs=BaseModelOutput(states),
        attention_mask=batch["fused_mask"],
        max_length=6,
        num_beams=beams,
        do_sample=False,
        use_cache=False,
    )
    assert torch.equal(got, want)


@torch.no_grad()
def test_the_encoder_runs_once_and_cross_attention_projects_once_per_answer() -> None:
    model, calls = reader().eval(), Counter[str]()
    first = {"encoder": model.t5.encoder.block[0].layer[0].SelfAttention.k}
    first["cross"] = model.t5.decoder.block[0].layer[1].EncDecAttention.k
    for name, module in first.items():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    model(generation=Generation(9), **packed())
    assert calls == {"encoder": 1, "cross": 1}


@torch.no_grad()
def test_the_old_position_bias_is_the_same_with_and_without_a_cache() -> None:
    model = reader(compat_cross_bias=True).eval()
    table = model.t5.decoder.block[0].layer[1].EncDecAttention.relative_attention_bias.weight
    table.normal_(std=3.0, generator=torch.Generator().manual_seed(2))
    batch = packed(questions([[6, 9], [8, 2]]), [[1], [1]], cross_width=9)
    cached = model(generation=Generation(10), **batch)["tokens"]
    states = model.fuse(model.encode(batch), batch)
    written = torch.zeros(2, 1, dtype=torch.int64)
    while written.shape[1] < cached.shape[1]:
        following = torch.cat([written[:, 1:], torch.zeros(2, 1, dtype=torch.int64)], dim=1)
        logits = model.head(model.decode(states, batch["fused_mask"], following)[:, -1])
        written = torch.cat([written, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(cached, written)
    table.zero_()
    assert not torch.equal(model(generation=Generation(10), **batch)["tokens"], cached)


# Low precision
# --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_fp16_is_clamped_where_the_stock_model_clamps_it() -> None:
    model, twin, asked = reader().half().eval(), t5().half().eval(), questions()
    for own in (model.t5, twin):
        for block in own.encoder.block[:2]:
            block.layer[0].SelfAttention.o.weight.mul_(2000)
            block.layer[1].DenseReluDense.wo.weight.mul_(60000)
    overflowed: list[bool] = []
    model.t5.encoder.block[1].layer[1].register_forward_hook(
        lambda *args: overflowed.append(bool(args[2].isinf().any()))
    )
    states, mask = padded_states(twin, asked)
    got = model.encode(packed(asked))
    assert overflowed == [True]
    assert got.isfinite().all()
    assert torch.equal(got, states[mask.bool()])


# Several ranks
# --------------------------------------------------------------------------------------------------

RANK_QUESTIONS = [
    questions([[5, 9]], seed=seed) for seed in (3, 0)
]  # their answers have unequal lengths
OPTIM = Optim(lr=0.1)


BEAMS = (1, 3)


def _answers_under_zero3() -> tuple[list[list[list[int]]], bool]:
    """This rank's answers to its own question, greedy and by beams, and whether the weights are
    spread over ranks.
    """
    from trainer.runtime import distributed
    from trainer.training.engine import Engine

    live = Engine(eager_to_end(reader()), ds_for(3, "fp32", distributed.world()), OPTIM)
    live.eval()
    is_spread = all(parameter.numel() == 0 for parameter in live.model.parameters())
    batch = packed(RANK_QUESTIONS[distributed.rank()], [[1]])
    with torch.no_grad():
        made = [
            live.model(generation=Generation(30, num_beams=beams, is_synced=True), **batch)
            for beams in BEAMS
        ]
    live.destroy()
    return [found["tokens"].tolist() for found in made], is_spread


def test_ranks_under_zero3_give_the_answers_of_one_rank_though_they_end_at_different_times() -> (
    None
):
    model = eager_to_end(reader())
    with torch.no_grad():
        want = [
            [
                model(generation=Generation(30, num_beams=beams), **packed(own, [[1]]))[
                    "tokens"
                ].tolist()
                for beams in BEAMS
            ]
            for own in RANK_QUESTIONS
        ]
    for short, long in zip(*want, strict=True):
        assert len(short[0]) < len(long[0])
    assert run_on_ranks(2, _answers_under_zero3) == [(answers, True) for answers in want]
