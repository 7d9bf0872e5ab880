"""`RouterModule`: what a layer and its host may ask of any router.

The mark of router parameters whose initial values a host must keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_plugin.comm.base import Comm
from moe_plugin.comm.placement import HostContext
from moe_plugin.comm.torch_comm import TorchComm
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing.replay import replayed
from moe_plugin.utils.run_feature import RunFeature, StepFacts, StepInput


def keep_init(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter: a host's own initialisation leaves it as the router made it."""
    parameter.own_init = True  # type: ignore[attr-defined]
    return parameter


def keeps_init(parameter: Tensor) -> bool:
    """Whether `keep_init` marked this parameter."""
    return getattr(parameter, "own_init", False)


T = TypeVar("T")


class HasFinishStep:
    """Base of modules that do something once per step."""

    def finish_step(self) -> None:
        """Called after each optimizer step, on all ranks (`moe_plugin.routing.finish_step`)."""

    def forget_step(self) -> None:
        """Forget what was counted since the last step; nothing moves by it. Not collective."""


class BuffersKeepDtype(nn.Module):
    """Base of modules whose buffers keep their values and dtypes whatever lowers (`half()`) or
    empties (`to_empty()`) the module: nothing fills them again, and a bias that moves by 0.001
    stands still in 16 bits. They follow the module's device; none is made on the meta device.

    Attributes:
        keeps_parameters: parameters of fewer bits than float32 become float32, too.
    """

    keeps_parameters: bool = False

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        buffers = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in buffers.items():
            after = self._buffers[name]
            if after is not None and not before.is_meta:
                self._buffers[name] = before.to(after.device)
        return self


def float32_state(module: nn.Module) -> list[str]:
    """Names in a module's state dict of what stays in float32 when the module is cast."""
    found = []
    for name, part in module.named_modules():
        if isinstance(part, BuffersKeepDtype):
            kept = [own for own, value in part.named_buffers(recurse=False)
                    if own not in part._non_persistent_buffers_set and value.is_floating_point()]
            if part.keeps_parameters:
                kept += [own for own, _ in part.named_parameters(recurse=False)]
            found += [f"{name}.{own}" if name else own for own in kept]
    return found


class RouterModule(HasFinishStep, nn.Module):
    """Base of all routers, with what a router declares and what it does once per step.

    A router that shares nothing with the provided ones derives from this class; most derive from
    `moe_plugin.routing.Router`. A layer also takes a plain `nn.Module` with the same `forward`; it
    counts as one that needs nothing.

    Attributes:
        needs: what it reads of a call's `TokenInfo`: "token_ids", "sequences". Hosts pass only
            what is needed.
        own_losses: losses that this router can compute and some others cannot.
        reads: settings of `router` that some routers read and this one does, by name or
            `name=value`; each class says so for itself. None: it may read any.
        fixed_k: experts per token if the router has no choice; None: `router.top_k`, which a call
            may override.
        any_number: a token may have up to E experts, whatever k is.
        reads_top_k: `router.top_k` changes what it does; False, too, for a class with `fixed_k`.
        balances: it gives experts even loads without a balance loss.
        host: what the host knows of the layer.
        all_ranks: data-parallel ones, told by `gradients.sync` where a model has no host; None:
            not yet.
    """

    needs: frozenset[str] = frozenset()
    own_losses: frozenset[str] = frozenset()
    reads: frozenset[str] | None = None
    fixed_k: int | None = None
    any_number: bool = False
    reads_top_k: bool = True
    balances: bool = False
    all_ranks: Comm | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.fixed_k is not None:
            cls.reads_top_k = False

    def __init__(self, host: HostContext = HostContext()) -> None:
        super().__init__()
        self.host = host

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, top_k: int | None = None,
                info: TokenInfo | None = None) -> Routing:
        """Route tokens.

        Args:
            x_TD: tokens, any float dtype.
            mask_T: bool, True = real token; None: all are real.
            top_k: experts per token for this call; None: the configured number.
            info: what else is known of the tokens; see `needs`.
        """
        raise NotImplementedError

    def replayed(self, choose: Callable[[], T], what: str = "choice",
                 shape: tuple[int, ...] | None = None) -> T:
        """`choose()`, or in a recomputation what it returned in the first pass; see
        `moe_plugin.routing.replay.replayed`.
        """
        return replayed(self, choose, self.training, what=what, shape=shape)

    def step_sums(self) -> list[Tensor]:
        """Sums over what a rank has routed since the last step, by which `finish_step` moves the
        router: with those of other ranks in them (integers: added, floats: averaged) their routers
        stay the same. None: nothing of the kind moves it.
        """
        return []

    def __getstate__(self) -> dict[str, Any]:
        # copies are trained by what is told again; a process group cannot be pickled
        return {name: value for name, value in vars(self).items() if name != "all_ranks"}


