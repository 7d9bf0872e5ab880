"""A check that torch's wrappers for data parallelism leave experts alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_plugin.experts.base import Experts
from moe_plugin.experts.marks import is_expert


class DDPCheck:
    """`ValueError` inside the forward pass of a torch DDP or FSDP that takes experts for replicas.

    Once a wrapper was seen that does not, nothing is checked any more.
    """

    def __init__(self, ranks: int) -> None:
        self.passed = ranks == 1

    def __call__(self, experts: Experts) -> None:
        """Check; called in every forward pass."""
        if self.passed or torch.compiler.is_compiling():
            return
        # torch (>= 2.1) sets it on all modules below a unit of FSDP1 or FSDP2 whose parameters are
        # not left out; looked up directly, since a missing attribute of a module is slow
        if experts.__dict__.get("_is_fsdp_managed_module"):
            _refuse_sharded(experts)
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
                "must be left out; wrap the model by moe_plugin.ddp_model(model) instead, or call "
                "moe_plugin.hosts.plain.gradients.exclude_experts(model) before wrapping it, and "
                "sync_gradients after backward")


def _refuse_sharded(experts: nn.Module) -> None:
    """What a unit gathers are other tensors than those that were marked (or, in FSDP1, none)."""
    kept = [name for name, parameter in experts.named_parameters() if is_expert(parameter)]
    taken = [name for name, parameter in experts.named_parameters() if not is_expert(parameter)]
    if taken or not kept:
        raise ValueError(
            f"FSDP shards the experts' parameters ({', '.join(taken) or 'all'}), but every rank "
            "holds other experts: must be left out; wrap the model by "
            "moe_plugin.fully_shard_model(model) instead of torch's fully_shard or "
            "FullyShardedDataParallel")
