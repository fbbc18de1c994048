"""The linear layers of a frozen base in 8 or 4 bits: a quarter or an eighth of fp32's bytes.

8 bits: rows of int8 with one scale for each row, like the weights of LLM.int8() (Dettmers et al.
2022), in plain torch. 4 bits: NF4 in blocks of 64 (QLoRA, Dettmers et al. 2023), packed and
unpacked by bitsandbytes. A product unpacks its weight in the forward and in the backward pass, and
keeps neither the weight nor its input.

"fp8": rows of e4m3, which the forward pass multiplies as they are with its input in e4m3 (fp8.py).
The backward pass unpacks the weight. To multiply a gradient in FP8, too, would take a transposed
copy of the weight, and err three times as much: 5.9% with e5m2, of 2 bits of mantissa, not 2.6%.

bitsandbytes' own layers are not used: in evaluation on a CPU with AVX-512 its 4-bit one (0.50.2)
packs its weight anew, and the next training step has no gradient.
"""

# K inputs and N outputs of a layer

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.models.frozen import fp8

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Bits = Literal[4, 8, "fp8"]
_BLOCK, _KIND = 64, "nf4"


def quantize(model: PreTrainedModel, bits: Bits, dtype: torch.dtype) -> None:
    """Replace the linear layers of a frozen model by QuantizedLinear, one after another.

    The output layer is left unchanged, and so are layers that transformers keeps in fp32 (`wo` of a
    T5). dtype: of the products. The model may be on the meta device. ConfigError for a model
    without such a layer, for 4 bits without bitsandbytes, and for "fp8" of a layer of another shape
    than its products take.
    """
    names = list(_names(model))
    if bits == "fp8":
        _refuse_shapes(model, names)
    if not names:
        raise ConfigError(
            f"train.base_bits={bits}: a {model.config.model_type} has no linear layer that could "
            "be quantized. Leave base_bits out."
        )
    for name in names:
        layer: Any = model.get_submodule(name)
        model.set_submodule(name, QuantizedLinear(layer, bits, dtype))  # pyright: ignore[reportCallIssue]


def _names(model: Any) -> Iterator[str]:
    output = model.get_output_embeddings()
    whole: set[str] = {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    for name, module in model.named_modules():
        is_plain = type(module) is nn.Linear and module is not output
        if is_plain and not whole.intersection(name.split(".")):
            yield name


def _refuse_shapes(model: Any, names: list[str]) -> None:
    """ConfigError if a layer has sides that products in FP8 do not take, on whatever device."""
    layers = {name: model.get_submodule(name) for name in names}
    unfit = [
        f"{name} ({layer.out_features} x {layer.in_features})"
        for name, layer in layers.items()
        if layer.in_features % fp8.MULTIPLE or layer.out_features % fp8.MULTIPLE
    ]
    if unfit:
        more = f" and {len(unfit) - 1} more" if len(unfit) > 1 else ""
        raise ConfigError(
            f"train.base_bits='fp8': got the layer {unfit[0]}{more}, want sides that are multiples "
            f"of {fp8.MULTIPLE}. Use 8 or 4, which take any shape."
        )


class QuantizedLinear(nn.Linear):
    """A frozen linear layer that unpacks its weight for each product. Its packed weight and scales
    are buffers, which are not trained, not saved, and not cast with the model.
    """

    packed: Tensor
    scales: Tensor

    def __init__(self, plain: nn.Linear, bits: Bits, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bits: Bits = bits
        self.dtype = dtype
        packed, scales = _pack(plain.weight.detach(), bits)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        bias = plain.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(N, K), unpacked anew."""
        return self.unpacked(self.dtype)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """(N, K): the weight in `dtype`."""
        if self.bits == "fp8":
            return self._fp8_NK.to(dtype).mul_(self.scales.to(dtype)[:, None])
        if self.bits == 8:
            return self.packed.to(dtype).mul_(self.scales.to(dtype)[:, None])
        shape = [self.out_features, self.in_features]
        if self.packed.device.type != "cuda" and self.packed.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.packed.device)  # to be counted
        unpack: Any = torch.ops.bitsandbytes.dequantize_4bit.default
        return unpack(self.packed, self.scales, _BLOCK, _KIND, shape, dtype)

    @property
    def _fp8_NK(self) -> Tensor:
        # as bytes between products: a model that is cast would cast numbers of FP8, too
        return self.packed.view(torch.float8_e4m3fn)

    def product(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N): input @ weight.T + bias, in the input's dtype."""
        if self.bits == "fp8":
            return fp8.product(input, self._fp8_NK, self.scales, self.bias)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.unpacked(input.dtype), bias)

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self)  # pyright: ignore[reportReturnType]

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        """Moves the layer, and casts the dtype of its products; scales stay in fp32."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.packed.device)).dtype
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        return self


class _Product(torch.autograd.Function):
    """input @ weight.T + bias; it keeps only the layer for the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: QuantizedLinear) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.layer = layer
        return layer.product(input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient @ ctx.layer.unpacked(gradient.dtype), None


def _pack(weight_NK: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """The packed weight, and fp32 scales: of rows in 8 bits and FP8, of blocks in 4."""
    if bits == "fp8":
        scales_N1 = fp8.scales_of(weight_NK)
        return fp8.pack(weight_NK, scales_N1).view(torch.uint8), scales_N1[:, 0]
    if bits == 8:
        scales_N = weight_NK.float().abs().amax(1) / 127
        steps_NK = weight_NK.float() / scales_N.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        return steps_NK.round().to(torch.int8), scales_N
    try:
        from bitsandbytes import functional
    except ModuleNotFoundError:
        raise ConfigError(
            "train.base_bits=4 needs the package bitsandbytes. Install it: pip install "
            '-e ".[bits]", or use 8, which needs none.'
        ) from None
    count = weight_NK.numel()
    if weight_NK.device.type == "meta":
        like: dict[str, Any] = {"device": "meta"}
        scales = torch.empty(-(-count // _BLOCK), dtype=torch.float32, **like)
        return torch.empty((count + 1) // 2, 1, dtype=torch.uint8, **like), scales
    whole = weight_NK.contiguous()
    packed, state = functional.quantize_4bit(whole, blocksize=_BLOCK, quant_type=_KIND)
    return packed, state.absmax
