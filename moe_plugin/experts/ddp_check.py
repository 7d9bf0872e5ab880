"""A check that torch's DistributedDataParallel leaves experts alone."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def refuse_averaged_experts(experts: nn.Module) -> bool:
    """`ValueError` inside the forward pass of a torch DDP that takes these experts for replicas;
    True inside one that does not.
    """
    # torch >= 1.11; without it nothing is checked
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None:
        return False
    mine = {id(parameter) for parameter in experts.parameters()}
    for name, parameter in ddp.module.named_parameters():
        if id(parameter
              ) in mine and parameter.requires_grad and name not in ddp.parameters_to_ignore:
            raise ValueError(
                f"DistributedDataParallel averages {name!r}, but every rank holds other experts: "
                "must be left out; call "
                "moe_plugin.hosts.plain.gradients.exclude_experts(model) before wrapping it, and "
                "sync_gradients after backward"
            )
    return True
