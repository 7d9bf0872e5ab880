"""Detect data-parallel wrappers that treat experts as replicas."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_plugin.comm.base import Comm
from moe_plugin.experts.base import Experts, is_expert
from moe_plugin.experts.overwrites import LAST_CALL, OverwriteCheck

_TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


class DDPCheck:
    """A check in the forward pass that raises a `ValueError` if other code treats experts as
    replicas of each other.

    The check detects torch's DDP and FSDP, DeepSpeed, other code that overwrites experts
    (`OverwriteCheck`), and parameters that were replaced after `reduce_experts`. Once the check has
    found a wrapper that excludes the experts, it no longer looks for wrappers.

    The check is skipped if the expert-parallel group has only one rank, because all data-parallel
    ranks then store the same experts, which may be averaged.

    Args:
        comm: the expert-parallel group.
        experts: the experts of this rank.
    """

    def __init__(self, comm: Comm, experts: Experts) -> None:
        self.passed, self._wrapped = comm.size == 1, False
        # the parameters of experts that are stored outside the device do not contain their values
        self.overwrites = None
        if comm.size > 1 and not experts.stored:
            self.overwrites = OverwriteCheck(comm, experts)

    def begin(self, experts: nn.Module) -> None:
        """Accept the current expert values as correct, for example after loading a checkpoint."""
        if self.overwrites is not None:
            self.overwrites.begin(experts)

    def expect_wrapper(self) -> None:
        """Check for a wrapper again in the next call, because the model is about to be wrapped."""
        self.passed = self._wrapped = False

    def compare_replicas(self, world: Comm | None) -> None:
        """Also compare shared parameters and replicas over the ranks in `world` (see
        `OverwriteCheck`).
        """
        if self.overwrites is not None:
            self.overwrites.world = world

    def __call__(self, built: Experts, layer: nn.Module) -> None:
        """Run the check. The layer calls this method in every forward pass.

        Args:
            built: the layer's experts, without any adapters that wrap them.
            layer: the layer.
        """
        experts: nn.Module = layer.experts  # type: ignore[assignment]
        if torch.compiler.is_compiling():
            return
        trains = built.training and torch.is_grad_enabled()
        if built.reduced and trains:
            _refuse_new(experts)
        if self.passed:
            return
        if not self._wrapped:
            # torch (>= 2.1) sets this attribute on all modules that FSDP1 or FSDP2 manages. It is
            # read from __dict__, because looking up a missing attribute of a module is slow.
            if experts.__dict__.get("_is_fsdp_managed_module"):
                _refuse_sharded(experts)
            # private in torch (>= 1.11); without it nothing is checked
            ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
            if ddp is not None:
                _refuse_averaged(ddp, experts)
                if built.reduced:
                    _refuse_hooks(ddp)
                self._wrapped = True
        watch = self.overwrites
        if watch is None or watch.calls >= LAST_CALL:
            self.passed = self._wrapped
        elif trains:
            # `layer.experts` may be an adapter, or the experts of another layer
            watch(experts if isinstance(experts, Experts) else built, layer)


def _refuse_new(experts: nn.Module) -> None:
    """Raise an error if a trainable parameter does not have the hooks registered by
    `reduce_experts`.

    Without these hooks, the parameter would be trained with the gradient of only one rank.
    """
    for name, parameter in experts.named_parameters():
        if parameter.requires_grad and not getattr(parameter, "reduced", False):
            raise ValueError(
                f"gradients of the experts' {name!r} are not reduced over ranks, because the "
                "parameter was replaced or became trainable after the model was wrapped. "
                "Parameters are replaced by load_state_dict(assign=True), by copying a model, and "
                "by leaving the meta device. Load and unfreeze parameters before ddp_model or "
                "fully_shard_model, and wrap a copy of the model again")


def _refuse_averaged(ddp: DistributedDataParallel, experts: nn.Module) -> None:
    mine = {id(parameter) for parameter in experts.parameters()}
    for name, parameter in ddp.module.named_parameters(remove_duplicate=False):
        if id(parameter
              ) in mine and parameter.requires_grad and name not in ddp.parameters_to_ignore:
            raise ValueError(
                f"DistributedDataParallel averages {name!r}, but every rank has different experts. "
                "Wrap the model with moe_plugin.ddp_model(model), or call "
                "moe_plugin.training.gradients.sync.exclude_experts(model) before wrapping it and "
                "sync_gradients after backward")


def _refuse_hooks(ddp: DistributedDataParallel) -> None:
    """Raise an error for a communication hook that might not divide gradients by the number of
    ranks.
    """
    # private in torch (>= 2.0); without it nothing is checked
    for hook, _ in getattr(ddp, "_comm_hooks", []):
        name = getattr(hook, "__name__", type(hook).__name__)
        averages = (getattr(hook, "__module__", "").startswith(_TORCH_HOOKS)
                    and name not in ("noop_hook", "post_localSGD_hook"))
        if not averages and not getattr(hook, "averages", False):
            raise ValueError(
                f"the communication hook {name!r} of DistributedDataParallel might not average "
                "gradients over all ranks, but the gradients of experts are averaged. Divide by "
                "the number of ranks in the hook and set its attribute averages=True, or leave the "
                "hook out")


def _refuse_sharded(experts: nn.Module) -> None:
    # the parameters of an FSDP unit are new tensors without the mark; FSDP1 leaves none
    kept = [name for name, parameter in experts.named_parameters() if is_expert(parameter)]
    taken = [name for name, parameter in experts.named_parameters() if not is_expert(parameter)]
    if taken or not kept:
        raise ValueError(
            f"FSDP shards the experts' parameters ({', '.join(taken) or 'all'}), but every rank "
            "has different experts. Wrap the model with moe_plugin.fully_shard_model(model) "
            "instead of torch's fully_shard or FullyShardedDataParallel")
