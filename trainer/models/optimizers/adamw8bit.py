"""AdamW whose moments are numbers of 8 bits, by bitsandbytes.

A moment is one of 256 codes times the largest moment of its block of 256 numbers. Blocks begin with
the tensor that is stepped: a whole weight at stage 0 of ZeRO, and this rank's flat vector of many
weights from stage 1 on. There, which numbers share a block depends on the number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.models.optimizers.beside_adamw import BesideAdamW

if TYPE_CHECKING:
    from trainer.config.schema import Optim

BLOCK = 256  # numbers that share a scale (bitsandbytes 0.50)


class AdamW8bit(BesideAdamW):
    """AdamW with the moments of large matrices in 8 bits, of other weights in 32.

    The state of a tensor: `code1` and `code2` (uint8, its shape), `absmax1` and `absmax2` (fp32,
    one for each block), and the count of steps.
    """

    def __init__(self, groups: list[dict[str, Any]], optim: Optim) -> None:
        super().__init__(groups, optim)
        try:
            from bitsandbytes import functional
        except ImportError as error:
            raise ConfigError(
                'optim.name="adamw8bit" needs the package bitsandbytes. Install it: pip install '
                '"bitsandbytes>=0.50"; or use optim.name="adamw".'
            ) from error
        self._functional: Any = functional
        self._maps = (
            functional.create_dynamic_map(signed=True),
            functional.create_dynamic_map(signed=False),
        )

    def step_own(self, group: dict[str, Any]) -> None:
        """Step tensors by bitsandbytes' kernel for their device."""
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = self.state[weight]
            if not state:
                state["step"] = 0
                for number in (1, 2):  # absmax 0: each code stands for 0
                    blocks = torch.zeros(-(-weight.numel() // BLOCK), device=weight.device)
                    state[f"code{number}"] = torch.zeros_like(weight, dtype=torch.uint8)
                    state[f"absmax{number}"] = blocks
            state["step"] += 1
            first, second = self._maps_on(weight.device)
            self._functional.optimizer_update_8bit_blockwise(
                "adam",
                weight.grad,
                weight,
                state["code1"],
                state["code2"],
                group["betas"][0],
                group["betas"][1],
                0.0,
                0.0,
                group["eps"],
                state["step"],
                group["lr"],
                first,
                second,
                state["absmax1"],
                state["absmax2"],
                group["weight_decay"],
            )

    def scales(self, tensor: Tensor, key: str, *, start: int, count: int) -> Tensor:
        """(count,) fp32: the scale of each element from `start` on. key: "scale1" or "scale2"."""
        absmax = self.state[tensor][key.replace("scale", "absmax")]
        at = torch.arange(start, start + count, device=absmax.device)
        return absmax[at // BLOCK]

    def put(self, tensor: Tensor, number: int, scales: Tensor) -> None:
        """Take codes that were copied into the state with the scales of their elements, nan where
        there is no weight. A block of one scale is taken as it is; one in which several meet is
        rounded again. number: of the moment, 1 or 2.
        """
        state = self.state[tensor]
        codes, absmax = state[f"code{number}"].reshape(-1), state[f"absmax{number}"]
        values = self._maps_on(tensor.device)[number - 1]
        # what is padding must not weigh in its block: it stands for 0, as in a run from the start
        codes[scales.isnan()] = values.abs().argmin().to(torch.uint8)
        padding = len(absmax) * BLOCK - len(scales)
        scales_NB = torch.nn.functional.pad(scales, (0, padding), value=torch.nan).view(-1, BLOCK)
        highest_N = scales_NB.nan_to_num(-torch.inf).amax(1)
        several_N = scales_NB.nan_to_num(torch.inf).amin(1) < highest_N
        absmax.copy_(highest_N.clamp(min=0.0))
        if not bool(several_N.any()):
            return
        codes_NB = torch.nn.functional.pad(codes, (0, padding)).view(-1, BLOCK)
        numbers = (values[codes_NB[several_N].long()] * scales_NB[several_N]).nan_to_num()
        again, of_again = self._functional.quantize_blockwise(numbers, code=values, blocksize=BLOCK)
        codes_NB[several_N] = again.view(-1, BLOCK)
        codes.copy_(codes_NB.view(-1)[: len(codes)])
        absmax[several_N] = of_again.absmax

    def _maps_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._maps[0].device != device:
            self._maps = (self._maps[0].to(device), self._maps[1].to(device))
        return self._maps


def nbytes(numbers: int) -> int:
    """Bytes of the state of a tensor of so many numbers."""
    return 2 * numbers + 2 * 4 * -(-numbers // BLOCK)
