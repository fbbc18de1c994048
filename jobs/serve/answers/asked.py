"""What clients ask of a model: the bodies of their requests. Source: openai 3.54.

Each parameter is obeyed, or taken because it changes no answer, or refused by its name: nothing
that would change an answer is passed over in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from jobs.serve.answers.messages import Message
from jobs.serve.requests import Body, Refusal, quote

MAX_INPUTS = 2048  # texts of one request, as at OpenAI
MAX_TOKENS = 32_768  # of an answer; a request may allow more, and gets no more
MAX_CHOICES, MAX_BEST, MAX_LOGPROBS = 128, 20, 20
MAX_CONTEXTS = 256
Text = Annotated[str, Field(min_length=1, max_length=200_000)]
ModelId = Annotated[str, Field(max_length=256)]
Weights = Literal["final", "base"]  # trained, or as they were before
Limit = Annotated[int, Field(ge=1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[str, Field(pattern=r"^(0|[1-9]\d{0,8})$")]  # one key for each token
Bias = Annotated[float, Field(ge=-100, le=100)]
Taken = Any  # changes no answer: who asks, where it is kept, how soon it comes


def only(want: str, *values: Any) -> BeforeValidator:
    """Takes null and `values` of a parameter, of which any other value would change the answer.
    want: what to send instead.
    """

    def check(value: Any) -> Any:
        if value is None or value in values:
            return value
        raise PydanticCustomError("not_offered", "{want}", {"want": want})

    return BeforeValidator(check)


def _inputs(value: Any) -> list[Any]:
    """A text, texts, token ids, or lists of token ids: as a list of texts or of lists of ids."""
    values = cast("list[Any]", value) if isinstance(value, list) else [value]
    if _are_tokens(value):
        values = [values]
    if not 1 <= len(values) <= MAX_INPUTS:
        want = f"Want 1 to {MAX_INPUTS} of them, and these are {len(values)}"
        raise PydanticCustomError("inputs", "{want}", {"want": want})
    is_texts = all(isinstance(one, str) and one for one in values)
    if not is_texts and not all(_are_tokens(one) for one in values):
        want = "Want a text that is not empty, a list of such, token ids, or lists of token ids"
        raise PydanticCustomError("inputs", "{want}", {"want": want})
    return values


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_tokens(value: Any) -> bool:
    values = cast("list[Any]", value) if isinstance(value, list) else []
    return bool(values) and all(_is_token(one) for one in values)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Inputs = Annotated[list[Any], BeforeValidator(_inputs)]


class AskEmbeddings(Body):
    """A request for the vectors of texts. side: which of the two encoders of a retriever to use."""

    model: ModelId
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    side: Literal["query", "passage"] = "query"
    weights: Weights = "final"
    user: Taken = None


class AskScores(Body):
    """A request for the plausibility of statements."""

    model: ModelId
    statements: Annotated[list[Text], Field(min_length=1, max_length=MAX_CONTEXTS)]
    weights: Weights = "final"


class StreamOptions(Body):
    """What a stream tells besides its pieces."""

    include_usage: bool | None = None
    include_obfuscation: Taken = None


class AskText(Body):
    """What requests to continue a text and to answer a chat have in common. contexts: passages for
    a reader.
    """

    model: ModelId
    max_tokens: Limit | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[Annotated[list[Text], Field(max_length=4)] | None, BeforeValidator(_listed)] = (
        None
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    contexts: Annotated[list[Text], Field(max_length=MAX_CONTEXTS)] | None = None
    weights: Weights = "final"
    user: Taken = None

    @property
    def num_answers(self) -> int:
        """The answers to each prompt."""
        return self.n or 1

    @property
    def num_texts(self) -> int:
        """The texts that are generated for each prompt."""
        return self.num_answers

    def how(self) -> dict[str, Any]:
        """How the model continues, in the words of its process; of a reader, only some are."""
        names = ("frequency_penalty", "presence_penalty", "logit_bias", "top_p")
        values = {name: getattr(self, name) for name in names}
        given = {name: value for name, value in values.items() if value is not None}
        return {
            **given,
            "n": self.num_texts,
            "temperature": self.temperature,
            "stop": self.stop or [],
        }

    def beyond_readers(self) -> list[str]:
        """The parameters that a reader, which answers one question in one piece, cannot obey."""
        values: dict[str, Any] = {
            "n": self.num_texts > 1,
            "top_p": self.top_p not in (None, 1),
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": self.logit_bias,
        }
        return [name for name, value in values.items() if value]


class AskCompletion(AskText):
    """A request to continue texts."""

    prompt: Inputs
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_BEST)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Annotated[Any, only("A text is continued, and never filled in. Leave it out")] = None

    @model_validator(mode="after")
    def _agrees(self) -> AskCompletion:
        if self.best_of is not None and self.best_of < self.num_answers:
            text = f"best_of: got {self.best_of}, want at least n={self.num_answers}."
            raise Refusal(400, text, param="best_of")
        if self.num_texts > self.num_answers and self.stream:
            text = "best_of: the best texts are known at the end, and not while they grow. "
            raise Refusal(400, text + "Leave out stream.", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise Refusal(400, "max_tokens: got 0, want 1 or more, or echo.", param="max_tokens")
        if len(self.prompt) * self.num_texts > MAX_INPUTS:
            text = f"{len(self.prompt)} prompts with {self.num_texts} texts each are more than "
            raise Refusal(400, f"{text}{MAX_INPUTS} texts. Send fewer prompts.", param="prompt")
        return self

    @property
    def num_texts(self) -> int:
        """The texts that are generated for each prompt: the answers are the best of them."""
        return self.best_of or self.num_answers

    def how(self) -> dict[str, Any]:
        """How the model continues, in the words of its process."""
        chosen = self.num_texts > self.num_answers
        logprobs = 0 if chosen and self.logprobs is None else self.logprobs
        return {**super().how(), "logprobs": logprobs, "echo": bool(self.echo)}

    def beyond_readers(self) -> list[str]:
        """The parameters that a reader cannot obey."""
        is_one_text = len(self.prompt) == 1 and isinstance(self.prompt[0], str)
        values = {
            "echo": self.echo,
            "logprobs": self.logprobs is not None,
            "prompt": not is_one_text,
        }
        more = [name for name, value in values.items() if value]
        return [*super().beyond_readers(), *more]


class Function(Body):
    """A function that the model may call. parameters: the JSON schema of an object."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _takes_an_object(self) -> Function:
        kind = (self.parameters or {}).get("type", "object")
        if kind != "object":
            text = f"tools: got the type {quote(kind)} of the parameters of {self.name}, want "
            raise Refusal(400, f"{text}'object', whose properties they are.", param="tools")
        return self


