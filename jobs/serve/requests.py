"""What a request may hold, read with limits; and how one is refused: one JSON error."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from jobs.serve.access import Client
    from jobs.serve.keeper import Keeper
    from jobs.serve.offers import ServiceConfig

MAX_DEPTH = 32  # of JSON
MAX_ERRORS = 20  # told of one body
Auto = Literal["auto"]
Epochs = Annotated[int, Field(ge=1, le=10_000)] | Auto
Batch = Annotated[int, Field(ge=1, le=1_000_000)] | Auto
Factor = Annotated[float, Field(gt=0, le=1e6)] | Auto
MetaKey = Annotated[str, Field(max_length=64)]
MetaValue = Annotated[str, Field(max_length=512)]


class Refusal(Exception):
    """A request that is not served. The message says got, want and fix."""

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
        """The word that the OpenAI API has for it."""
        known = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        return known.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )

    def response(self) -> JSONResponse:
        """The error as the OpenAI API shows one."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        # its client repeats what may go away by itself: 409, 429 and from 500 on
        headers = {"x-should-retry": "true" if self.retry_after_s is not None else "false"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        return JSONResponse({"error": error}, self.status, headers)


class Body(BaseModel):
    """A JSON document of a client: unknown keys and other types are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Hyperparameters(Body):
    """Of a fine-tuning job."""

    n_epochs: Epochs | None = None
    batch_size: Batch | None = None
    learning_rate_multiplier: Factor | None = None


class Supervised(Body):
    """Learning from examples."""

    hyperparameters: Hyperparameters | None = None


class Method(Body):
    """How it is tuned: by examples. Preferences and rewards are not offered."""

    type: Literal["supervised"]
    supervised: Supervised | None = None


class CreateJob(Body):
    """A fine-tuning job that is asked for. Source: openai 3.54, job_create_params.py."""

    model: Annotated[str, Field(max_length=256)]
    training_file: Annotated[str, Field(max_length=64)]
    validation_file: Annotated[str, Field(max_length=64)] | None = None
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    metadata: Annotated[dict[MetaKey, MetaValue], Field(max_length=16)] | None = None
    integrations: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("metadata")
    @classmethod
    def _is_text(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for text in [*(value or {}), *(value or {}).values()]:
            if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
                raise ValueError("a NUL, or half of a surrogate pair, is no text")
        return value

    @property
    def chosen(self) -> Hyperparameters:
        """Those of `method`, or the ones beside it, as older clients send them."""
        method = self.method.supervised if self.method is not None else None
        inner = method.hyperparameters if method is not None else None
        return inner or self.hyperparameters or Hyperparameters()

    def digest(self) -> str:
        """The same for the same request."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


B = TypeVar("B", bound=Body)


async def read_body(request: Request, schema: type[B], config: ServiceConfig) -> B:
    """The JSON body of a request. Refusal names every mistake in it."""
    values = await read_json_object(request, config)
    try:
        return schema.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        items = error.errors(include_url=False, include_context=False)
        lines = [_mistake(cast("dict[str, Any]", item)) for item in items[:MAX_ERRORS]]
        param = ".".join(str(part) for part in items[0]["loc"] if isinstance(part, str))
        raise Refusal(400, "\n".join(lines), param=param or None, code="invalid_value") from None


def _mistake(item: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in item["loc"]) or "(the whole body)"
    if item["type"] == "extra_forbidden":
        return f"{place}: there is no such parameter. Leave it out."
    if item["type"] == "missing":
        return f"{place}: required, but not given."
    return f"{place}: got {shown(item['input'])}. {item['msg']}."


async def read_json_object(request: Request, config: ServiceConfig) -> dict[str, Any]:
    """The JSON object in a body. Refusal: too large, too slow, too deep, no object."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, f"Content-Type: got {shown(kind)}, want application/json.")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "Content-Encoding: want none. Send the body as it is.")
    content = await _content(request, config)
    try:
        value: Any = json.loads(
            content.decode(), object_pairs_hook=_without_twins, parse_constant=_no_number
        )
    except UnicodeDecodeError:
        raise Refusal(400, "The body is not UTF-8. Encode it so.") from None
    except RecursionError:
        raise Refusal(400, f"The JSON is nested more than {MAX_DEPTH} deep.") from None
    except ValueError as error:
        raise Refusal(400, f"The body is no JSON that is taken: {shown(str(error))}.") from None
    if not isinstance(value, dict):
        raise Refusal(400, f"The body is a JSON {type(value).__name__}, want an object.")
    if _is_deeper(value, MAX_DEPTH):
        raise Refusal(400, f"The JSON is nested more than {MAX_DEPTH} deep.")
    return cast("dict[str, Any]", value)


async def _content(request: Request, config: ServiceConfig) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > config.max_body:
        raise Refusal(413, f"The body has {declared} bytes, at most {config.max_body} are taken.")
    content = bytearray()
    try:
        with anyio.fail_after(config.body_s):
            async for block in request.stream():
                content += block
                if len(content) > config.max_body:
                    raise Refusal(413, f"The body is longer than {config.max_body} bytes.")
    except TimeoutError:
        raise Refusal(408, f"The body did not come within {config.body_s:.0f} s.") from None
    except ClientDisconnect:
        raise Refusal(400, "The body was cut off.") from None
    return bytes(content)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether dictionaries and lists lie in each other more than `depth` deep."""
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
class PageAsked:
    """`after` and `limit` of a list."""

    after: str | None
    limit: int


def page_asked(request: Request, *, usual: int, most: int) -> PageAsked:
    """What part of a list a request wants. Refusal for a limit that is none."""
    text = request.query_params.get("limit", str(usual))
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= most):
        raise Refusal(400, f"limit: got {shown(text)}, want 1 to {most}.", param="limit")
    return PageAsked(request.query_params.get("after"), int(text))


