"""The JSON documents that the Tinker SDK sends. Source: tinker 0.38.0, types/.

A key that the SDK does not have is an error: nothing that a client says is passed over in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jobs.serve.requests import Body
from jobs.serve.steps.names import NAME

Id = Annotated[str, Field(max_length=128)]
Path = Annotated[str, Field(max_length=400)]
Seq = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(pattern=rf"^{NAME}$")]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Tokens = list[Int64]
MetaTexts = Annotated[
    dict[Annotated[str, Field(max_length=128)], Annotated[Any, Field()]], Field(max_length=64)
]
# One hour to ten years, as the SDK documents it.
Ttl = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]
MAX_SAMPLES = 128


class ClientVersion(Body):
    """Asks for the configuration of a client."""

    sdk_version: Annotated[str, Field(max_length=64)]


class CreateSession(Body):
    """Begins a session."""

    tags: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=64)]
    user_metadata: MetaTexts | None = None
    sdk_version: Annotated[str, Field(max_length=64)]
    project_id: Annotated[str, Field(max_length=128)] | None = None
    display_name: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["create_session"] = "create_session"


class SessionBeat(Body):
    """Says that the client of a session lives."""

    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Body):
    """How a client's program ended."""

    type: Literal["success", "errored", "interrupted"]


class FinishSession(Body):
    """Ends a session."""

    reason: FinishReason
    detail: Annotated[str, Field(max_length=4096)] | None = None