class TopKSchedule(HasFinishStep, BuffersKeepDtype):
    """Experts per token by optimizer step (`router.top_k_at`); saved with the weights.

    A run that knows the number of its step tells it (`begin_step`); elsewhere `finish_step` counts.
    The value is one number on the host: a call reads nothing from the device, a compiled layer is
    compiled once for each number of experts.

    Args:
        first: experts per token before the first change.
        changes: by step, from 1, or by part of the run (below 1): experts per token from there on.
        device: of the saved numbers.
    Attributes:
        k: experts per token of the present step; outside training, of the next one.
        steps: completed ones.
        total: of the whole run; None: not known.
    """

    now: Tensor

    def __init__(self, first: int, changes: Mapping[float, int], device: Any = None) -> None:
        super().__init__()
        self.first, self.changes = first, dict(changes)
        self.steps, self.k, self.total = 0, first, None  # type: int, int, int | None
        self.register_buffer("now", torch.tensor([0, first], device=device))

    def begin_step(self, number: int, total: int | None) -> None:
        """A run makes its step `number`, from 1, of so many; None: their number is not known."""
        self.total = self.total if total is None else total
        self._go_to(number - 1)

    def finish_step(self) -> None:
        """Count the step.

        Raises:
            ValueError: changes are by parts of a run, whose number of steps is not known.
        """
        self._go_to(self.steps + 1)

    def _go_to(self, steps: int) -> None:
        k = self.first
        for place, experts in self.changes.items():
            if place < 1 and self.total is None:
                raise ValueError(
                    f"router.top_k_at={self.changes} is by parts of a run, whose number of steps "
                    "is not known: must be by steps, such as 1000=1; use these, or tell how many "
                    "there are (--max-update, --train-iters, TrainingSteps(..., total=...))")
            k = experts if steps >= (place * (self.total or 0) if place < 1 else place - 1) else k
        if (steps, k) != (self.steps, self.k):
            self.steps, self.k = steps, k
            self.now.copy_(torch.tensor([steps, k]))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}now")
        if saved is None:  # of a run that had no schedule yet
            state_dict[f"{prefix}now"] = self.now
        elif not saved.is_meta:
            self.steps, self.k = saved.tolist()
        super()._load_from_state_dict(state_dict, prefix, *args)


def begin_step(model: nn.Module, number: int, total: int | None) -> None:
    """Tell the schedules of a model which step a run makes; see `TopKSchedule.begin_step`."""
    for module in model.modules():
        if isinstance(module, TopKSchedule):
            module.begin_step(number, total)


def needs_of(router: nn.Module) -> frozenset[str]:
    """`RouterModule.needs`; nothing for another module."""
    return router.needs if isinstance(router, RouterModule) else frozenset()


def balances_by_itself(router: nn.Module) -> bool:
    """Whether a router needs no balance loss; True where it does not say."""
    return router.balances if isinstance(router, RouterModule) else True


def finish_step(model: nn.Module) -> None:
    """Call `finish_step` of all routers and layers of a model: biases and temperatures move, counts
    restart, replicas are placed again.

    Collective if state depends on all ranks (sigmoid_bias, measured speeds): every rank calls it
    once after each optimizer step, not once per micro-batch. The hosts do so; a custom training
    loop must do so if it uses sigmoid_bias, dense_to_sparse, global_batch, `router.selection` or
    `parallel.spill: standing`.

    Raises:
        ValueError: the model has none of them.
    """
    if not finish_step_of_any(model):
        raise ValueError(f"{type(model).__name__} has no MoE layer whose step ends: give the model "
                         "that has the layers, or leave the call out")


def finish_step_of_any(model: nn.Module) -> bool:
    """`finish_step` for a part of a model that may have no MoE layer; whether it has one."""
    found = [module for module in model.modules() if isinstance(module, HasFinishStep)]
    for module in found:
        module.finish_step()
    return bool(found)


def forget_step(model: nn.Module) -> None:
    """Call `forget_step` of all routers of a model, in place of `finish_step` after passes whose
    step is not made: nothing moves, and counts restart. Not collective.
    """
    for module in model.modules():
        if isinstance(module, HasFinishStep):
            module.forget_step()


class RouterSteps(RunFeature):
    """Calls `finish_step` of a run's models after each step that counts, and `forget_step` after
    one that does not: what routers counted of it would count in the next one. Schedules of routers
    follow the number of the run's step.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.models = list(models)

    def around_step(self, step: StepInput) -> AbstractContextManager[Any]:
        """See the class."""
        for model in self.models:
            begin_step(model, step.number, step.total)
        return nullcontext()

    def after_step(self, facts: StepFacts) -> None:
        """A step that changed no parameter moves no router."""
        ends = finish_step_of_any if facts.made and not facts.skipped else forget_step
        for model in self.models:
            ends(model)


def router_counts(model: nn.Module) -> list[str]:
    """Names of the buffers in which routers keep what this rank counts and measures."""
    return [f"{path}.{name}".lstrip(".") for path, module in model.named_modules()
            if isinstance(module, RouterModule) for name in module._non_persistent_buffers_set]


def keep_counts(ddp: DistributedDataParallel) -> None:
    """Let biases follow the loads of all ranks of a DDP that was put around the model without
    `ddp_model`.

    Before a forward pass DDP overwrites each rank's buffers by those of rank 0, and the routers'
    counts of earlier micro-batches with them.
    """
    ddp.parameters_to_ignore = {*ddp.parameters_to_ignore, *router_counts(ddp.module)}
    ddp._assign_modules_buffers()  # before the next pass asks whether any are left to send
    for router in ddp.module.modules():
        if isinstance(router, RouterModule) and router.all_ranks is None:
            router.all_ranks = TorchComm(ddp.process_group)
