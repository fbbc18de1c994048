"""The shape of the added layers: what the experiment says, and otherwise what the base has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.errors import ConfigError
from trainer.tasks.cross_attention.decoder.attention import LayerShape, RotaryShape

if TYPE_CHECKING:
    from trainer.models.decoder.backbone import Backbone
    from trainer.tasks.cross_attention.config import Layers


def layer_shape(layers: Layers, backbone: Backbone) -> LayerShape:
    """The shape of every added layer. ConfigError for what its family does not have, or heads that
    do not divide.
    """
    _check_family(layers, backbone)
    own_width, own_heads = layers.width or backbone.width, layers.heads or backbone.heads
    width, heads = (
        (backbone.attention_width, backbone.heads)
        if layers.base_attention
        else (own_width, own_heads)
    )
    if width % heads:
        legal = [count for count in range(1, min(width, 128) + 1) if width % count == 0]
        raise ConfigError(
            f"layers.heads={heads} does not divide layers.width={width} (None: the base's "
            f"{backbone.heads} and "
            f"{backbone.width}), want a divisor. Use one of {', '.join(map(str, legal))}."
        )
    dropout = (
        backbone.attention_dropout if layers.attention_dropout is None else layers.attention_dropout
    )
    return LayerShape(
        base_width=backbone.width,
        width=width,
        heads=heads,
        inner=4 * own_width,
        shared_projections=layers.shared_projections,
        skip=layers.skip,
        activation=backbone.activation,
        norm_eps=backbone.norm_eps,
        attention_dropout=dropout,
        residual_dropout=backbone.residual_dropout,
        rotary=_rotary_shape(layers, backbone, width=width, heads=heads),
    )


def _rotary_shape(
    layers: Layers, backbone: Backbone, *, width: int, heads: int
) -> RotaryShape | None:
    if backbone.rope_theta is None:
        return None
    if (width // heads) % 2:
        raise ConfigError(
            f"layers.width={width} over layers.heads={heads} is {width // heads} numbers a head: "
            "rotary positions turn pairs, want an even number. Use other heads."
        )
    kv_heads = backbone.key_value_heads if layers.base_attention else layers.kv_heads or heads
    if heads % kv_heads:
        legal = [count for count in range(1, heads + 1) if heads % count == 0]
        raise ConfigError(
            f"layers.kv_heads={kv_heads} does not divide layers.heads={heads}. Use one of "
            f"{', '.join(map(str, legal))}."
        )
    return RotaryShape(kv_heads, theta=backbone.rope_theta, has_bias=layers.attention_bias)


def _check_family(layers: Layers, backbone: Backbone) -> None:
    """ConfigError for what the layers of this family do not have."""
    family = backbone.config.model_type
    wrong = (
        ["kv_heads", "attention_bias", "base_attention"]
        if backbone.rope_theta is None
        else ["shared_projections"]
    )
    problems = [
        f"layers.{name}={getattr(layers, name)!r}" for name in wrong if getattr(layers, name)
    ]
    if problems:
        raise ConfigError(
            f"{', '.join(problems)}: the layers of a {family} base have no such thing. "
            "Leave it out."
        )
    ignored = (
        {"heads": backbone.heads, "kv_heads": backbone.key_value_heads}
        if layers.base_attention
        else {}
    )
    for name, of_base in ignored.items():
        if getattr(layers, name) not in (None, of_base):
            raise ConfigError(
                f"layers.{name}={getattr(layers, name)}: layers.base_attention takes the base's "
                f"{of_base}. Leave one of the two out."
            )


def added_indices(layers: Layers, num_blocks: int) -> list[int]:
    """Base block indices n-1, n-1-stride, ... that get an added layer, ascending. ConfigError when
    they do not fit.
    """
    count, stride = layers.count, layers.stride
    if num_blocks < stride * count:
        most = num_blocks // stride
        fix = f"Use layers.count <= {most}" if most else f"Use layers.stride <= {num_blocks}"
        raise ConfigError(
            f"layers.count={count} x layers.stride={stride} = {stride * count} blocks: the base "
            f"has {num_blocks}, want count x stride <= {num_blocks}. {fix}, or layers.stride <= "
            f"{max(num_blocks // count, 1)}."
        )
    return [num_blocks - 1 - k * stride for k in reversed(range(count))]
