"""Requests: their bodies and parameters, read with limits, and the JSON error that refuses one."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import anyio
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from jobs.report.text import plain
from trainer.config.readers.json_text import finite, without_twins
from trainer.data.formats.json_text import half_of_pair

if TYPE_CHECKING:
    from jobs.serve.access import Client
    from jobs.serve.keeper import Keeper
    from jobs.serve.limits.shares import Shares
    from jobs.serve.offers import ServiceConfig

MAX_DEPTH = 32  # of JSON
MAX_ERRORS = 20  # in the message about one body
MAX_KEY = 255  # letters of an Idempotency-Key
Auto = Literal["auto"]
Epochs = Annotated[int, Field(ge=1, le=10_000)] | Auto
Batch = Annotated[int, Field(ge=1, le=1_000_000)] | Auto
Factor = Annotated[float, Field(gt=0, le=1e6)] | Auto
Beta = Annotated[float, Field(gt=0, le=1e3)] | Auto
MetaKey = Annotated[str, Field(max_length=64)]
MetaValue = Annotated[str, Field(max_length=512)]


def _of_text(values: dict[str, str]) -> dict[str, str]:
    for text in [*values, *values.values()]:
        if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError("text must have no NUL and no lone surrogate")
    return values


Metadata = Annotated[dict[MetaKey, MetaValue], Field(max_length=16), AfterValidator(_of_text)]


class PlainJSON(JSONResponse):
    """An answer in JSON whose values may come from files of other people (`plain`)."""

    def render(self, content: Any) -> bytes:
        """The body of the answer."""
        try:
            return super().render(content)
        except ValueError:  # half of a surrogate pair, or no finite number
            return super().render(plain(content))


class Refusal(Exception):
    """The reason why a request is refused. The message says got, want and fix."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """The `type` of this error in the OpenAI API."""
        words = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        return words.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )

    @property
    def body(self) -> dict[str, Any]:
        """The error in the format of the OpenAI API."""
        words = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": words}

    def response(self) -> PlainJSON:
        """The answer with the error."""
        # OpenAI's client repeats 409, 429 and 5xx by itself unless this header says false
        headers = {"x-should-retry": "true" if self.retry_after_s is not None else "false"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        return PlainJSON(self.body, self.status, headers)


class Body(BaseModel):
    """A JSON document of a client. Unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Hyperparameters(Body):
    """The hyper-parameters of a fine-tuning job."""

    n_epochs: Epochs | None = None
    batch_size: Batch | None = None
    learning_rate_multiplier: Factor | None = None


class PreferenceHyperparameters(Hyperparameters):
    """The same of a job that learns from preferences. beta: how closely it stays at its start."""

    beta: Beta | None = None


class Supervised(Body):
    """The method of learning from examples."""

    hyperparameters: Hyperparameters | None = None


class Preferences(Body):
    """The method of learning from preferences (DPO)."""

    hyperparameters: PreferenceHyperparameters | None = None


class Method(Body):
    """The method of tuning: by examples, or by preferences. Rewards are not offered."""

    type: Literal["supervised", "dpo"]
    supervised: Supervised | None = None
    dpo: Preferences | None = None

    @model_validator(mode="before")
    @classmethod
    def _rewards_are_not_served(cls, values: Any) -> Any:
        kind = cast("dict[str, Any]", values).get("type") if isinstance(values, dict) else None
        if kind == "reinforcement":
            raise ValueError(
                "'reinforcement' is not served: want 'supervised' or 'dpo'. Write graded answers "
                "as pairs, the better one as preferred_output, and use dpo"
            )
        return cast("Any", values)

    @model_validator(mode="after")
    def _has_one_block(self) -> Method:
        other = "dpo" if self.type == "supervised" else "supervised"
        if getattr(self, other) is not None:
            raise ValueError(f"a block {other!r} with type={self.type!r}: take one of them out")
        return self


