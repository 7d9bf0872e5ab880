"""`RouterModule`, the interface that every router provides to its layer and the host framework.

The module also contains base classes for modules that are updated once per optimizer step, and a
mark for parameters that a host framework must not initialize again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from moe_plugin.comm.base import Comm
from moe_plugin.comm.placement import HostContext
from moe_plugin.comm.torch_comm import TorchComm
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing.replay import replayed
from moe_plugin.utils.run_feature import RunFeature, StepFacts, StepInput


def keep_init(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter so that host frameworks do not initialize it again."""
    parameter.own_init = True  # type: ignore[attr-defined]
    return parameter


def keeps_init(parameter: Tensor) -> bool:
    """Return whether `keep_init` has marked this parameter."""
    return getattr(parameter, "own_init", False)


T = TypeVar("T")
_watched: list[object] = []  # the hook on all modules, registered once


class HasFinishStep:
    """Base class of modules that are updated once per optimizer step."""

    def finish_step(self) -> None:
        """Update the module after an optimizer step. All ranks must call this method."""

    def forget_step(self) -> None:
        """Discard the counts since the last step without updating the module. Not collective."""


# Settings (`RouterModule.reads`) of routers that score tokens (SCORED), choose several experts per
# token (SEVERAL), weigh by a score function (BY_SCORE), and may drop a second expert (WITH_POLICY).
SCORED = frozenset({"noise", "input_jitter", "input_dropout", "batch_prioritized"})
SEVERAL = SCORED | {"normalize=after_drop", "normalize_add", "normalize_min"}
BY_SCORE = SEVERAL | {"score", "normalize=before_drop", "normalize=always"}
LINEAR = frozenset({"bias"})  # for routers with the logits of `Router.scores`
FORCED = frozenset({"force"})  # for routers with a choice that may be replaced
WITH_POLICY = BY_SCORE | {"second_expert_policy", "second_expert_policy=random"}


class BuffersKeepDtype(nn.Module):
    """Base class of modules whose buffers are not affected by casting or emptying the module.

    The buffers keep their values and dtypes when the module is cast (`half()`) or emptied
    (`to_empty()`). The values of emptied buffers would be lost, and a 16-bit bias cannot represent
    changes of 0.001 per step. When the module is moved to another device, its buffers are moved as
    well. Subclasses must not create buffers on the meta device.

    Attributes:
        keeps_parameters: if True, parameters whose dtype has fewer bits than float32 are also
            converted to float32.
    """

    keeps_parameters: bool = False

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        buffers = dict(self.named_buffers(recurse=False))
        # The values from before replace whatever `fn` made of the buffers. A buffer on the meta
        # device has no values to restore.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in buffers.items():
            after = self._buffers[name]
            if after is not None and not before.is_meta:
                self._buffers[name] = before.to(after.device)
        return self


def float32_state(module: nn.Module) -> list[str]:
    """Return the names of state dict entries that remain in float32 when the module is cast."""
    names = []
    for name, part in module.named_modules():
        if isinstance(part, BuffersKeepDtype):
            kept = [entry for entry, value in part.named_buffers(recurse=False)
                    if entry not in part._non_persistent_buffers_set and value.is_floating_point()]
            if part.keeps_parameters:  # also those of modules inside it, which it casts
                kept += [entry for entry, _ in part.named_parameters()]
            names += [f"{name}.{entry}" if name else entry for entry in kept]
    return list(dict.fromkeys(names))  # a router inside a router is visited twice