def one_of(request: Request, name: str, values: tuple[str, ...], usual: str | None) -> str | None:
    """A query parameter that has one of a few values. Refusal for another one."""
    text = request.query_params.get(name)
    if text is None:
        return usual
    if text not in values:
        raise Refusal(400, f"{name}: got {shown(text)}, want {' or '.join(values)}.", param=name)
    return text


def metadata_asked(request: Request) -> tuple[dict[str, str] | None, bool]:
    """(entries that a list is filtered by: metadata[k]=v, whether metadata=null was asked for)."""
    found: dict[str, str] = {}
    has_none = False
    for name, value in request.query_params.multi_items():
        if name == "metadata" and value == "null":
            has_none = True
        elif name.startswith("metadata[") and name.endswith("]"):
            found[name[len("metadata[") : -1]] = value
        elif name.startswith("metadata"):
            raise Refusal(400, f"{shown(name)}: want metadata[key]=value.", param="metadata")
    return found or None, has_none


def shown(value: Any) -> str:
    """A value as messages show it: at most 80 characters, printable."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def list_object(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page of a list as the OpenAI API shows one."""
    ids: Mapping[str, Any] = {
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
    return {"object": "list", "data": data, **ids, "has_more": has_more}


def keeper_of(request: Request) -> Keeper:
    """The keeper of the server that got the request."""
    return cast("Keeper", request.app.state.keeper)


def client_of(request: Request) -> Client:
    """Who sent it."""
    return cast("Client", request.state.client)


def writer_of(request: Request) -> Client:
    """Who sent it. Refusal for one that may only read."""
    client = client_of(request)
    if client.role == "read":
        raise Refusal(403, f"{client.name} may only read. Use a token of the role run or admin.")
    return client


def tuned_job(request: Request, name: str) -> dict[str, Any]:
    """The job that made a model which this client sees. Refusal for any other name."""
    job = keeper_of(request).index.job_of_model(name)
    if job is None or not client_of(request).sees(job["lathe"]["owner"]):
        text = f"The model {shown(name)} does not exist, or is not yours."
        raise Refusal(404, text, param="model", code="model_not_found")
    return job