class CreateJob(Body):
    """The request for a fine-tuning job. Source: openai 3.54, job_create_params.py."""

    model: Annotated[str, Field(max_length=256)]
    training_file: Annotated[str, Field(max_length=64)]
    validation_file: Annotated[str, Field(max_length=64)] | None = None
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    metadata: Metadata | None = None
    integrations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _has_one_value_of_each(self) -> CreateJob:
        """No value beside `method` would be lost."""
        beside, inside = self.hyperparameters, self.effective_hyperparameters
        for name in Hyperparameters.model_fields:
            value = getattr(beside, name, None)
            if value not in (None, "auto") and value != getattr(inside, name):
                raise ValueError(
                    f"hyperparameters.{name} is {value} beside `method` and "
                    f"{getattr(inside, name)} in it: give it inside `method` alone"
                )
        return self

    @property
    def effective_hyperparameters(self) -> Hyperparameters:
        """The hyper-parameters inside `method`; else those beside it, as older clients do."""
        method = self.method and (self.method.supervised or self.method.dpo)
        inner = method.hyperparameters if method is not None else None
        return inner or self.hyperparameters or Hyperparameters()

    @property
    def method_name(self) -> Literal["supervised", "dpo"]:
        """The method of tuning."""
        return "supervised" if self.method is None else self.method.type

    @property
    def beta(self) -> float | Auto | None:
        """How closely a job that learns from preferences stays at its start."""
        dpo = None if self.method is None else self.method.dpo
        inner = None if dpo is None else dpo.hyperparameters
        return None if inner is None else inner.beta

    def digest(self) -> str:
        """A digest that is the same for the same request."""
        # earlier versions, which have made jobs of the same requests, knew no method but one
        without = {"method": {"dpo"}} if self.method_name == "supervised" else None
        return hashlib.sha256(self.model_dump_json(exclude=without).encode()).hexdigest()


def idempotency_key(request: Request) -> str | None:
    """The key by which a repeated request is known; None without one. Refusal for a long one."""
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= MAX_KEY:
        raise Refusal(400, f"Idempotency-Key: want 1 to {MAX_KEY} letters.")
    return key


B = TypeVar("B", bound=Body)


async def read_body(request: Request, schema: type[B], config: ServiceConfig) -> B:
    """The JSON body of a request. The Refusal names every mistake in it."""
    values = await read_json_object(request, config)
    try:
        return schema.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        items = error.errors(include_url=False, include_context=False)
        lines: list[str] = []
        for item in items[:MAX_ERRORS]:
            place = ".".join(str(part) for part in item["loc"]) or "(the whole body)"
            if item["type"] == "extra_forbidden":
                lines.append(f"{place}: there is no such parameter. Remove it.")
            elif item["type"] == "missing":
                lines.append(f"{place}: required, but not given.")
            else:
                message = item["msg"].removeprefix("Value error, ")
                lines.append(f"{place}: got {quote(item['input'])}. {message}.")
        param = ".".join(str(part) for part in items[0]["loc"] if isinstance(part, str))
        raise Refusal(400, "\n".join(lines), param=param or None, code="invalid_value") from None


