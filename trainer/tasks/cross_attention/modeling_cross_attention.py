"""A language model whose inserted layers read a context. Lathe writes this file beside the weights
that it exports; it imports torch and transformers alone, and runs on transformers 4.57 and 5.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    context = model.read(tokenizer, ["a text", "another"])  # encoded once, asked often
    print(model.answer(tokenizer, "a question", context))

The base is a stock model of transformers, and is called as one; hooks on its blocks add what the
inserted layers attend to. What only training needs (dropout, packed rows) is not here.
Source of the arithmetic: XC-Cache (ServiceNow), as published for each family of bases.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.hub import cached_file

# B batch, N context chunks, L context tokens, T decoder tokens, D base width, H heads, K head size

_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
_NOT_OF_BASE = ("adapter_kwargs", "code_revision", "trust_remote_code", "_commit_hash")
_WITHIN = "./base"  # the base lies in the folder itself


class LatheCrossAttentionConfig(PretrainedConfig):
    """config.json: where the base is, what the inserted layers are, how texts are written."""

    model_type = "lathe_cross_attention"

    def __init__(
        self,
        base: Any = None,
        base_config: dict[str, Any] | None = None,
        layers: dict[str, Any] | None = None,
        text: dict[str, Any] | None = None,
        has_adapters: bool = False,
        **more: Any,
    ) -> None:
        """base: a folder, a Hub id, "./base", or {"config", "seed"} of random weights; None: its
        weights stand with the others in model.safetensors, as save_pretrained writes them.
        """
        self.base, self.base_config = base, base_config
        self.layers, self.text, self.has_adapters = layers or {}, text or {}, has_adapters
        super().__init__(**more)

    def get_text_config(self, *_: Any, **__: Any) -> Any:
        """The base's config, by which `generate` makes the cache."""
        return self if self.base_config is None else AutoConfig.for_model(**self.base_config)


class Context(NamedTuple):
    """Texts that were read: keys and values (B, H, L, K) of every inserted layer, bottom-up, and
    which of them are no pads, (B, L).
    """

    keys_values: tuple[tuple[Tensor, Tensor], ...]
    kept_BL: Tensor

    def repeated(self, rows: int) -> Context:
        """The same for `rows` rows; each context serves as many, which follow one another."""
        times, rest = divmod(rows, len(self.kept_BL))
        if rest or not times:
            raise ValueError(f"got {rows} rows for {len(self.kept_BL)} contexts")
        if times == 1:
            return self
        pairs = [tuple(x.repeat_interleave(times, 0) for x in pair) for pair in self.keys_values]
        return Context(tuple(pairs), self.kept_BL.repeat_interleave(times, 0))  # type: ignore


class _Now(NamedTuple):
    """What the hooks need of the forward that runs."""

    by_index: dict[int, tuple[Tensor, Tensor]]
    shown_B11L: Tensor
    has_key_B111: Tensor
    turn: tuple[Tensor, Tensor] | None


def _positions(mask_BS: Tensor) -> Tensor:
    """Tokens count from 0 wherever the pads are; a pad stands at 1."""
    return (mask_BS.long().cumsum(-1) - 1).masked_fill(mask_BS == 0, 1)


