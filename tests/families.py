"""What holds for every family of bases and task: as numbers, for tests that bound them and for the
table of benchmarks/families.py that prints them.

A pair is (what is ours, what it must be), two tensors of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from tests.bases import OF_TASK, VOCABULARY, base_of, wider, with_uneven_norms
from tests.contract.runs import from_folder, losses, published, train
from tests.facts import experiment
from tests.numerics.test_packed_decoder import packed_of, padded_of
from trainer import tasks
from trainer.config.schema import RandomBase
from trainer.data.padding import pad_right
from trainer.models import base_model, base_source
from trainer.models.decoder.streams import reader_of, why_not
from trainer.models.losses import IGNORED, scored_before
from trainer.models.packed.layout import pack, pack_labelled, pack_targets
from trainer.protocol.task import DRAW, EPOCH, Places
from trainer.tasks.causal_lm.task import CausalLM
from trainer.tasks.cross_attention.config import Layers
from trainer.tasks.cross_attention.decoder.model import CrossAttentionModel
from trainer.tasks.fid.config import Reader
from trainer.tasks.fid.fused_layout import pack as fused
from trainer.tasks.fid.model import FiD
from trainer.tasks.retriever.config import Encoder
from trainer.tasks.retriever.model import Retriever, is_causal, packed
from trainer.tasks.summariser.model import Summariser
from trainer.tasks.vera.model import Verifier, read_by

# B rows, L tokens, D width

Pair = tuple[Tensor, Tensor]
KINDS: dict[str, base_model.Kind] = {
    "cross_attention": "causal_lm",
    "causal_lm": "causal_lm",
    "vera": "encoder",
    "retriever": "encoder",
    "summariser": "seq2seq_lm",
    "fid": "seq2seq_lm",
}
LENGTHS, CONTEXTS, TARGETS = [9, 3, 12], [[7, 4], [1], [11]], [4, 2, 19]
PASSAGES = [[7, 4], [1, 9], [11, 3]]  # of each question
END, PAD = 0, 1
# Six products a block, four blocks, sums over the inner width; a gradient passes them twice.
DEPTH = 6 * 4 * 48


def ids_of(lengths: list[int], seed: int) -> list[list[int]]:
    """Rows of random ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def rows() -> tuple[list[list[int]], list[list[list[int]]]]:
    """Three rows of a decoder, and the chunks of their contexts."""
    return ids_of(LENGTHS, 3), [ids_of(chunks, 4 + at) for at, chunks in enumerate(CONTEXTS)]


def base(task: str, name: str) -> Any:
    """The base of a task as transformers makes it, in evaluation: random weights, uneven norms."""
    places = Places(None, Path("unused"), Path("unused"))
    random = RandomBase(**base_of(task, name))
    with torch.random.fork_rng():
        torch.manual_seed(2)
        loaded = base_model.load(random, places, precision="fp32", kind=KINDS[task])
        return with_uneven_norms(loaded).eval()


# Against stock transformers
# --------------------------------------------------------------------------------------------------


def with_stock(task: str, name: str) -> Pair:
    """The loss of a task's model (vera, retriever: its states) and that of the stock model, which
    reads rows with pads.
    """
    with torch.no_grad():
        return _WITH_STOCK[task](base(task, name))


def _decoder_batch() -> dict[str, Tensor]:
    ids, mask = pad_right(ids_of(LENGTHS, 3), PAD)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, IGNORED),
    }


def padded_for_causal_lm() -> dict[str, Tensor]:
    """As the task pads rows of a base that reads no streams."""
    batch = _decoder_batch()
    return batch | {"scored": scored_before(batch["labels"])}


def streams_for_causal_lm() -> dict[str, Tensor]:
    """The same rows as one stream."""
    ids = ids_of(LENGTHS, 3)
    return pack_labelled(ids, [[1] * len(row) for row in ids])


def streaming(stock: Any) -> CausalLM:
    """A causal LM that reads streams, and rows with pads as well."""
    return CausalLM(stock, reader_of(getattr(stock, stock.base_model_prefix)))


