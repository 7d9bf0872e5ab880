"""The order of small numbers: choices by expert."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_plugin.kernels.derivatives import transformed


def stable_order(key_N: Tensor, below: int) -> Tensor:
    """The stable permutation that sorts key_N (int64 in 0..below-1), int64 [N].

    On a CPU numpy sorts 16-bit keys by their digits: 8,192 choices in 20 us, where torch, which
    does so from 32,768 on, takes 260.
    """
    if (key_N.device.type != "cpu" or below > 1 << 15 or torch.compiler.is_compiling()
            or transformed()):
        return torch.argsort(key_N, stable=True)
    return torch.from_numpy(np.argsort(key_N.to(torch.int16).numpy(), kind="stable"))
