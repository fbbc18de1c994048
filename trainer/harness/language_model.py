"""A trained language model as lm-eval's LM: its HFLM around the module that is loaded already.

Only this file and lm_eval.py import lm-eval, and nobody imports them before tasks of it are asked
for. Tokens, windows, few-shot examples and the texts of answers are lm-eval's own; ours are the
forward, which reads rows as one packed stream, and how ranks share the requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    normalize_gen_kwargs,
)

from trainer.data.chat.writer import CLOCK, pinned
from trainer.errors import ConfigError
from trainer.models.decoder.streams import Read
from trainer.models.head import OutputLayer
from trainer.models.packed.layout import pack
from trainer.runtime import distributed
from trainer.runtime.batch import to_device

# A request of lm-eval: what it is called in its cache, and the tokens of context and continuation.
TokenRequest = tuple[Any, list[int], list[int]]
# A log-probability, and whether greedy decoding would write the same.
ContinuationScore = tuple[float, bool]
log = logging.getLogger(__name__)


class TrainedLM(HFLM):
    """Answers lm-eval's requests with a loaded model of transformers, on all ranks of a launcher.

    lm-eval sees one rank: it would share rows itself, but pads the shares with rows that run twice,
    and joins them in another order, so that bootstrapped errors depend on the number of ranks.
    """

    def __init__(self, base: Any, task: Any, *, batch: int) -> None:
        """base: a model with an output layer, in evaluation mode, which may hold adapters. task: it
        was trained by. batch: rows per device and forward.
        """
        words = logging.getLogger("lm_eval.models.huggingface")
        level = words.level
        words.setLevel(logging.ERROR)  # it warns of a model that is loaded already
        super().__init__(
            pretrained=base,
            tokenizer=task.tokenizer,
            batch_size=batch,
            softmax_dtype="float32",
            chat_template_args=dict(CLOCK),
        )
        words.setLevel(level)
        self._task = task
        # None: lm-eval's own forward of padded rows
        self._read: Read | None = task.reader(getattr(base, base.base_model_prefix))
        self._output = OutputLayer(base)

    # Requests, shared by the ranks
    # ----------------------------------------------------------------------------------------------

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[ContinuationScore]:
        answers = self._shared(super().loglikelihood, requests)
        return [(log_probability, is_greedy) for log_probability, is_greedy in answers]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return self._shared(super().loglikelihood_rolling, requests)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        for one in requests:
            # a task may call it max_new_tokens, max_tokens or max_completion_tokens as well
            most = normalize_gen_kwargs(one.args[1], self.max_gen_toks)["max_gen_toks"]
            if most >= self.max_length:
                raise ConfigError(
                    f"{one.task_name}: its answers have up to {most} tokens, and the model "
                    f"{self.max_length} positions for question and answer. Leave the task out."
                )
        return self._shared(super().generate_until, requests)

    def _shared(self, answer: Callable[..., list[Any]], requests: list[Any]) -> list[Any]:
        """The answers to all requests, in order, each computed by one rank. Those of one row go to
        the same rank, for its choices have tokens in common.
        """
        rows: dict[Any, int] = {}
        owners: list[int] = []
        for one in requests:
            number = rows.setdefault((one.task_name, one.doc_id), len(rows))
            owners.append(number % distributed.world())
        own = [
            one for one, owner in zip(requests, owners, strict=True) if owner == distributed.rank()
        ]
        computed = answer(own, disable_tqdm=not distributed.is_main()) if own else []
        by_rank = [iter(of_rank) for of_rank in distributed.gather(computed)]
        return [next(by_rank[owner]) for owner in owners]

    # Forward
    # ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _loglikelihood_tokens(
        self,
        requests: Sequence[TokenRequest],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[ContinuationScore]:
        """The score of each continuation behind its context. Tokens that several requests begin
        with alike and read alike, such as those before the letters of four choices, run once.
        """
        if self._read is None:
            return super()._loglikelihood_tokens(
                requests, disable_tqdm=disable_tqdm, override_bs=override_bs
            )
        rows: dict[tuple[int, ...], list[int]] = {}  # tokens that are read: requests
        num_cut = 0
        for number, (_, context, continuation) in enumerate(requests):
            ids = [*context, *continuation]
            num_cut += len(ids) > self.max_length + 1
            if len(continuation) > self.max_length:
                raise ConfigError(
                    f"an answer of {len(continuation)} tokens is longer than the model's "
                    f"{self.max_length} positions. Leave its task out."
                )
            rows.setdefault(tuple(ids[-(self.max_length + 1) : -1]), []).append(number)
        if num_cut:
            log.warning(
                "%d of %d questions with an answer are longer than the model's %d positions: their "
                "beginning is cut",
                num_cut,
                len(requests),
                self.max_length,
            )
        order = sorted(rows, key=len, reverse=True)
        batch = int(self.batch_size)
        scores: dict[int, ContinuationScore] = {}
        for start in range(0, len(order), batch):
            of_batch = {ids: rows[ids] for ids in order[start : start + batch]}
            continuations = {
                number: requests[number][2] for of_row in of_batch.values() for number in of_row
            }
            scores |= self._scores_of_rows(of_batch, continuations)
        return [scores[number] for number in range(len(requests))]

    def _scores_of_rows(
        self, rows: dict[tuple[int, ...], list[int]], continuations: dict[int, list[int]]
    ) -> dict[int, ContinuationScore]:
        """By request, the score of its continuation.

        rows: tokens that are read, and the requests whose continuation is the last of them and one
        more.
        """
        assert self._read is not None
        packed = pack([*rows], bucketed=True)
        del packed["passage"]
        hidden_MD = self._read(to_device(packed))
        stops = np.cumsum([len(ids) for ids in rows])
        numbers: list[int] = []
        places: list[np.ndarray] = []
        for stop, of_row in zip(stops, rows.values(), strict=True):
            for number in of_row:
                numbers.append(number)
                places.append(np.arange(stop - len(continuations[number]), stop))
        device = hidden_MD.device
        place_N = torch.from_numpy(np.concatenate(places)).to(device)
        target_N = torch.tensor([id for number in numbers for id in continuations[number]])
        log_probabilities, is_greedy = self._log_probabilities(
            hidden_MD, place_N, target_N.to(device)
        )
        scores: dict[int, ContinuationScore] = {}
        start = 0
        for number in numbers:
            stop = start + len(continuations[number])
            total = float(log_probabilities[start:stop].sum())
            scores[number] = (total, bool(is_greedy[start:stop].all()))
            start = stop
        return scores

    def _log_probabilities(
        self, hidden_MD: torch.Tensor, place_N: torch.Tensor, target_N: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """(N,) fp64 log-probabilities of targets behind the states at `place_N`, and (N,) whether
        each is the most likely token. Few logits are there at once.
        """
        chunk = self._output.chunk
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for place, target in zip(place_N.split(chunk), target_N.split(chunk), strict=True):
            logits = self._output(hidden_MD.index_select(0, place)).float()
            of_target = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
            parts.append((of_target.double(), logits.argmax(-1) == target))
        columns = zip(*parts, strict=True)
        log_probabilities, is_first = (torch.cat(column).cpu().numpy() for column in columns)
        return log_probabilities, is_first

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **how: Any) -> Any:
        how.setdefault("eos_token_id", self._task.ends)  # those that an export writes down
        return super()._model_generate(context, max_length, stop, **how)

    # Texts
    # ----------------------------------------------------------------------------------------------

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        pinned(self.tokenizer.get_chat_template(None, None))  # on the day of its training
        return super().apply_chat_template(chat_history, add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """Nothing: lm-eval would ask the Hub for a model of this name."""
        return {}