def _rotated(x_BHTK: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
    if turn is None:
        return x_BHTK
    first, second = x_BHTK.chunk(2, dim=-1)
    cos, sin = (each.to(x_BHTK.dtype) for each in turn)
    return x_BHTK * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """From decoder states to context states; the names of its weights are the published ones."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.is_rotary = shape["heads"], shape["rope_theta"] is not None
        self.groups, self.shared = shape["kv_heads"], shape["shared_projections"]
        base, width = shape["base_width"], shape["width"]
        if self.is_rotary:
            bias, narrow = shape["attention_bias"], width // self.heads * self.groups
            self.q_proj = nn.Linear(base, width, bias=bias)
            self.k_proj = nn.Linear(base, narrow, bias=bias)
            self.v_proj = nn.Linear(base, narrow, bias=bias)
            self.o_proj = nn.Linear(width, base, bias=bias)
            return
        if self.shared:
            self.q_k_attn = nn.Linear(base, width)
        else:
            self.q_attn, self.k_attn = nn.Linear(base, width), nn.Linear(base, width)
        self.v_attn, self.c_proj = nn.Linear(base, width), nn.Linear(width, base)

    def _layers(self) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        if self.is_rotary:
            return self.q_proj, self.k_proj, self.v_proj, self.o_proj
        q, k = (self.q_k_attn,) * 2 if self.shared else (self.q_attn, self.k_attn)
        return q, k, self.v_attn, self.c_proj

    def keys_values(self, states_BLD: Tensor, turn: Any) -> tuple[Tensor, Tensor]:
        _, k, v, _ = self._layers()
        states_BLD = states_BLD.to(v.weight.dtype)
        keys, values = (
            layer(states_BLD).unflatten(-1, (self.groups, -1)).transpose(1, 2) for layer in (k, v)
        )
        return _rotated(keys, turn), values

    def forward(self, hidden_BTD: Tensor, keys_values: tuple[Tensor, Tensor], now: _Now) -> Tensor:
        q, _, _, out = self._layers()
        queries = q(hidden_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        queries = _rotated(queries, now.turn) * now.has_key_B111
        keys, values = (x.repeat_interleave(self.heads // self.groups, dim=1) for x in keys_values)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=now.shown_B11L)
        return out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated where positions are rotary."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        base, inner, self.act = shape["base_width"], shape["inner"], ACT2FN[shape["activation"]]
        self.is_gated = shape["rope_theta"] is not None
        if self.is_gated:
            self.gate_proj = nn.Linear(base, inner, bias=False)
            self.up_proj = nn.Linear(base, inner, bias=False)
            self.down_proj = nn.Linear(inner, base, bias=False)
        else:
            self.c_fc, self.c_proj = nn.Linear(base, inner), nn.Linear(inner, base)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        if self.is_gated:
            return self.down_proj(self.act(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD))
        return self.c_proj(self.act(self.c_fc(hidden_BTD)))


class InsertedLayer(nn.Module):
    """Attention to the context and an MLP, both pre-norm; it computes in its own dtype."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        self.skip = shape["skip"]
        self.ln_1 = nn.LayerNorm(shape["base_width"], eps=shape["norm_eps"])
        self.crossattention = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape["base_width"], eps=shape["norm_eps"])
        self.mlp = MLP(shape)

    def forward(self, hidden_BTD: Tensor, keys_values: Any, now: _Now) -> Tensor:
        x = hidden_BTD.to(self.ln_1.weight.dtype)
        middle = x + self.crossattention(self.ln_1(x), keys_values, now)
        out = middle + self.mlp(self.ln_2(middle))
        return (x + out if self.skip else out).to(hidden_BTD.dtype)


