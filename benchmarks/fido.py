"""How much faster a Fusion-in-Decoder reader answers with FiDO's two switches (arXiv 2212.08153),
and what stock transformers makes of the same question.

    python benchmarks/fido.py [--size base] [--contexts 100] [--passage_tokens 250]
    [--answer_tokens 50] [--every 6] [--precision fp32] [--rounds 5] [--whole_rounds 2]
    [--clock wall|cpu] [--json]

One question with `contexts` passages of random tokens, none shorter than the others, and a T5 with
random weights: nothing is read from disk. Four answer it greedily, in turns: the reader as
published (off), with both switches (on), and stock T5.generate with the dynamic and with the static
cache.
First from encoded passages, which is what FiDO changes; the step that projects the keys and values
of all passages is in it, and is timed alone, too. Then from token ids, encoder included. Exits 1
when off and stock write other answers, or when on does not write the answer of a stock T5 with the
same numbers in it, for then they do not do the work that they should.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # runs from a checkout that is not installed

import torch
from fid_contestants import SIZES, shrink_embeddings
from races import environment, race_parser
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput
from workload import SEED

from trainer.models.base_model import DTYPES
from trainer.protocol.task import Batch
from trainer.tasks.fid.config import Reader
from trainer.tasks.fid.fused_layout import pack
from trainer.tasks.fid.model import FiD, Generation

# B questions (one), S tokens of all passages, D width

OFF, ON, STOCK, STATIC = "off", "on", "stock", "stock static"
TARGET = 3.0  # times the answers/s of the reader as published, from encoded passages
VOCABULARY = 32128

Turn = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """What all of them answer."""

    size: str
    contexts: int
    passage_tokens: int
    answer_tokens: int  # the start token counts
    every: int
    precision: str

    def t5(self) -> Any:
        """The same random T5 every time."""
        torch.manual_seed(SEED)
        config = T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **SIZES[self.size])
        t5 = T5ForConditionalGeneration(config).eval()
        shrink_embeddings(t5)
        return t5.to(DTYPES[self.precision])

    def ids(self) -> Tensor:
        """(contexts, passage_tokens) random ids, none of them special."""
        generator = torch.Generator().manual_seed(SEED)
        shape = (self.contexts, self.passage_tokens)
        return torch.randint(10, VOCABULARY - 128, shape, generator=generator)

    @property
    def switches(self) -> Reader:
        return Reader(cross_attention_every=self.every, cross_attention_multi_query=True)


class Ours:
    """Our reader, with the switches or without."""

    def __init__(self, work: Work, reader: Reader) -> None:
        self._work, self._model = work, FiD(work.t5(), reader).eval()
        self._batch: Batch = pack([work.ids().tolist()], bucketed=True)

    def encoded(self) -> Tensor:
        """(1, S, D) states of the passages."""
        return self._model.fuse(self._model.encode(self._batch), self._batch)

    def answer(self, fused_BSD: Tensor, answer_tokens: int) -> list[int]:
        how = Generation(answer_tokens)
        made = self._model._generate(fused_BSD, self._batch["fused_mask"], how)
        return made["tokens"][0].tolist()

    def kept_bytes(self, fused_BSD: Tensor) -> int:
        """Of the keys and values that writing an answer reads for every token."""
        cache = self._model.t5.decoder(
            input_ids=torch.zeros(1, 1, dtype=torch.int64),
            encoder_hidden_states=fused_BSD,
            encoder_attention_mask=self._batch["fused_mask"],
            use_cache=True,
        ).past_key_values.cross_attention_cache
        layers = [layer for layer in cache.layers if layer.is_initialized]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


class Stock:
    """A stock T5 that generates from fused states."""

    def __init__(self, t5: Any, work: Work, cache: str | None = None) -> None:
        """cache: an implementation that generate() knows; None: its default, the dynamic one."""
        self._t5, self._ids, self._cache = t5, work.ids(), cache

    def encoded(self) -> Tensor:
        states = self._t5.encoder(input_ids=self._ids).last_hidden_state
        return states.view(1, -1, states.shape[-1])

    def answer(self, fused_BSD: Tensor, answer_tokens: int) -> list[int]:
        made = self._t5.generate(
            encoder_outputs=BaseModelOutput(last_hidden_state=fused_BSD),
            attention_mask=torch.ones(fused_BSD.shape[:2], dtype=torch.int64),
            max_length=answer_tokens,
            num_beams=1,
            do_sample=False,
            cache_implementation=self._cache,
        )
        return made[0].tolist()


@torch.no_grad()
def twin_of(work: Work) -> Any:
    """A stock T5 that computes what the switched reader does: what a block without cross-attention
    adds is 0, and the keys and values of all heads are equal.
    """
    t5 = work.t5()
    for number, block in enumerate(t5.decoder.block, start=1):
        heads = block.layer[1].EncDecAttention
        if number % work.every:
            heads.o.weight.zero_()
            continue
        for part in (heads.k, heads.v):
            of_heads = part.weight.float().unflatten(0, (heads.n_heads, -1))
            part.weight.copy_(of_heads.mean(0, keepdim=True).expand_as(of_heads).flatten(0, 1))
    return t5


def check(work: Work, contestants: dict[str, Any]) -> None:
    """Exits 1 when an answer is not the one that it should be, or ends early."""
    fused_BSD = contestants[OFF].encoded()
    answers = {
        name: contestant.answer(fused_BSD, work.answer_tokens)
        for name, contestant in contestants.items()
    }
    wanted = dict.fromkeys((OFF, STATIC), answers[STOCK])
    wanted[ON] = Stock(twin_of(work), work).answer(fused_BSD, work.answer_tokens)
    for name, answer in wanted.items():
        if answers[name] != answer or len(answer) != work.answer_tokens:
            raise SystemExit(f"{name} answers {answers[name]}, want {answer}: this is other work")
    for name in (OFF, ON):
        mib = contestants[name].kept_bytes(fused_BSD) / 2**20
        print(
            f"{name}: keys and values of the passages take {mib:.1f} MiB, its answer begins "
            f"{answers[name][:8]}",
            file=sys.stderr,
        )


# Timing
# --------------------------------------------------------------------------------------------------


@dataclass
class Race:
    """The turns of several at one kind of work."""

    name: str
    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)

    def run(self, turns: dict[str, Turn], rounds: int) -> Race:
        for number in range(rounds):
            for name in list(turns)[:: 1 if number % 2 else -1]:
                wall, cpu = time.perf_counter(), time.process_time()
                turns[name]()
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                print(f"{self.name}: {name} {wall:.2f} s, cpu {cpu:.2f} s", file=sys.stderr)
                self.wall_s.setdefault(name, []).append(wall)
                self.cpu_s.setdefault(name, []).append(cpu)
        return self

    def seconds(self, clock: str) -> dict[str, float]:
        """The median of each."""
        found = {"wall": self.wall_s, "cpu": self.cpu_s}[clock]
        return {name: statistics.median(values) for name, values in found.items()}

    def ratios(self, clock: str, over: str) -> list[float]:
        """How many times longer `over` took than the switched reader: least, median, most of the
        rounds.
        """
        found = {"wall": self.wall_s, "cpu": self.cpu_s}[clock]
        each = [theirs / ours for theirs, ours in zip(found[over], found[ON], strict=True)]
        return [min(each), statistics.median(each), max(each)]


def measure(work: Work, *, rounds: int, whole_rounds: int) -> list[Race]:
    """The races, the first of which the target is about."""
    t5 = work.t5()
    contestants = {
        OFF: Ours(work, Reader()),
        ON: Ours(work, work.switches),
        STOCK: Stock(t5, work),
        STATIC: Stock(t5, work, cache="static"),
    }
    check(work, contestants)  # which also warms everything up
    fused_BSD = contestants[OFF].encoded()

    def answering(name: str, answer_tokens: int) -> Turn:
        return lambda: contestants[name].answer(fused_BSD, answer_tokens)

    def reading(name: str) -> Turn:
        return lambda: contestants[name].answer(contestants[name].encoded(), work.answer_tokens)

    races = [
        Race(f"{tokens - 1} token{'s' * (tokens > 2)}, encoded").run(
            {name: answering(name, tokens) for name in contestants}, rounds
        )
        for tokens in (work.answer_tokens, 2)
    ]
    whole = {name: reading(name) for name in (OFF, ON, STOCK)}
    named = f"{work.answer_tokens - 1} tokens, with encoder"
    return [*races, Race(named).run(whole, whole_rounds)]


# The command
# --------------------------------------------------------------------------------------------------


def table(races: list[Race], judge: str) -> str:
    """The races line by line. judge: the clock that the target is held against."""
    lines = [f"{'':24s}{'':7s}{OFF:>9s}{ON:>9s}{STOCK:>9s}{'static':>9s}   off / on"]
    for number, race in enumerate(races):
        for clock in ("wall", "cpu"):
            seconds = race.seconds(clock)
            cells = [
                f"{seconds[name]:9.2f}" if name in seconds else " " * 9
                for name in (OFF, ON, STOCK, STATIC)
            ]
            low, median, high = race.ratios(clock, OFF)
            verdict = ""
            if number == 0 and clock == judge:
                verdict = f"   target {TARGET:g} {'met' if median >= TARGET else 'missed'}"
            lines.append(
                f"{race.name if clock == 'wall' else '':24s}{clock + ' s':7s}{''.join(cells)}"
                f"   {median:.2f} ({low:.2f}-{high:.2f}){verdict}"
            )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = race_parser("Fusion-in-Decoder with and without FiDO's switches.")
    made.add_argument("--size", choices=tuple(SIZES), default="base", help="of a random T5")
    made.add_argument("--contexts", type=int, default=100, help="passages of the question")
    made.add_argument("--passage_tokens", type=int, default=250)
    made.add_argument("--answer_tokens", type=int, default=50, help="with the start token")
    made.add_argument("--every", type=int, default=6, help="reader.cross_attention_every")
    made.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    made.add_argument("--rounds", type=int, default=5, help="timed turns of each")
    made.add_argument("--whole_rounds", type=int, default=2, help="the same, encoder included")
    return made


@torch.no_grad()
def main() -> None:
    options = parser().parse_args()
    shape = ("size", "contexts", "passage_tokens", "answer_tokens", "every", "precision")
    work = Work(**{name: getattr(options, name) for name in shape})
    races = measure(work, rounds=options.rounds, whole_rounds=options.whole_rounds)
    if options.json:
        found = {race.name: {"wall_s": race.wall_s, "cpu_s": race.cpu_s} for race in races}
        print(json.dumps({"environment": environment(), "races": found}, indent=1))
        return
    print(environment())
    print(
        f"T5 {work.size}, random weights, {work.precision}; one question, {work.contexts} passages "
        f"of {work.passage_tokens} tokens; on: cross-attention in every {work.every}th block, one "
        f"head of keys and values; {options.rounds} and {options.whole_rounds} rounds; answers are "
        "as they should be"
    )
    print(table(races, options.clock))


if __name__ == "__main__":
    main()
