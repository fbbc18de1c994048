"""What is known of the GPUs that runs use."""

from __future__ import annotations

import torch

from trainer.runtime import distributed

# Dense bf16 peaks in FLOP/s, without sparsity, from NVIDIA's data sheets; the first name found in
# the device's counts.
PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756.5e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L4": 121e12,
}


def peak_flops(name: str | None = None) -> float | None:
    """Dense bf16 FLOP/s of the GPU `name` (default: this rank's); None for a CPU, a MIG slice or an
    unknown GPU.
    """
    if name is None:
        name = torch.cuda.get_device_name(distributed.device()) if torch.cuda.is_available() else ""
    if "MIG" in name:
        return None
    return next((flops for known, flops in PEAK_FLOPS.items() if known in name), None)