class AdapterWish(Body):
    """Which adapters a run trains."""

    rank: Annotated[int, Field(ge=1, le=1024)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _trains(self) -> AdapterWish:
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError(
                "nothing would be trained: want one of train_attn, train_mlp, train_unembed"
            )
        return self


class OptimizerWish(Body):
    """The optimizer of a run."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    """Begins a training run."""

    session_id: Id
    model_seq_id: Seq
    base_model: Annotated[str, Field(max_length=256)]
    user_metadata: MetaTexts | None = None
    lora_config: AdapterWish
    optimizer_config: OptimizerWish = OptimizerWish()
    type: Literal["create_model"] = "create_model"


class LoadWeights(Body):
    """Loads saved weights: into a run, or (session_id, model_seq_id) into a new one."""

    model_id: Id | None = None
    seq_id: Seq | None = None
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    base_model: Annotated[str, Field(max_length=256)] | None = None
    user_metadata: MetaTexts | None = None
    path: Path
    optimizer: bool
    optimizer_config: OptimizerWish | None = None
    weights_access_token: Annotated[str, Field(max_length=512)] | None = None
    type: Literal["load_weights"] = "load_weights"

    @model_validator(mode="after")
    def _has_one_address(self) -> LoadWeights:
        of_run = self.model_id is not None and self.seq_id is not None
        of_new = self.session_id is not None and self.model_seq_id is not None
        if of_run == of_new:
            raise ValueError("want model_id with seq_id, or session_id with model_seq_id")
        return self


class AdamWish(Body):
    """One step of Adam with decoupled weight decay. grad_clip_norm: 0 clips nothing."""

    learning_rate: Annotated[float, Field(ge=0, le=1e3)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0, le=1)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class OptimStep(Body):
    """A step of the optimizer."""

    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None
    optim_params: dict[str, Any] | None = None
    model_id: Id
    seq_id: Seq
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(Body):
    """Saves the weights and the optimizer of a run."""

    model_id: Id
    path: Annotated[str, Field(max_length=400)] | None = None
    seq_id: Seq
    ttl_seconds: Int64 | None = None
    overwrite: bool = False
    user_metadata: MetaTexts | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveForSampler(Body):
    """Saves the weights of a run for samplers, by a name or for one sampling session."""

    model_id: Id
    path: Annotated[str, Field(max_length=400)] | None = None
    sampling_session_seq_id: Seq | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: Seq
    ttl_seconds: Int64 | None = None
    user_metadata: MetaTexts | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveExternal(Body):
    """Saves the weights of a run as files for other programs."""

    model_id: Id
    path: Annotated[str, Field(max_length=400)]
    seq_id: Seq
    ttl_seconds: Int64 | None = None
    age_encryption_recipients: Annotated[list[str], Field(max_length=10)] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class ModelWish(Body):
    """Asks about a run, or ends it."""

    model_id: Id
    type: Literal["get_info", "unload_model"] | None = None


class RetrieveFuture(Body):
    """Asks for the result of a request."""

    request_id: Id
    allow_metadata_only: bool = False
    model_id: Id | None = None


class SamplerTarget(Body):
    """One client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    cloned_sampler_id: Seq = 0


class RetrieveFutures(Body):
    """Asks which requests of a sampling session have ended since a cursor."""

    target: SamplerTarget
    prev_cursor: Annotated[int, Field(ge=0)] = 0
    timeout: Annotated[float, Field(ge=0, le=3600)] | None = None
    retrieved_request_ids: Annotated[list[Id], Field(max_length=100_000)] = Field(
        default_factory=list
    )


class CancelFuture(Body):
    """Gives up a request."""

    request_id: Id


class CreateSampler(Body):
    """Begins a sampling session."""

    session_id: Id
    sampling_session_seq_id: Seq
    base_model: Annotated[str, Field(max_length=256)] | None = None
    model_path: Path | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"

    @model_validator(mode="after")
    def _has_model(self) -> CreateSampler:
        if self.base_model is None and self.model_path is None:
            raise ValueError("want base_model or model_path")
        return self


class JoinSampler(Body):
    """Asks for a number of its own for one more client of a sampling session."""

    sampling_session_id: Id
    type: Literal["join_sampling_session"] = "join_sampling_session"


class PromptChunk(Body):
    """A part of a prompt. Only token ids are taken; other types are refused by their names."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: Tokens


class Prompt(Body):
    """A prompt."""

    chunks: Annotated[list[PromptChunk], Field(max_length=10_000)]

    @property
    def tokens(self) -> Tokens:
        """All token ids, in order."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingWish(Body):
    """How tokens are drawn. stop: None ends at the model's own end tokens, [] at no token."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0


class TokenTable(Body):
    """An int64 tensor of token ids, as JSON; sparse CSR with its indices."""

    data: Annotated[list[Int64], Field(max_length=1_000_000)]
    dtype: Literal["int64"]
    shape: Annotated[list[Seq], Field(min_length=2, max_length=2)]
    sparse_crow_indices: Annotated[list[Int64], Field(max_length=1_000_001)] | None = None
    sparse_col_indices: Annotated[list[Int64], Field(max_length=1_000_000)] | None = None


class AskSample(Body):
    """Asks for continuations of a prompt, as token ids."""

    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt: Prompt
    sampling_params: SamplingWish
    base_model: Annotated[str, Field(max_length=256)] | None = None
    model_path: Path | None = None
    sampling_session_id: Id
    seq_id: Annotated[int, Field(ge=0, lt=2**63)]
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=100)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=100)] = 0
    target_prompt_logprobs: TokenTable | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=100)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class CopyWeights(Body):
    """Copies saved weights into a run of their own, which is not trained."""

    session_id: Id | None = None
    model_seq_id: Seq | None = None
    destination_project_id: Annotated[str, Field(max_length=128)] | None = None
    source_path: Path
    ttl_seconds: Ttl | None = None
    weights_access_token: Annotated[str, Field(max_length=512)] | None = None


class WeightsInfo(Body):
    """Asks what saved weights are."""

    tinker_path: Path


class SetTtl(Body):
    """Sets when saved weights expire; None: never."""

    ttl_seconds: Ttl | None = None


class SearchOwner(Body):
    """Whose sessions to look for."""

    type: Literal["own", "accessible", "user"]
    owner_urns: Annotated[list[str], Field(min_length=1, max_length=10)] | None = None


class StatusQuery(Body):
    """A status of sessions."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[list[str], Field(max_length=3)] | None = None


class SearchCursor(Body):
    """Behind which session the next page starts."""

    last_created_at: Annotated[str, Field(max_length=64)]
    last_session_id: Id


class SearchSessions(Body):
    """A search of sessions, newest first."""

    session_id: Id | None = None
    project_ids: Annotated[list[str], Field(max_length=100)] | None = None
    user_metadata: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    display_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    owner: SearchOwner = SearchOwner(type="own")
    statuses: Annotated[list[StatusQuery], Field(min_length=1, max_length=10)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None
