"""A check that torch's DistributedDataParallel leaves experts alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_plugin.experts.base import Experts


class DDPCheck:
    """`ValueError` inside the forward pass of a torch DDP that takes experts for replicas.

    Once a DDP was seen that does not, nothing is checked any more.
    """

    def __init__(self, ranks: int) -> None:
        self.passed = ranks == 1

    def __call__(self, experts: Experts) -> None:
        """Check; called in every forward pass."""
        if self.passed or torch.compiler.is_compiling():
            return
        # private in torch (>= 1.11); where it is missing nothing is checked
        ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if ddp is not None:
            _refuse_averaged(ddp, experts)
            self.passed = True


def _refuse_averaged(ddp: DistributedDataParallel, experts: nn.Module) -> None:
    mine = {id(parameter) for parameter in experts.parameters()}
    for name, parameter in ddp.module.named_parameters():
        if id(parameter
              ) in mine and parameter.requires_grad and name not in ddp.parameters_to_ignore:
            raise ValueError(
                f"DistributedDataParallel averages {name!r}, but every rank holds other experts: "
                "must be left out; call moe_plugin.hosts.plain.gradients.exclude_experts(model) "
                "before wrapping it, and sync_gradients after backward")