def _stock_loss(stock: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The summed loss as a stock causal LM computes it."""
    places = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return stock(**batch, position_ids=places, num_items_in_batch=torch.tensor(1)).loss


def _cross_attention_with_stock(stock: Any) -> Pair:
    want = _stock_loss(stock, _decoder_batch())
    # new layers start at zero
    layers = Layers(count=4, stride=1, width=16, heads=2, after=False)
    model = CrossAttentionModel(stock, layers).eval()
    found = model(packed=packed_of(*rows(), labels_from=[0, 0, 0])).loss
    assert found is not None
    return found, want


def _causal_lm_with_stock(stock: Any) -> Pair:
    want = _stock_loss(stock, _decoder_batch())
    return streaming(stock)(**streams_for_causal_lm())["loss"], want


def _vera_with_stock(stock: Any) -> Pair:
    batch = _decoder_batch()
    states_BLD = stock(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).last_hidden_state
    want_BD = torch.stack([row[n - 1] for row, n in zip(states_BLD, LENGTHS, strict=True)])
    return Verifier(stock, seed=3).eval()(**read_by(ids_of(LENGTHS, 3)))["hidden"], want_BD


def _retriever(stock: Any) -> Retriever:
    pooling = "eos" if is_causal(stock.config) else "mean"
    how = Encoder(pooling=pooling, normalize=True)
    if why_not(stock.config) is not None:
        return Retriever(stock, None, how=how).eval()
    read = reader_of(stock)
    return Retriever(stock, None, how=how, read={"query": read, "passage": read}).eval()


def texts_for_retriever(stock: Any, *, is_packed: bool) -> dict[str, Tensor]:
    """Queries as the task lays them out."""
    if is_packed and why_not(stock.config) is None:
        return packed(ids_of(LENGTHS, 3), "query", size=2)
    ids, mask = pad_right(ids_of(LENGTHS, 3), PAD)
    return {"query_ids": ids, "query_mask": mask}


def _retriever_with_stock(stock: Any) -> Pair:
    """Stock: decoders read rows padded on the left, as Qwen3-Embedding's card does."""
    ids, mask = pad_right(ids_of(LENGTHS, 3), PAD)
    found_BD = _retriever(stock)(**texts_for_retriever(stock, is_packed=True))["queries"]
    if is_causal(stock.config):
        ids, mask = (padded_left(ids_of(LENGTHS, 3), x) for x in (PAD, None))
    states_BLD = stock(input_ids=ids, attention_mask=mask).last_hidden_state
    mean_BD = (states_BLD * mask[..., None]).sum(1) / mask.sum(1)[:, None]
    pooled_BD = states_BLD[:, -1] if is_causal(stock.config) else mean_BD
    return found_BD, F.normalize(pooled_BD, dim=-1)


def padded_left(sequences: list[list[int]], pad: int | None) -> Tensor:
    """(B, L) ids that end together; pad None: their mask."""
    width = max(map(len, sequences))
    rows = [
        [0 if pad is None else pad] * (width - len(ids)) + ([1] * len(ids) if pad is None else ids)
        for ids in sequences
    ]
    return torch.tensor(rows)


def _targets() -> Tensor:
    ids, mask = pad_right(ids_of(TARGETS, 5), PAD)
    return ids.masked_fill(mask == 0, IGNORED)


def _seq2seq_batch() -> dict[str, Tensor]:
    ids, mask = pad_right(ids_of(LENGTHS, 3), PAD)
    return {"input_ids": ids, "attention_mask": mask, "labels": _targets()}


def _summariser_with_stock(stock: Any) -> Pair:
    want = stock(**_seq2seq_batch()).loss * sum(TARGETS)
    return _summed(stock, streams_for_summariser(stock)), want


def _summed(stock: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return Summariser(stock).eval()(**batch)["loss"]


def streams_for_summariser(stock: Any) -> dict[str, Tensor]:
    """Rows as the task lays them out."""
    if why_not(stock.config) is not None:
        return _seq2seq_batch()
    return pack(ids_of(LENGTHS, 3), bucketed=True) | targets_for_decoder()


def targets_for_decoder() -> dict[str, Tensor]:
    return pack_targets(ids_of(TARGETS, 5))


def _fid_with_stock(stock: Any) -> Pair:
    """A question with one passage is a row of an encoder-decoder."""
    batch = fused([[ids] for ids in ids_of(LENGTHS, 3)], bucketed=True)
    found = FiD(stock, Reader()).eval()(**batch, **targets_for_decoder())["loss"]
    return found, stock(**_seq2seq_batch()).loss * sum(TARGETS)


_WITH_STOCK: dict[str, Callable[[Any], Pair]] = {
    "cross_attention": _cross_attention_with_stock,
    "causal_lm": _causal_lm_with_stock,
    "vera": _vera_with_stock,
    "retriever": _retriever_with_stock,
    "summariser": _summariser_with_stock,
    "fid": _fid_with_stock,
}

# Packed against padded
# --------------------------------------------------------------------------------------------------


def is_padded(task: str, name: str) -> bool:
    """Whether rows are padded: there, rows together are held against each row alone."""
    places = Places(None, Path("unused"), Path("unused"))
    config = base_source.config_of(RandomBase(**base_of(task, name)), places)
    return why_not(config) is not None


def with_padded(task: str, name: str) -> Pair:
    """What a packed batch gives and what a padded one does; where is_padded(), rows together and
    each alone.
    """
    with torch.no_grad():
        return _WITH_PADDED[task](base(task, name))


def _cross_attention_with_padded(stock: Any) -> Pair:
    layers = Layers(count=2, stride=2, heads=4, initialisation="published")
    model = CrossAttentionModel(stock, layers).eval()
    padded = model(**padded_of(*rows(), labels_from=[0, 0, 0])).loss
    packed = model(packed=packed_of(*rows(), labels_from=[0, 0, 0])).loss
    assert packed is not None
    assert padded is not None
    return packed, padded


def _causal_lm_with_padded(stock: Any) -> Pair:
    model = streaming(stock)
    return model(**streams_for_causal_lm())["loss"], model(**padded_for_causal_lm())["loss"]


def _vera_with_padded(stock: Any) -> Pair:
    model = Verifier(stock, seed=3).eval()
    ids, mask = pad_right(ids_of(LENGTHS, 3), PAD)
    padded = model(input_ids=ids, attention_mask=mask)
    packed = model(**read_by(ids_of(LENGTHS, 3)))
    return packed["hidden"], padded["hidden"]


def _fid_with_padded(stock: Any) -> Pair:
    """Padded: every passage is encoded in a rectangle, and the decoder sees the rectangles side by
    side.
    """
    questions = [ids_of(lengths, 7 + at) for at, lengths in enumerate(PASSAGES)]
    batch = fused(questions, bucketed=True)
    found = FiD(stock, Reader()).eval()(**batch, **targets_for_decoder())["loss"]
    ids, mask = pad_right([passage for question in questions for passage in question], PAD)
    states = stock.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
    given = {
        "encoder_outputs": BaseModelOutput(last_hidden_state=_side_by_side(states)),
        "attention_mask": _side_by_side(mask),
    }
    return found, stock(**given, labels=_targets()).loss * sum(TARGETS)


def _side_by_side(x: Tensor) -> Tensor:
    """(B * P, L, ...) of passages -> (B, P * L, ...) of questions."""
    return x.unflatten(0, (len(PASSAGES), -1)).flatten(1, 2)


def _retriever_with_padded(stock: Any) -> Pair:
    model = _retriever(stock)
    padded = model(**texts_for_retriever(stock, is_packed=False))["queries"]
    if why_not(stock.config) is None:
        return model(**texts_for_retriever(stock, is_packed=True))["queries"], padded
    lone = [torch.tensor([text]) for text in ids_of(LENGTHS, 3)]
    alone = [model(query_ids=x, query_mask=torch.ones_like(x))["queries"][0] for x in lone]
    return padded, torch.stack(alone)


def _summariser_with_padded(stock: Any) -> Pair:
    batch = _seq2seq_batch()
    if why_not(stock.config) is None:
        return _summed(stock, streams_for_summariser(stock)), _summed(stock, batch)
    alone: list[Tensor] = []
    for row, widths in enumerate(zip(LENGTHS, LENGTHS, TARGETS, strict=True)):
        names = ("input_ids", "attention_mask", "labels")
        own = {n: batch[n][row : row + 1, :width] for n, width in zip(names, widths, strict=True)}
        alone.append(_summed(stock, own))
    return _summed(stock, batch), torch.stack(alone).sum()


_WITH_PADDED: dict[str, Callable[[Any], Pair]] = {
    "cross_attention": _cross_attention_with_padded,
    "causal_lm": _causal_lm_with_padded,
    "vera": _vera_with_padded,
    "retriever": _retriever_with_padded,
    "summariser": _summariser_with_padded,
    "fid": _fid_with_padded,
}

# Files
# --------------------------------------------------------------------------------------------------

FILES = ("one file", "shards", "pickle", "bf16")


def write(model: Any, folder: Path, files: str) -> None:
    """Save a model as one of FILES; pickle: pytorch_model.bin and no safetensors."""
    if files == "pickle":
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        return
    model.to(torch.bfloat16 if files == "bf16" else torch.float32)
    model.save_pretrained(folder, max_shard_size="20KB" if files == "shards" else "1GB")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (files == "shards")


def wrongly_read(task: str, name: str, files: str, folder: Path) -> list[str]:
    """The weights that the task's base does not have as they were written, as published: a T5 with
    its decoder.
    """
    random = RandomBase(**base_of(task, name))
    places = Places(None, folder / "cache", folder)
    written = published(random, places)
    write(written, folder / "base", files)
    read = base_model.load(str(folder / "base"), places, precision="fp32", kind=KINDS[task])
    body = written.base_model_prefix
    wanted = {
        of.removeprefix(f"{body}."): weight
        for of, weight in written.named_parameters(remove_duplicate=False)  # a tied one has two
    }
    return [
        of
        for of, weight in read.named_parameters()
        if not torch.equal(weight, wanted[of.removeprefix(f"{body}.")].float())
    ]


# Runs
# --------------------------------------------------------------------------------------------------

STEPS = {"steps": 4, "eval_every": 4, "save_every": 4, "eval_batch": 11, "global_batch": 4}
PADDED_VOCABULARY = 448  # the tokenizer of tests/facts.py has 384


def experiment_on(task: str, name: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Four steps of a task, or of a form of it (facts.FORMS), on a random base of the table, whose
    vocabulary is padded.
    """
    stated = base_of(task.partition(", ")[0], name, vocab_size=PADDED_VOCABULARY)
    if task in ("cross_attention", "causal_lm"):
        stated["config"] |= {"initializer_range": 0.05}
    own: dict[str, Any] = {"base": stated, "train": STEPS, "optim": {"lr": 1e-3}}
    if task == "retriever" and is_causal(base_source.random_config(RandomBase(**stated))):
        own |= {"encoder": {"pooling": "eos"}, "data": {"append_eos": True}}
    if name == "byt5":
        own |= {"tokenizer": _bytes(folder / "byt5")}
        if task == "summariser":  # a byte is a token
            own |= {"data": {"source_tokens": 128, "target_tokens": 32}}
    return experiment(task, folder, **(own | changes))


def _bytes(folder: Path) -> str:
    """ByT5's tokenizer in a folder, as published."""
    if not folder.is_dir():
        transformers.ByT5Tokenizer().save_pretrained(folder)
    return str(folder)


def runs(
    values: dict[str, dict[str, Any]], folder: Path, savedir: Path, stage: int
) -> dict[str, tuple[Path, list[float]]]:
    """(run folder, losses) of each experiment, trained on the ranks of this process group."""
    trained = {name: train(each, folder, savedir, stage) for name, each in values.items()}
    return {name: (run_folder, losses(lines)) for name, (run_folder, lines) in trained.items()}


def experiments(task: str, names: tuple[str, ...], folder: Path, bases: Path) -> dict[str, Any]:
    """By family: its experiment, the base a folder of several files."""
    return {name: from_folder(experiment_on(task, name, folder), bases) for name in names}


def weights_in_stock(task: str, export: Path) -> dict[str, Tensor]:
    """The weights of the stock model that transformers loads from an exported folder.

    AssertionError when it misses one of them, or a file holds one that it does not take.
    """
    build = {
        "causal_lm": transformers.AutoModelForCausalLM,
        "vera": transformers.AutoModel,
        "retriever": transformers.AutoModel,
        "summariser": transformers.AutoModelForSeq2SeqLM,
        "fid": transformers.AutoModelForSeq2SeqLM,
    }[task]
    config = transformers.AutoConfig.from_pretrained(export)
    if config.is_encoder_decoder and KINDS[task] == "encoder":
        build = transformers.AutoModelForTextEncoding
    model, info = build.from_pretrained(export, output_loading_info=True)
    missing = {of for of in info["missing_keys"] if not of.startswith("pooler.")}
    assert not missing, missing
    assert not info["unexpected_keys"], info["unexpected_keys"]
    for of, tensor in load_file(export / "model.safetensors").items():
        assert torch.equal(model.get_parameter(of), tensor), of
    named = model.named_parameters()
    return {of: weight.detach() for of, weight in named if of not in info["missing_keys"]}


def read_again(values: dict[str, Any], folder: Path, export: Path) -> None:
    """AssertionError unless an export can be read by those it is for: stock transformers, or, of
    cross_attention, which exports its added layers alone, the task itself.
    """
    if values["task"] != "cross_attention":
        weights_in_stock(values["task"], export)
        return
    task: Any = tasks.load(tasks.parse(values), Places(folder, folder / "cache", folder))
    model = task.load_export(export)
    added = {of: x for of, x in model.state_dict().items() if of.startswith("cross_attn_layers.")}
    files = [load_file(path) for path in export.glob("*.safetensors")]
    in_files = [tensor for file in files for tensor in file.values()]
    assert len(added) == len(in_files) > 0
    assert all(any(torch.equal(x, other) for other in in_files) for x in added.values())


# The plan of memory
# --------------------------------------------------------------------------------------------------

LIMITS: dict[str, dict[str, Any]] = {
    "cross_attention": {"decoder_tokens": 192, "context_tokens": 192},
    "causal_lm": {"max_tokens": 256},
    "vera": {"max_tokens": 96},
    "retriever": {"query_tokens": 64, "passage_tokens": 192},
    "summariser": {"source_tokens": 256, "target_tokens": 64},
    "fid": {"passage_tokens": 128, "target_tokens": 32},
}


@dataclass(frozen=True)
class TaskStep:
    """A training step of a task on a family that is four times as wide as in the table, over two
    rows that fill their limits; for benchmarks/memory_plan.py.
    """

    task: str
    name: str
    folder: Path  # of write_facts
    precision: Literal["fp32", "master", "autocast"] = "fp32"

    @cached_property
    def _task(self) -> Any:
        limits = LIMITS[self.task.partition(", ")[0]]
        values: Any = experiment_on(self.task, self.name, self.folder, data=limits)
        values["base"]["config"] = wider(values["base"]["config"])
        return tasks.load(
            tasks.parse(values), Places(self.folder, self.folder / "cache", self.folder)
        )

    def model_on(self, device: str) -> nn.Module:
        model = self._task.skeleton() if device == "meta" else self._task.model()
        return model.train()

    def rows(self) -> dict[str, Tensor]:
        row = {**self._task.encode(self._task.specimen()), DRAW: [5], EPOCH: [0]}
        return self._task.collate([row, row])

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        (loss,) = self._task.losses(model, [batch])
        return loss


def supported() -> dict[str, tuple[str, ...]]:
    """By task: the names of its families in the table."""
    return {task: tuple(table) for task, table in OF_TASK.items()}
