"""A check that wrappers and tools for data parallelism leave experts alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_plugin.comm.base import Comm
from moe_plugin.experts.base import Experts, is_expert
from moe_plugin.experts.overwrites import LAST_CALL, OverwriteCheck

_TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


class DDPCheck:
    """`ValueError` inside the forward pass of a torch DDP or FSDP, or of DeepSpeed, that takes
    experts for replicas; where something else overwrites them (`OverwriteCheck`); and where
    parameters are new since `reduce_experts`.

    Once a wrapper was seen that does not take them, wrappers are not checked any more. With one
    rank, whose experts may be averaged, only the first training call looks at the wrapper, which
    must not overwrite what routers count, see `moe_plugin.routing.contract.keep_counts`.

    Args:
        comm: the expert-parallel group.
        experts: of this rank.
        keep_counts: `moe_plugin.routing.contract.keep_counts` where the layer's router counts
            anything. None: it counts nothing, and with one rank nothing needs to be looked at.
    """

    def __init__(self, comm: Comm, experts: Experts,
                 keep_counts: Callable[[DistributedDataParallel], None] | None) -> None:
        self.alone, self._wrapped = comm.size == 1, False
        self.keep_counts = keep_counts
        self.passed = self.alone and keep_counts is None
        # experts outside the device are not in their parameters
        self.overwrites = None
        if comm.size > 1 and not experts.stored:
            self.overwrites = OverwriteCheck(comm, experts)

    def begin(self, experts: nn.Module) -> None:
        """The experts have got other values on purpose, such as those of a checkpoint. Local."""
        if self.overwrites is not None:
            self.overwrites.begin(experts)

    def expect_wrapper(self) -> None:
        """A wrapper will be put around the model: check it."""
        self.alone = self.passed = self._wrapped = False

    def compare_replicas(self, world: Comm | None) -> None:
        """Compare what these data-parallel ranks store in common, see `OverwriteCheck`. Local."""
        if self.overwrites is not None:
            self.overwrites.world = world

    def __call__(self, built: Experts, layer: nn.Module) -> None:
        """Check; called in every forward pass.

        Args:
            built: the experts with which the layer was built; adapters may stand in their place.
            layer: which has them.
        """
        experts: nn.Module = layer.experts  # type: ignore[assignment]
        if torch.compiler.is_compiling():
            return
        trains = built.training and torch.is_grad_enabled()
        if built.reduced and trains:
            _refuse_new(experts)
        if self.passed:
            return
        if self.alone:
            self.passed = trains
            ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
            if ddp is not None and trains and self.keep_counts is not None:
                self.keep_counts(ddp)
            return
        if not self._wrapped:
            # torch (>= 2.1) sets it on all modules below a unit of FSDP1 or FSDP2 whose parameters
            # are not left out; looked up directly: a missing attribute of a module is slow
            if experts.__dict__.get("_is_fsdp_managed_module"):
                _refuse_sharded(experts)
            # private in torch (>= 1.11); where it is missing nothing is checked
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
            # adapters stand in the experts' place, and so may the experts of another layer
            watch(experts if isinstance(experts, Experts) else built, layer)


def _refuse_new(experts: nn.Module) -> None:
    """Parameters without the hooks of `reduce_experts` would train by gradients of one rank."""
    for name, parameter in experts.named_parameters():
        if parameter.requires_grad and not getattr(parameter, "reduced", False):
            raise ValueError(
                f"gradients of the experts' {name!r} are not reduced over ranks: the parameter is "
                "new, or trainable, since the model was wrapped (reduce_experts), as "
                "load_state_dict(assign=True), copies and leaving the meta device make new ones; "
                "load and unfreeze before ddp_model or fully_shard_model, and wrap a copy that "
                "trains again")


def _refuse_averaged(ddp: DistributedDataParallel, experts: nn.Module) -> None:
    mine = {id(parameter) for parameter in experts.parameters()}
    for name, parameter in ddp.module.named_parameters(remove_duplicate=False):
        if id(parameter
              ) in mine and parameter.requires_grad and name not in ddp.parameters_to_ignore:
            raise ValueError(
                f"DistributedDataParallel averages {name!r}, but every rank holds other experts: "
                "must be left out; wrap the model by moe_plugin.ddp_model(model) instead, or call "
                "moe_plugin.training.gradients.sync.exclude_experts(model) before wrapping it, and "
                "sync_gradients after backward")


def _refuse_hooks(ddp: DistributedDataParallel) -> None:
    """Raise `ValueError` for a communication hook that may not divide by the number of ranks."""
    # private in torch (>= 2.0); where it is missing nothing is checked
    for hook, _ in getattr(ddp, "_comm_hooks", []):
        name = getattr(hook, "__name__", type(hook).__name__)
        known = (getattr(hook, "__module__", "").startswith(_TORCH_HOOKS)
                 and name not in ("noop_hook", "post_localSGD_hook"))
        if not known and not getattr(hook, "averages", False):
            raise ValueError(
                f"the communication hook {name!r} of DistributedDataParallel is not known to "
                "average gradients over all ranks, as is done with the experts' gradients. Divide "
                "by the number of ranks in the hook, and set the attribute averages=True of the "
                "hook, or leave the hook out")


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