class LatheCrossAttentionForCausalLM(PreTrainedModel, GenerationMixin):
    """A stock causal LM, and layers between its blocks that attend to a context."""

    config_class = LatheCrossAttentionConfig
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    def __init__(self, config: LatheCrossAttentionConfig, base: Any = None) -> None:
        super().__init__(config)
        shape = config.layers
        self.indices: list[int] = shape["indices"]
        own = self.indices[:1] if shape["shared_weights"] else self.indices
        self.cross_attn_layers = nn.ModuleDict({str(i): InsertedLayer(shape) for i in own})
        if base is None:
            base = AutoModelForCausalLM.from_config(config.get_text_config())
        self.base = base
        self._now: _Now | None = None
        body = _body(base)
        blocks = body.h if hasattr(body, "h") else body.layers
        for index in self.indices:
            if shape["after"]:
                blocks[index].register_forward_hook(self._behind(index))
            else:
                blocks[index].register_forward_pre_hook(self._before(index))
        self.post_init()

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, config: Any = None, **how: Any) -> Any:
        """The model of a folder or Hub id; the base is read from where its config.json says."""
        hub = {key: how.pop(key) for key in _HUB if how.get(key) is not None}
        config = config or LatheCrossAttentionConfig.from_pretrained(name, **hub)
        if config.base is None:
            return super().from_pretrained(name, *args, config=config, **hub, **how)
        for key in _NOT_OF_BASE:
            how.pop(key, None)
        dtype = how.get("dtype", how.pop("torch_dtype", None))
        how["dtype"] = dtype or config.dtype
        if isinstance(config.base, dict):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.base["seed"])
                base = AutoModelForCausalLM.from_config(config.get_text_config())
        elif config.base == _WITHIN and os.path.isdir(name):
            base = _whole(os.path.join(name, "base"), config, **how)  # subfolder seeks adapters
        elif config.base == _WITHIN:
            base = _whole(name, config, subfolder="base", **hub, **how)
        else:
            of_hub = {key: value for key, value in hub.items() if key != "revision"}
            base = _whole(config.base, config, **of_hub, **how)
        model = cls(config, base)
        if config.has_adapters:  # not before: transformers 4.57 draws them anew in post_init
            model.base.load_adapter(name)
        file = cached_file(name, "model.safetensors", **hub)
        keys = model.load_state_dict(load_file(str(file)), strict=False)
        lost = [key for key in keys.missing_keys if key.startswith("cross_attn_layers.")]
        if lost or keys.unexpected_keys:
            raise ValueError(f"{file}: misses {lost}, holds also {keys.unexpected_keys}")
        model.cross_attn_layers.to(model.base.device)
        if isinstance(dtype, torch.dtype):
            model.cross_attn_layers.to(dtype)
        model.generation_config = GenerationConfig.from_pretrained(name, **hub)
        model.config.base = None  # what save_pretrained writes holds all of it
        return model.eval()

    def save_pretrained(self, *args: Any, **how: Any) -> Any:
        """All of it in one folder, the base too; from_pretrained reads that as well."""
        if self.config.has_adapters:
            raise ValueError("adapters are not saved with their base: copy the folder they are in")
        return super().save_pretrained(*args, **how)

    # Contexts
    # ----------------------------------------------------------------------------------------------

    def read(
        self, tokenizer: Any, contexts: str | Sequence[str], *, question: str | None = None
    ) -> Context:
        """Texts as one context, for any number of questions.

        question: for models that were trained with the question before the context, and only them.
        """
        how = self.config.text
        texts = [contexts] if isinstance(contexts, str) else list(contexts)
        if how["question_on_context"] != (question is not None):
            needs = "wants" if how["question_on_context"] else "takes no"
            raise ValueError(f"this model {needs} question before its contexts")
        head = how["context"].replace("{question}", question or "")
        chunks = [head + one for one in texts] if how["chunked"] else [head + " ".join(texts)]
        ids = [self._ids(tokenizer, chunk)[: how["context_tokens"]] for chunk in chunks]
        width = max(map(len, ids))
        rows = torch.tensor([row + [self.config.pad_token_id] * (width - len(row)) for row in ids])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
        return self.encode(rows[None].to(self.base.device), mask[None].to(self.base.device))

    @torch.no_grad()
    def encode(self, ids: Tensor, attention_mask: Tensor | None = None) -> Context:
        """(B, L) or, in chunks that are read apart, (B, N, L) ids -> the context of B rows."""
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        flat_ids, flat_mask = ids.flatten(0, -2), mask.flatten(0, -2)
        if self.config.has_adapters:  # they belong to the decoder alone
            self.base.disable_adapters()
        how = {"input_ids": flat_ids, "attention_mask": flat_mask, "use_cache": False}
        states = _body(self.base)(**how, position_ids=_positions(flat_mask)).last_hidden_state
        if self.config.has_adapters:
            self.base.enable_adapters()
        states_BLD, kept_BL = states.reshape(len(ids), -1, states.shape[-1]), mask.flatten(1).bool()
        turn = self._turn(_positions(kept_BL))
        pairs = [self._layer(i).crossattention.keys_values(states_BLD, turn) for i in self.indices]
        return Context(tuple(pairs), kept_BL)

    # The decoder
    # ----------------------------------------------------------------------------------------------

    def answer(
        self, tokenizer: Any, question: str, context: Context, max_new_tokens: int | None = None
    ) -> str:
        """The most likely answer to one question about a context that was read."""
        how = self.config.text
        most = max_new_tokens or self.generation_config.max_new_tokens
        room = self.base.config.max_position_embeddings - most
        if room < 1:
            raise ValueError(f"got max_new_tokens={most}, want fewer than {room + most} positions")
        whole = self._ids(tokenizer, how["prompt"].replace("{question}", question))
        prompt = whole[: how["decoder_tokens"]]
        if len(prompt) > room:  # it loses its beginning, but not the tokens that open every text
            rest = room - len(how["opening"])
            prompt = [*how["opening"], *prompt[-rest:]] if rest > 0 else prompt[-room:]
        if len(prompt) < len(whole):
            warnings.warn(f"{len(prompt)} of {len(whole)} prompt tokens are read", stacklevel=2)
        ids = torch.tensor([prompt], device=self.base.device)
        told = {"attention_mask": torch.ones_like(ids), "max_new_tokens": most}
        new = self.generate(ids, context=context, **told)[0, len(prompt) :].tolist()
        ends = self.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        answer = new[: next((at for at, token in enumerate(new) if token in ends), len(new))]
        spelt = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return tokenizer.decode(answer, **spelt).removeprefix(how["before_answer"])

    def generate(self, *args: Any, context_input_ids: Any = None, **how: Any) -> Any:
        """As in transformers, with a `context`, or context_input_ids and context_attention_mask,
        which are then encoded once. Prompts are padded on the left.
        """
        if context_input_ids is not None:
            how["context"] = self.encode(context_input_ids, how.pop("context_attention_mask", None))
        return GenerationMixin.generate(self, *args, **how)  # type: ignore[misc]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        context: Context | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """(B, T) ids with a context -> logits, and with labels (B, T) the mean loss over those that
        are not -100; they are shifted in here.
        """
        if context is None:
            if context_input_ids is None:
                raise ValueError("give a context, or context_input_ids")
            context = self.encode(context_input_ids, context_attention_mask)
        context = context.repeated(len(input_ids))
        if attention_mask is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            attention_mask = input_ids.new_ones(len(input_ids), past + input_ids.shape[1])
        if position_ids is None:
            position_ids = _positions(attention_mask)[:, -input_ids.shape[1] :]
        has_key_B1 = context.kept_BL.any(dim=-1, keepdim=True)
        shown_BL = context.kept_BL | ~has_key_B1  # a row without keys mixes all of them alike
        self._now = _Now(
            dict(zip(self.indices, context.keys_values, strict=True)),
            shown_BL[:, None, None, :],
            has_key_B1[:, :, None, None],
            self._turn(position_ids),
        )
        try:
            out = self.base(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
            )
        finally:
            self._now = None
        loss = None
        if labels is not None:
            loss = F.cross_entropy(
                out.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
            )
        return CausalLMOutputWithPast(
            loss=loss, logits=out.logits, past_key_values=out.past_key_values
        )

    def _turn(self, positions_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosine and sine of each pair of a head, (B, 1, T, K); None: positions are learnt."""
        shape = self.config.layers
        if shape["rope_theta"] is None:
            return None
        size = shape["width"] // shape["heads"]
        steps = torch.arange(0, size, 2, dtype=torch.float32, device=positions_BT.device) / size
        angles = positions_BT[..., None].float() * shape["rope_theta"] ** -steps
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos(), angles.sin()

    def _layer(self, index: int) -> Any:
        own = self.indices[0] if self.config.layers["shared_weights"] else index
        return self.cross_attn_layers[str(own)]

    def _added(self, index: int, hidden: Tensor) -> Tensor:
        now = self._now
        return hidden if now is None else self._layer(index)(hidden, now.by_index[index], now)

    def _behind(self, index: int) -> Any:
        def hook(_: Any, __: Any, out: Any) -> Any:
            is_tuple = isinstance(out, tuple)
            return (self._added(index, out[0]), *out[1:]) if is_tuple else self._added(index, out)

        return hook

    def _before(self, index: int) -> Any:
        return lambda _, given: (self._added(index, given[0]), *given[1:])

    def _ids(self, tokenizer: Any, text: str) -> list[int]:
        return [*self.config.text["opening"], *tokenizer(text, add_special_tokens=False).input_ids]


def _body(base: Any) -> Any:
    """The decoder of a causal LM, without what turns its states into logits."""
    # the prefix of Gemma 3 is no attribute in transformers 4.57
    names = (base.base_model_prefix, "model", "transformer")
    return next(getattr(base, name) for name in names if hasattr(base, name))


def _whole(name: Any, config: Any, **how: Any) -> Any:
    build: Any = AutoModelForCausalLM
    if config.base_config.get("attn_logit_softcapping") and transformers.__version__[:2] == "4.":
        how.setdefault("attn_implementation", "eager")  # there sdpa leaves the cap out
    base, report = build.from_pretrained(name, output_loading_info=True, **how)
    if report["missing_keys"]:  # transformers would fill them with random numbers
        raise ValueError(f"{name}: its files lack {sorted(report['missing_keys'])}")
    return base
