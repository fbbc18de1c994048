"""The kernels of liger-kernel in the place of torch's: which modules ask for them, and the same
losses and gradients.

Whole models run with a stand-in for the library, its functions by the formulas of torch, which
overwrites what the library overwrites. The library's own kernels run by Triton's interpreter where
both are installed (the extras `kernels` and `gpu`); LATHE_REQUIRE_LIGER=1 makes a test of them fail
where one of them is missing.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.activations import ACT2FN

from tests.bases import DECODERS, SCALED, SEQ2SEQ, with_uneven_norms
from tests.numerics.test_stream_attention import interpreter  # noqa: F401 (a fixture)
from trainer.models import fused
from trainer.models.lean import adapter, gated, liger

BASES = DECODERS | SCALED | {"t5 v1.1": SEQ2SEQ["t5 v1.1"]}
# of a model with four blocks (a T5 with three in each half): what the library computes in a
# forward pass
BLOCKS = {"swiglu": 4, "rope": 4}
USED: dict[str, dict[str, int]] = {
    "llama": BLOCKS,
    "llama 3.2": BLOCKS,
    "mistral": BLOCKS,
    "qwen2": BLOCKS,
    "qwen3": BLOCKS,
    "phi3": {"rope": 4},  # its gate and up are halves of one tensor
    "olmo2": BLOCKS | {"norm": 4 * 4 + 1},
    "gemma2": {"geglu": 4, "rope": 4, "norm": 4 * 4 + 1},
    "gemma3": {"geglu": 4, "rope": 4, "norm": 4 * 6 + 1},
    "granite": BLOCKS,
    "cohere": {"swiglu": 4},  # it turns neighbours
    "t5 v1.1": {"geglu": 6},
}


class StandIn:
    """The functions of the library that we call, in its places. Gradients are written over what the
    library writes them over, past autograd, as Triton does.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def library(self, module: str) -> Any:
        """Instead of liger._library()."""
        return {
            "swiglu": self._product("swiglu", F.silu),
            "geglu": self._product("geglu", lambda gate: F.gelu(gate, approximate="tanh")),
            "rope": SimpleNamespace(
                rope_forward=lambda *given: self._turn("rope", *given, sign=1),
                rope_backward=lambda *given: self._turn("rope backward", *given, sign=-1),
            ),
            "rms_norm": SimpleNamespace(LigerRMSNormFunction=SimpleNamespace(apply=self._norm)),
        }[module]

    def _product(self, name: str, act: Callable[[Tensor], Tensor]) -> Any:
        def forward(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.calls[name] += 1
            return gate, up, act(gate) * up

        def backward(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
            self.calls[f"{name} backward"] += 1
            with torch.enable_grad():
                leaves = [x.detach().clone().requires_grad_() for x in (gate, up)]
                found = torch.autograd.grad(act(leaves[0]) * leaves[1], leaves, gradient)
            for overwritten, of_it in zip((gate, up), found, strict=True):
                overwritten.data.copy_(of_it)
            return gate, up

        return SimpleNamespace(**{f"{name}_forward": forward, f"{name}_backward": backward})

    def _turn(
        self, name: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, sign: int
    ) -> tuple[Tensor, ...]:
        self.calls[name] += 1
        size = cos.shape[-1]
        both: list[Tensor] = []
        for x in (q, k):
            x_BTHK = x.detach().transpose(1, 2).contiguous()
            left, right = x_BTHK[..., :size].chunk(2, dim=-1)
            other = torch.cat((-right, left), -1) * sign
            turned = x_BTHK[..., :size] * cos[:, :, None] + other * sin[:, :, None]
            x_BTHK[..., :size] = turned
            both.append(x_BTHK.transpose(1, 2))
        return *both, cos, sin

    def _norm(
        self, x: Tensor, weight: Tensor, epsilon: float, offset: float, mode: str, in_place: bool
    ) -> Tensor:
        self.calls["norm"] += 1
        assert (mode, in_place) == ("gemma", False)
        wide = F.rms_norm(x.float(), x.shape[-1:], weight.float() + offset, epsilon)
        return wide.to(x.dtype)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The library is there, and used on the CPU."""
    made = StandIn()
    monkeypatch.setattr(liger, "_library", made.library)
    monkeypatch.setattr(liger, "uses_liger", lambda environment: True)
    monkeypatch.setattr(liger, "is_used", lambda x: not torch.compiler.is_compiling())
    for folder in ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma2", "gemma3"):
        keep_rotation(folder, monkeypatch)
    keep_rotation("granite", monkeypatch)
    return made


def keep_rotation(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of transformers is as it was after the test."""
    code: Any = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    monkeypatch.setattr(code, "apply_rotary_pos_emb", code.apply_rotary_pos_emb)


def built(name: str, **more: Any) -> Any:
    family, values = BASES[name]
    kind = AutoModelForSeq2SeqLM if "t5" in name else AutoModelForCausalLM
    torch.manual_seed(1)
    model = with_uneven_norms(kind.from_config(AutoConfig.for_model(family, **(values | more))))
    fused.fuse(model)
    gated.keep_less(model)
    return model.train()


def passed(model: Any) -> dict[str, Tensor]:
    """The logits, and the gradient of every weight that trains."""
    ids = torch.arange(34).view(2, 17) + 2
    more = {"decoder_input_ids": ids[:, :5]} if hasattr(model, "encoder") else {}
    torch.manual_seed(7)
    logits = model(input_ids=ids, use_cache=False, **more).logits
    logits.float().square().mean().backward()
    named = model.named_parameters()
    return {"logits": logits.detach()} | {name: p.grad for name, p in named if p.grad is not None}


def close(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Within 2e-5 of the largest number of a tensor."""
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert (found[name] - tensor).abs().max() <= 2e-5 * tensor.abs().max(), name


@pytest.mark.parametrize("name", USED)
def test_what_the_library_computes_in_each_family_and_the_same_gradients(
    name: str, stand_in: StandIn
) -> None:
    stock = built(name, **({"dropout_rate": 0.2} if "t5" in name else {}))
    ours = copy.deepcopy(stock)
    want = passed_by_torch(stock)
    liger.put_into(ours)
    found = passed(ours)
    once = {key: count for key, count in stand_in.calls.items() if "backward" not in key}
    again = {key[:-9]: count for key, count in stand_in.calls.items() if "backward" in key}
    assert once == USED[name]
    assert again == {key: count for key, count in once.items() if key != "norm"}
    close(found, want)


def passed_by_torch(model: Any) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(liger, "is_used", lambda x: False)
        return passed(model)


@pytest.mark.parametrize("every", [None, 1], ids=["kept", "computed again"])
def test_adapters_learn_from_factors_before_they_are_overwritten(
    every: int | None, stand_in: StandIn
) -> None:
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    stock = built("llama")
    stock.requires_grad_(False)
    config = peft.LoraConfig(
        target_modules="all-linear", r=4, lora_alpha=8, lora_dropout=0.1, init_lora_weights=False
    )
    peft.inject_adapter_in_model(config, stock)
    adapter.keep_less(stock)
    ours = copy.deepcopy(stock)
    want = passed_by_torch(stock)
    liger.put_into(ours)
    if every is not None:
        how = {"use_reentrant": False}
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    close(passed(ours), want)
    assert stand_in.calls["swiglu backward"] == 4


@pytest.mark.usefixtures("stand_in")
def test_a_second_backward_pass_through_overwritten_factors_is_an_error() -> None:
    mlp = built("llama").model.layers[0].mlp
    output = mlp(torch.randn(3, 32)).sum()
    output.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="overwritten by an earlier backward pass"):
        output.backward()


def test_only_a_gpu_uses_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(device: str, dtype: torch.dtype = torch.bfloat16) -> bool:
        x: Any = SimpleNamespace(device=torch.device(device), dtype=dtype)
        return liger.is_used(x)

    monkeypatch.setattr(liger, "uses_liger", lambda environment: True)
    assert on("cuda")
    assert not on("cuda", torch.float64)
    assert not on("cpu")
    assert not on("meta")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not on("cuda")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    monkeypatch.setattr(liger, "uses_liger", lambda environment: False)
    assert not on("cuda")


def test_a_processor_keeps_its_bits_where_the_library_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liger, "uses_liger", lambda environment: True)
    keep_rotation("gemma2", monkeypatch)
    stock = built("gemma2")
    ours = copy.deepcopy(stock)
    want = passed(stock)
    liger.put_into(ours)
    found = passed(ours)
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())


@pytest.mark.usefixtures("stand_in")
def test_products_that_the_library_does_not_know_stay_torchs() -> None:
    x = torch.ones(2, 8)
    silu, tanh = ACT2FN["silu"], ACT2FN["gelu_pytorch_tanh"]
    assert liger.product_of(silu, x, x) == liger.Product("swiglu", "swiglu")
    for act in (tanh, ACT2FN["gelu_new"]):
        assert liger.product_of(act, x, x) == liger.Product("geglu", "geglu")
    assert liger.product_of(nn.GELU(), x, x) is None
    assert liger.product_of(ACT2FN["gelu"], x, x) is None
    assert liger.product_of(silu, *x.chunk(2, dim=-1)) is None
    assert liger.product_of(silu, x, x.double()) is None
    wide = torch.ones(1, 65_537)
    assert liger.product_of(silu, wide, wide) is None
    assert liger.product_of(silu, wide[:, 1:], wide[:, 1:]) is not None


def test_a_rotation_in_another_dtype_is_the_librarys_only_where_it_is_rounded_back(
    stand_in: StandIn,
) -> None:
    q, k = torch.randn(1, 4, 5, 8).bfloat16(), torch.randn(1, 2, 5, 8).bfloat16()
    angles = torch.randn(1, 5, 4).repeat(1, 1, 2)
    for name, is_wide in (("llama", True), ("olmo2", False)):
        liger.put_into(built(name))
        code: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        turned, _ = code.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
        assert (turned.dtype == torch.float32) is is_wide
    assert stand_in.calls == {"rope": 1}


# The library's own kernels
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of liger_kernel.ops run by Triton's interpreter."""
    is_required = os.environ.get("LATHE_REQUIRE_LIGER") == "1"
    for name, extra in (("triton", "kernels"), ("liger_kernel", "gpu")):
        if importlib.util.find_spec(name) is None:
            text = f"{name} is not installed (the extra {extra})"
            (pytest.fail if is_required else pytest.skip)(text)
    request.getfixturevalue("interpreter")
    import triton.language as tl
    from triton.runtime import interpreter as by_hand

    convert = by_hand._implicit_cvt

    def converted(given: Any) -> Any:
        """Triton 3.6's interpreter hands a float on as it is; on a GPU it is a number in fp32."""
        if not isinstance(given, float):
            return convert(given)
        handle = by_hand.TensorHandle(np.array([given], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(by_hand, "_implicit_cvt", converted)
    # functions of CUDA's own library, which the interpreter does not have
    geglu = importlib.import_module("liger_kernel.ops.geglu")
    norms = importlib.import_module("liger_kernel.ops.rms_norm")
    monkeypatch.setattr(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)
    monkeypatch.setattr(norms, "rsqrt", lambda x: 1 / tl.sqrt(x))
    monkeypatch.setattr(liger, "uses_liger", lambda environment: True)
    monkeypatch.setattr(liger, "is_used", lambda x: True)


# Not bf16: Triton 3.6's interpreter keeps its bits in integers, and multiplies those.
both = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
# of numbers near 1: what torch and the library round on the way
MARGIN = {torch.float32: 2e-6, torch.float16: 4e-3}


def gradients_of(function: Callable[..., Any], *leaves: Tensor) -> list[Tensor]:
    """What the function gives, and the gradients of its inputs."""
    own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    given = function(*(leaf * 1 for leaf in own))  # no leaf is overwritten
    results = given if isinstance(given, tuple) else (given,)
    torch.manual_seed(3)
    weights = [torch.randn(result.shape).to(result.dtype) for result in results]
    pairs = zip(results, weights, strict=True)
    sum((result * weight).sum() for result, weight in pairs).backward()
    return [*(result.detach() for result in results), *(leaf.grad for leaf in own)]


def near(found: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(found, want, strict=True):
        assert one.dtype == other.dtype
        scale = max(1.0, float(other.abs().max()))
        assert (one.float() - other.float()).abs().max() <= MARGIN[one.dtype] * scale


@pytest.mark.long
@both
@pytest.mark.parametrize("act", ["silu", "gelu_new", "gelu_pytorch_tanh"])
@pytest.mark.usefixtures("library")
def test_a_product_of_the_library_is_torchs(act: str, dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 3, 40).to(dtype), torch.randn(2, 3, 40).to(dtype)
    known = liger.product_of(ACT2FN[act], gate, up)
    assert known is not None

    def ours(gate: Tensor, up: Tensor) -> Tensor:
        return gated._product(gate, up, ACT2FN[act], nn.Identity())[0]  # pyright: ignore[reportPrivateUsage]

    near(gradients_of(ours, gate, up), gradients_of(lambda g, u: ACT2FN[act](g) * u, gate, up))


@pytest.mark.long
@both
@pytest.mark.parametrize("turned", [8, 4], ids=["whole", "half of a head"])
@pytest.mark.usefixtures("library")
def test_a_rotation_of_the_library_is_transformers(turned: int, dtype: torch.dtype) -> None:
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as stock

    q, k = torch.randn(2, 4, 5, 8).to(dtype), torch.randn(2, 2, 5, 8).to(dtype)
    angles = torch.randn(2, 5, turned // 2).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    ours = liger._turning(stock, rounds_back=False)  # pyright: ignore[reportPrivateUsage]
    near(
        gradients_of(lambda q, k: ours(q, k, cos, sin), q, k),
        gradients_of(lambda q, k: stock(q, k, cos, sin), q, k),
    )


@pytest.mark.long
@both
@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
@pytest.mark.usefixtures("library")
def test_a_norm_of_the_library_is_transformers(name: str, dtype: torch.dtype) -> None:
    model = built(name, num_hidden_layers=1, layer_types=None).to(dtype)
    stock = model.model.norm
    ours = copy.deepcopy(stock)
    liger.put_into(SimpleNamespace(modules=lambda: [ours], config=model.config))
    assert type(ours).forward is liger._norm  # pyright: ignore[reportPrivateUsage]
    hidden = torch.randn(3, 5, 32).to(dtype)
    found = [*gradients_of(ours, hidden), ours.weight.grad]
    near(found, [*gradients_of(stock, hidden), stock.weight.grad])