class RouterModule(HasFinishStep, nn.Module):
    """Base class of all routers.

    The class defines the attributes that a router declares, and the methods that are called once
    per step.

    Most routers are subclasses of `moe_plugin.routing.Router`. A router that shares no code with
    the provided routers can subclass this class directly. A layer also accepts a plain `nn.Module`
    with the same `forward` method. The layer assumes that this module needs no token information.

    Attributes:
        needs: names of the fields of `TokenInfo` that the router reads ("token_ids" or
            "sequences"). Host frameworks provide only the fields in `needs`.
        own_losses: names of the losses that this router can compute but some other routers cannot.
        reads: names of the optional settings in the `router` section that this router reads. Each
            element has the form `name` or `name=value`. Each class must declare the complete list,
            including the settings read by its base classes. If `reads` is None, the router may read
            any setting.
        fixed_k: number of experts per token, if this number cannot be configured. If `fixed_k` is
            None, `router.top_k` sets the number of experts per token, and each call can override
            it.
        any_number: True if a token may have up to E experts, independently of k.
        reads_top_k: True if `router.top_k` affects the router. `reads_top_k` is False for every
            class that sets `fixed_k`.
        balances: True if the router distributes tokens evenly without a balance loss.
        host: information about the layer from the host framework.
        all_ranks: group of all data-parallel ranks. In models without a host framework,
            `gradients.sync` sets this attribute. None until then.
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
        """Choose experts and weights for each token.

        Args:
            x_TD: tokens [T, D] of any floating-point dtype.
            mask_T: bool [T], True for tokens that are not padding. Optional. By default, all tokens
                are real.
            top_k: number of experts per token for this call. Defaults to the configured number.
            info: additional information about the tokens; see `needs`.
        """
        raise NotImplementedError

    def replayed(self, choose: Callable[[], T], what: str = "choice",
                 shape: tuple[int, ...] | None = None) -> T:
        """Return `choose()`. During a recomputation, return the value of the first pass.

        See `moe_plugin.routing.replay.replayed`.
        """
        return replayed(self, choose, self.training, what=what, shape=shape)

    def step_sums(self) -> list[Tensor]:
        """Return sums over this rank's tokens. `finish_step` uses these sums to update the router.

        The sums include all tokens routed since the last optimizer step. A caller may combine the
        sums with the sums of other replicas, so that the routers of all replicas remain equal. When
        combining them, sum integer tensors and average floating-point tensors. The list is empty if
        the router's update does not use sums.
        """
        return []

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be pickled. `gradients.sync` sets the attribute again on a copy.
        return {name: value for name, value in vars(self).items() if name != "all_ranks"}


def changed_by_others(buffer: Tensor, version: int) -> bool:
    """Return whether a buffer was changed in place after the given version (`Tensor._version`).
    Buffers can change without `load_state_dict`, for example when weights are averaged (EMA) or
    when a checkpoint is read in place.
    """
    return (not torch.compiler.is_compiling() and not buffer.is_inference()
            and buffer._version != version)


class TopKSchedule(HasFinishStep, BuffersKeepDtype):
    """The number of experts per token as a function of the optimizer step (`router.top_k_at`).

    The state of the schedule is saved with the weights. If the host framework knows the index of
    the step, it passes the index to `begin_step`. Otherwise, `finish_step` counts the steps. The
    current number of experts is stored as a Python integer. A call therefore does not read this
    number from the device, and a layer is compiled once for each distinct number.

    Args:
        first: number of experts per token before the first change.
        changes: mapping from a step to the number of experts per token that applies from this step
            on. A step is given either as an index, counted from 1, or as a fraction of the run,
            which must be below 1.
        device: device of the buffers that are saved with the weights.
    Attributes:
        k: number of experts per token in the current step. Outside training, `k` is the number for
            the next step. `k` is read from the buffer only if other code has changed the buffer.
        steps: number of completed optimizer steps.
        total: total number of optimizer steps in the run. None if unknown.
    """

    now: Tensor

    def __init__(self, first: int, changes: Mapping[float, int], device: Any = None) -> None:
        super().__init__()
        self.first, self.changes = first, dict(changes)
        self.steps, self._k, self.total = 0, first, None  # type: int, int, int | None
        self.register_buffer("now", torch.tensor([0, first], device=device))
        self._version = self.now._version

    @property
    def k(self) -> int:
        """Number of experts per token in the current step."""
        self._follow_buffer()
        return self._k

    def _follow_buffer(self) -> None:
        if changed_by_others(self.now, self._version):
            self._version = self.now._version
            self.steps, self._k = self.now.tolist()

    def begin_step(self, number: int, total: int | None) -> None:
        """Set the index of the step that is about to start.

        Args:
            number: index of the step, counted from 1.
            total: total number of steps of the run. None if unknown.
        """
        self.total = self.total if total is None else total
        self._go_to(number - 1)

    def finish_step(self) -> None:
        """Count the step.

        Raises:
            ValueError: If the schedule contains fractions of the run but its number of steps is
                unknown.
        """
        self._follow_buffer()
        self._go_to(self.steps + 1)

    def _go_to(self, steps: int) -> None:
        self._follow_buffer()
        # The last change that has been reached wins, so `changes` must be in ascending order.
        k = self.first
        for start, experts in self.changes.items():
            if start < 1 and self.total is None:
                raise ValueError(
                    f"router.top_k_at={self.changes} uses fractions of the run, but the number of "
                    "steps is unknown. Use step numbers such as 1000=1, or set the number of "
                    "steps (--max-update, --train-iters, TrainingSteps(..., total=...)).")
            k = experts if steps >= (start * (self.total or 0) if start < 1 else start - 1) else k
        if (steps, k) != (self.steps, self._k):
            self.steps, self._k = steps, k
            self.now.copy_(torch.tensor([steps, k]))
            self._version = self.now._version

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}now")
        if saved is None:  # the checkpoint was written without a schedule
            state_dict[f"{prefix}now"] = self.now
        elif not saved.is_meta:
            self.steps, self._k = saved.tolist()
        super()._load_from_state_dict(state_dict, prefix, *args)


def begin_step(model: nn.Module, number: int, total: int | None) -> None:
    """Pass the index of the current step to all schedules of a model."""
    for module in model.modules():
        if isinstance(module, TopKSchedule):
            module.begin_step(number, total)


def needs_of(router: nn.Module) -> frozenset[str]:
    """Return the `needs` attribute of a `RouterModule`, or an empty set for any other module."""
    return router.needs if isinstance(router, RouterModule) else frozenset()


def balances_by_itself(router: nn.Module) -> bool:
    """Return whether a router balances the load without a balance loss. Modules that do not derive
    from `RouterModule` are assumed to do so.
    """
    return router.balances if isinstance(router, RouterModule) else True


def finish_step(model: nn.Module) -> None:
    """Call the `finish_step` method of all routers and layers of a model.

    `finish_step` updates biases and temperatures, resets counts, and computes a new placement of
    expert replicas. The function is collective if the updated state depends on all ranks, for
    example for sigmoid_bias or for measured speeds. Every rank must call this function exactly once
    after each optimizer step, and not once per micro-batch. The integrations with host frameworks
    already call this function. If a custom training loop uses sigmoid_bias, dense_to_sparse,
    global_batch, `router.selection` or `parallel.spill: standing`, it must call this function.

    Raises:
        ValueError: If the model contains neither an MoE layer nor a router.
    """
    if not finish_step_of_any(model):
        raise ValueError(f"finish_step found no MoE layer in {type(model).__name__}. Pass the "
                         "model that contains the layers, or remove the call.")


def finish_step_of_any(model: nn.Module) -> bool:
    """Call `finish_step` for a part of a model that may contain no MoE layer.

    Returns: True if a layer or router of the model has a `finish_step` method.
    """
    modules = [module for module in model.modules() if isinstance(module, HasFinishStep)]
    for module in modules:
        module.finish_step()
    return bool(modules)


def forget_step(model: nn.Module) -> None:
    """Call the `forget_step` method of all routers of a model.

    Call this function instead of `finish_step` after passes that are not followed by an optimizer
    step. The function resets the counts without updating any router. Not collective.
    """
    for module in model.modules():
        if isinstance(module, HasFinishStep):
            module.forget_step()


class RouterSteps(RunFeature):
    """A run feature that updates the routers at the end of each step.

    If the step changed parameters, the feature calls `finish_step`. If the step changed no
    parameters, the feature calls `forget_step`. Otherwise, the next step would include the counts
    of this step. The feature also passes the index of the current step to the routers' schedules.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.models = list(models)

    def around_step(self, step: StepInput) -> AbstractContextManager[Any]:
        """Before the step, pass its index to the schedules."""
        for model in self.models:
            begin_step(model, step.number, step.total)
        return nullcontext()

    def after_step(self, facts: StepFacts) -> None:
        """After the step, update the routers, unless the step changed no parameters."""
        ends = finish_step_of_any if facts.made and not facts.skipped else forget_step
        for model in self.models:
            ends(model)