class Tool(Body):
    """A tool that the model may call: a function."""

    type: Literal["function"]
    function: Function


class JsonSchema(Body):
    """The schema that an answer follows."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Taken = None  # the schema holds in any case


class ResponseFormat(Body):
    """What an answer is: text, or JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            text = f"response_format: json_schema belongs to the type json_schema, got {self.type}."
            raise Refusal(400, text, param="response_format")
        return self

    @property
    def wanted_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for a text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


def _choice(value: Any) -> Any:
    """tool_choice as a word, or the name of a function in a dictionary of its own."""
    if value is None or value in ("none", "auto", "required"):
        return value
    named = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    function = named.get("function")
    name = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
    if named.get("type") != "function" or not isinstance(name, str):
        want = 'Want "none", "auto", "required" or {"type": "function", "function": {"name"}}'
        raise PydanticCustomError("tool_choice", "{want}", {"want": want})
    return {"name": name}


class AskChat(AskText):
    """A request for the next message of a chat."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Annotated[Any, BeforeValidator(_choice)] = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    functions: Annotated[Any, only("Give the functions in tools", [])] = None
    function_call: Annotated[Any, only("Give tool_choice", "none")] = None
    reasoning_effort: Annotated[Any, only("No effort can be set here", "none")] = None
    verbosity: Annotated[Any, only("Say it in a message", "medium")] = None
    modalities: Annotated[Any, only('Answers are text: ["text"]', ["text"], [])] = None
    audio: Annotated[Any, only("Answers are text. Leave it out")] = None
    web_search_options: Annotated[Any, only("Nothing is searched here. Leave it out")] = None
    moderation: Annotated[Any, only("No answer is moderated here. Leave it out")] = None
    metadata: Taken = None
    prediction: Taken = None
    prompt_cache_key: Taken = None
    prompt_cache_options: Taken = None
    prompt_cache_retention: Taken = None
    safety_identifier: Taken = None
    service_tier: Taken = None
    store: Taken = None

    @model_validator(mode="after")
    def _agrees(self) -> AskChat:
        if self.messages[-1].role == "assistant":
            text = "messages: the last one is of the assistant, who speaks next. End with another."
            raise Refusal(400, text, param="messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, "top_logprobs: want logprobs true beside it.", param="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            text = f"max_tokens: got {self.max_tokens} beside max_completion_tokens, which is "
            text += f"{self.max_completion_tokens}. Give one of them."
            raise Refusal(400, text, param="max_tokens")
        self._check_tools()
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens of the answer, if the request says so; the older name means the same."""
        return self.max_completion_tokens or self.max_tokens

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or []]
        choice = self.tool_choice
        if len({*names}) < len(names):
            raise Refusal(400, "tools: two have one name. Name each otherwise.", param="tools")
        if isinstance(choice, dict) and choice["name"] not in names:
            text = f"tool_choice: got {choice['name']!r}, want one of tools: {', '.join(names)}."
            raise Refusal(400, text, param="tool_choice")
        if choice == "required" and not names:
            raise Refusal(400, "tool_choice: got 'required', want tools.", param="tool_choice")
        if not self.has_tools:
            return
        if self.wanted_schema is not None:
            text = "response_format: JSON and tools are not offered in one request. Give one."
            raise Refusal(400, text, param="response_format")
        is_strict = any(tool.function.strict for tool in self.tools or [])
        if is_strict and choice in (None, "auto"):
            text = (
                "tools: strict holds where tool_choice forces a call. Give tool_choice 'required' "
                "or a function, or leave out strict."
            )
            raise Refusal(400, text, param="tools")

    @property
    def has_tools(self) -> bool:
        """Whether the model may call a tool."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def wanted_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for a text."""
        return self.response_format.wanted_schema if self.response_format is not None else None

    def how(self) -> dict[str, Any]:
        """How the model continues, in the words of its process."""
        more: dict[str, Any] = {"schema": self.wanted_schema}
        if self.logprobs:
            more["logprobs"] = self.top_logprobs or 0
        if self.has_tools:
            choice = self.tool_choice or "auto"
            more["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools or []]
            more["tool_choice"] = choice["name"] if isinstance(choice, dict) else choice
            more["parallel_tool_calls"] = self.parallel_tool_calls is not False
        return {**super().how(), **more}

    def beyond_readers(self) -> list[str]:
        """The parameters that a reader cannot obey; it reads one message, of the user."""
        is_one = len(self.messages) == 1 and self.messages[0].role == "user"
        values: dict[str, Any] = {
            "logprobs": self.logprobs,
            "tools": self.has_tools,
            "response_format": self.wanted_schema,
            "messages": not is_one,
        }
        more = [name for name, value in values.items() if value]
        return [*super().beyond_readers(), *more]


Ask = AskEmbeddings | AskText | AskScores
