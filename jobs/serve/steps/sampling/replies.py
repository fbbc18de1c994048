"""Questions for samples as a worker takes them, and its answers as the SDK reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.serve.answers.workers import ANSWER_BYTES
from jobs.serve.steps import wire
from jobs.serve.steps.bodies import AskSample, TokenTable
from jobs.serve.steps.datums import dense
from trainer.errors import DataError

Pairs = Sequence[tuple[int, float]]
NUMBER_BYTES = 36  # of a token with its log-probability, in the line of a worker
MOST_NUMBERS = (
    ANSWER_BYTES // NUMBER_BYTES
)  # of one answer; a worker would be ended at a longer one
_NO_LOGPROB = -99999.0
_ABSENT = -1  # in a table of tokens: nothing is asked of this cell


def question_of(body: AskSample, *, seed: int, max_tokens: int) -> dict[str, Any]:
    """What a worker is asked (texts/samples.py). DataError for what makes no sense.

    seed: the request's own, or the one that was drawn for it. max_tokens: of a prompt with its
    continuation.
    """
    prompt, how = body.prompt.tokens, body.sampling_params
    if not 1 <= len(prompt) < max_tokens:
        raise DataError(f"prompt: got {len(prompt)} tokens, want 1 to {max_tokens - 1}.")
    room = max_tokens - len(prompt)
    most = room if how.max_tokens is None else min(how.max_tokens, room)
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not (body.prompt_logprobs and last_n < len(prompt)):
        raise DataError(
            f"prompt_logprobs_last_n: got {last_n}, want 1 to {len(prompt) - 1}, with "
            "include_prompt_logprobs."
        )
    _refuse_large(body, len(prompt), most)
    if body.record_stability_info:
        raise DataError("record_stability_info: nothing is recorded here. Leave it out.")
    stop_tokens, stops = _stops(how.stop)
    return {
        "prompt": prompt,
        "num_samples": body.num_samples,
        "max_tokens": most,
        "temperature": how.temperature,
        "top_k": how.top_k,
        "top_p": how.top_p,
        "seed": seed,
        "stop_tokens": stop_tokens,
        "stops": stops,
        "topk": body.topk_sample_logprobs,
        "has_logprobs": bool(body.prompt_logprobs),
        "first": 1 if last_n is None else len(prompt) - last_n,
        "topk_prompt": body.topk_prompt_logprobs,
        "targets": _targets(body.target_prompt_logprobs, len(prompt)),
        "alternatives": body.prompt_alt_tokens_k,
    }


def _refuse_large(body: AskSample, prompt: int, most: int) -> None:
    """Return if an answer is one that a worker can give, however long its samples become; else
    DataError. prompt, most: tokens of the prompt, and of each sample at most.
    """
    of_prompt = prompt * (1 + body.topk_prompt_logprobs + body.prompt_alt_tokens_k)
    of_prompt += len(body.target_prompt_logprobs.data) if body.target_prompt_logprobs else 0
    count = of_prompt + body.num_samples * most * (1 + body.topk_sample_logprobs)
    if count > MOST_NUMBERS:
        raise DataError(
            f"num_samples={body.num_samples} of {most} tokens, with the likeliest tokens of each "
            f"place, may be {count} numbers, want at most {MOST_NUMBERS}. Ask for fewer samples, "
            "tokens (max_tokens) or likeliest tokens."
        )


def _stops(stop: str | list[str] | list[int] | None) -> tuple[list[int] | None, list[str]]:
    """(tokens that end a sample, None for the model's own; texts that end it)"""
    if stop is None:
        return None, []
    many: list[Any] = [stop] if isinstance(stop, str) else list(stop)
    if len(many) > 64:
        raise DataError(f"stop: got {len(many)} of them, want at most 64.")
    texts = [one for one in many if isinstance(one, str)]
    if any(not 1 <= len(one) <= 1000 for one in texts):
        raise DataError("stop: want texts of 1 to 1000 letters.")
    if texts:
        return None, texts
    return many, []


def _targets(table: TokenTable | None, length: int) -> list[list[int]]:
    """[place, token] of each cell of a table that asks for something, in the order of its cells."""
    if table is None:
        return []
    place, values = "target_prompt_logprobs", np.asarray(table.data, np.int64)
    if table.shape[0] != length - 1:
        raise DataError(
            f"{place}: got {table.shape[0]} rows, want {length - 1}: one for each token of the "
            "prompt but the first."
        )
    if table.sparse_crow_indices is not None:
        crow = np.asarray(table.sparse_crow_indices, np.int64)
        col = np.asarray(table.sparse_col_indices or [], np.int64)
        dense(values, crow, col, table.shape, place)  # raises where the indices are none
        rows = np.repeat(np.arange(length - 1), np.diff(crow))
    elif len(values) == table.shape[0] * table.shape[1]:
        rows = np.repeat(np.arange(length - 1), table.shape[1])
    else:
        raise DataError(f"{place}: {len(values)} numbers do not fill the shape {table.shape}.")
    pairs = zip(rows.tolist(), values.tolist(), strict=True)
    targets = [[row + 1, token] for row, token in pairs if token != _ABSENT]
    if not targets:
        raise DataError(f"{place}: names no token, want one or more.")
    return targets


def sample_output(body: AskSample, answer: Mapping[str, Any]) -> bytes:
    """The protobuf SampleResponse of a worker's answer."""
    message = wire.SampleResponse()
    for one in answer["sequences"]:
        sequence = message.sequences.add(
            stop_reason=wire.STOP if one["finish"] == "stop" else wire.LENGTH,
            tokens=np.asarray(one["tokens"], "<i4").tobytes(),
            logprobs=np.asarray(one["logprobs"], "<f4").tobytes(),
        )
        if body.topk_sample_logprobs:
            _fill_topk(sequence.topk_sampled_logprobs, one["topk"], body.topk_sample_logprobs)
    if body.prompt_logprobs:
        own = [np.nan if one is None else one for one in answer["prompt_logprobs"]]
        message.prompt_logprobs = np.asarray(own, "<f4").tobytes()
    if body.topk_prompt_logprobs:
        _fill_topk(message.topk_prompt_logprobs, answer["topk_prompt"], body.topk_prompt_logprobs)
    if body.target_prompt_logprobs is not None:
        _fill_targets(message.target_prompt_logprobs, body, answer["targets"])
    if body.prompt_alt_tokens_k:
        shape = [len(answer["alternatives"]), body.prompt_alt_tokens_k]
        pairs = [pair for row in answer["alternatives"] for pair in row]
        alternatives = message.prompt_alt_tokens
        tokens = np.asarray([token for token, _ in pairs], "<i8")
        logprobs = np.asarray([value for _, value in pairs], "<f4")
        _fill(alternatives.tokens, tokens, wire.INT64, shape)
        _fill(alternatives.logprobs, logprobs, wire.FLOAT32, shape)
    return message.SerializeToString()


def _fill(tensor: Any, values: NDArray[Any], dtype: int, shape: Sequence[int]) -> None:
    tensor.dense, tensor.dtype = values.tobytes(), dtype
    tensor.shape.extend(shape)


def _fill_topk(message: Any, rows: Sequence[Pairs | None], width: int) -> None:
    """A matrix of the likeliest tokens. Source of the marks of absence: `TopkLogprobs`."""
    tokens = np.zeros((len(rows), width), "<i4")
    logprobs = np.full((len(rows), width), _NO_LOGPROB, "<f4")
    for number, row in enumerate(rows):
        for at, (token, value) in enumerate(row or ()):
            tokens[number, at], logprobs[number, at] = token, value
    message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()
    message.k, message.length = width, len(rows)


def _fill_targets(tensor: Any, body: AskSample, scores: Sequence[float]) -> None:
    """The scores in the shape and layout in which the tokens were sent; 0 where none was named."""
    table = body.target_prompt_logprobs
    assert table is not None, "the caller has looked"
    tokens = np.asarray(table.data, np.int64)
    values = np.zeros(len(tokens), "<f4")
    values[tokens != _ABSENT] = scores
    if table.sparse_crow_indices is None:
        _fill(tensor, values, wire.FLOAT32, table.shape)
        return
    tensor.dtype = wire.FLOAT32
    tensor.shape.extend(table.shape)
    tensor.sparse_csr.values = values.tobytes()
    tensor.sparse_csr.crow_indices = np.asarray(table.sparse_crow_indices, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.asarray(table.sparse_col_indices or [], "<i8").tobytes()