def router_counts(model: nn.Module) -> list[str]:
    """Return the names of the buffers with the counts and measurements of a model's routers.

    Their contents are valid on this rank only.
    """
    return [f"{path}.{name}".lstrip(".") for path, module in model.named_modules()
            if isinstance(module, RouterModule) for name in module._non_persistent_buffers_set]


def watch_ddp() -> None:
    """Exclude the counts of routers from the buffers synchronized by all DDP wrappers that are
    created afterwards.

    Before each forward pass, DDP overwrites the buffers of every rank with the buffers of rank 0.
    This would discard the counts of earlier micro-batches. The routers in a DDP wrapper use the
    loads of all ranks of the wrapper. The hook runs only when modules are created, so it also works
    with compiled models.
    """
    if not _watched:
        _watched.append(register_module_module_registration_hook(_keep_counts))


def _keep_counts(ddp: nn.Module, name: str, module: nn.Module) -> None:
    # DDP registers its module after it has read the names to ignore, and before it uses them
    if isinstance(ddp, DistributedDataParallel) and name == "module":
        ddp.parameters_to_ignore = {*ddp.parameters_to_ignore, *router_counts(module)}
        for router in module.modules():
            if isinstance(router, RouterModule) and router.all_ranks is None:
                router.all_ranks = TorchComm(ddp.process_group)