async def read_json_object(request: Request, config: ServiceConfig) -> dict[str, Any]:
    """The JSON object in a body. Refusal when it is too large, too slow, too deep, or no object."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, f"Content-Type: got {quote(kind)}, want application/json.")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "Content-Encoding: want none. Send the body as it is.")
    content = await read_content(request, config.max_body, config.body_s)
    try:
        value: Any = json.loads(
            content.decode(),
            object_pairs_hook=without_twins,
            parse_constant=finite,
            parse_float=_finite,
        )
    except UnicodeDecodeError:
        raise Refusal(400, "The body is not UTF-8. Encode it as UTF-8.") from None
    except RecursionError:
        raise Refusal(400, f"The JSON is nested more than {MAX_DEPTH} deep.") from None
    except ValueError as error:
        raise Refusal(400, f"The body is not valid JSON: {quote(str(error))}.") from None
    if not isinstance(value, dict):
        raise Refusal(400, f"The body is a JSON {type(value).__name__}, want an object.")
    if _is_deeper(value, MAX_DEPTH):
        raise Refusal(400, f"The JSON is nested more than {MAX_DEPTH} deep.")
    half = half_of_pair(value)
    if half is not None:
        raise Refusal(400, f"The body is not valid JSON: {half}.")
    return cast("dict[str, Any]", value)


async def read_content(request: Request, most: int, within_s: float) -> bytes:
    """The body of a request. Refusal when it has more than `most` bytes, or is too slow."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > most:
        raise Refusal(413, f"The body has {declared} bytes; at most {most} are allowed.")
    content = bytearray()
    try:
        with anyio.fail_after(within_s):
            async for block in request.stream():
                content += block
                if len(content) > most:
                    raise Refusal(413, f"The body is longer than {most} bytes.")
    except TimeoutError:
        raise Refusal(408, f"The body did not come within {within_s:.0f} s.") from None
    except ClientDisconnect:
        raise Refusal(400, "The body was cut off.") from None
    return bytes(content)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is larger than any number of 64 bits")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether dictionaries and lists are nested more than `depth` deep."""
    level: list[Any] = [value]
    for _ in range(depth):
        inner: list[Any] = []
        for item in level:
            values = cast("dict[str, Any]", item).values() if isinstance(item, dict) else item
            inner += [one for one in cast("Iterable[Any]", values) if isinstance(one, dict | list)]
        if not inner:
            return False
        level = inner
    return True


@dataclass(frozen=True)
class PageQuery:
    """The query parameters `after` and `limit` of a list."""

    after: str | None
    limit: int


def page_query(request: Request, *, usual: int, most: int) -> PageQuery:
    """The page of a list that a request names. Refusal for a malformed limit."""
    text = request.query_params.get("limit", str(usual))
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= most):
        raise Refusal(400, f"limit: got {quote(text)}, want 1 to {most}.", param="limit")
    return PageQuery(request.query_params.get("after"), int(text))


def one_of(request: Request, name: str, values: tuple[str, ...], usual: str | None) -> str | None:
    """A query parameter with one of a few values. Refusal for any other value."""
    text = request.query_params.get(name)
    if text is None:
        return usual
    if text not in values:
        raise Refusal(400, f"{name}: got {quote(text)}, want {' or '.join(values)}.", param=name)
    return text


def metadata_query(request: Request) -> tuple[dict[str, str] | None, bool]:
    """(the entries of the filter metadata[k]=v, whether the filter is metadata=null)."""
    entries: dict[str, str] = {}
    has_none = False
    for name, value in request.query_params.multi_items():
        if name == "metadata" and value == "null":
            has_none = True
        elif name.startswith("metadata[") and name.endswith("]"):
            entries[name[len("metadata[") : -1]] = value
        elif name.startswith("metadata"):
            raise Refusal(400, f"{quote(name)}: want metadata[key]=value.", param="metadata")
    return entries or None, has_none


def quote(value: Any) -> str:
    """A value for a message: quoted, printable, at most 80 characters."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def list_object(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page of a list in the format of the OpenAI API."""
    ids: Mapping[str, Any] = {
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
    return {"object": "list", "data": data, **ids, "has_more": has_more}


def keeper_of(request: Request) -> Keeper:
    """The keeper of the server that received the request."""
    return cast("Keeper", request.app.state.keeper)


def shares_of(request: Request) -> Shares:
    """How much of the server each client uses now, and may use."""
    return cast("Shares", request.app.state.shares)


def client_of(request: Request) -> Client:
    """The client that sent the request."""
    return cast("Client", request.state.client)


def is_operator(request: Request) -> bool:
    """Whether the client runs this server, so that it may see where files lie."""
    return client_of(request).is_operator


def writer_of(request: Request) -> Client:
    """The client that sent the request. Refusal when it may only read."""
    client = client_of(request)
    if client.role == "read":
        raise Refusal(403, f"{client.name} may only read. Use a token of the role run or admin.")
    return client
