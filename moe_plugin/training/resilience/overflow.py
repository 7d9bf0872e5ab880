"""Steps and evaluations in which rows did not fit (`dispatch.name: bounded`): an error, or the
same once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.torch_comm import default_comm
from moe_plugin.dispatch.rows_limit import Limit, overflowed
from moe_plugin.layer import MoELayer, layers_in
from moe_plugin.observe.recorder import marks
from moe_plugin.training.run import Run
from moe_plugin.utils.run_feature import RunFeature, SkipStep, StepGradients, StepRepeat

MAX_SKIPPED_STEPS = 10  # in a row, without those by which a loss scale falls


class FiniteSteps(RunFeature):
    """Skips steps with a loss or gradient that is not finite on any rank.

    Attributes: `skipped`: steps so far. `in_a_row`: those since the last good step.
    """

    def __init__(self) -> None:
        self.skipped = self.in_a_row = self._unscaled = 0

    def after_backward(self, gradients: StepGradients) -> None:
        """Look at the gradients. Collective. `SkipStep`: they are not finite, on all ranks.
        `FloatingPointError`: `MAX_SKIPPED_STEPS` steps in a row were skipped.
        """
        if gradients.finite():
            self.in_a_row = 0
            return
        unscaled = not gradients.scale_falls()
        self.skipped += 1
        self.in_a_row, self._unscaled = self.in_a_row + unscaled, self._unscaled + unscaled
        text = (f"step {gradients.number} skipped on all ranks ({self.in_a_row} in a row, "
                f"{self.skipped} in total): a loss or gradient is not finite")
        if self.in_a_row >= MAX_SKIPPED_STEPS:
            raise FloatingPointError(
                f"{self.in_a_row} steps in a row had a loss or gradient that is not finite: "
                "training stops; the newest checkpoint is from before them. Resume from it with a "
                "lower learning rate or other data")
        raise SkipStep(text)

    def take_unscaled(self) -> int:
        """Steps skipped since the last call, without those by which a loss scale falls."""
        taken, self._unscaled = self._unscaled, 0
        return taken


logger = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass
class _AskedBefore:
    """Kept with a group (`comm.state`): what its ranks agreed on, by model. Both may go."""

    models: WeakKeyDictionary[nn.Module, Sequence[bool]] = field(
        default_factory=WeakKeyDictionary)


class RowsCheck:
    """Whether rows of models fit, asked by all ranks. Making it is collective.

    Args:
        models: this rank's; they may have no such layer, where those of other ranks have.
        world: all ranks of the models, replicas and pipeline stages included.
        asked: agreed on before; then making it is not collective.

    Attributes:
        active: whether any rank has something to ask for.
        repeats: whether any rank's limit does.
    """

    def __init__(self, models: Iterable[nn.Module], world: Comm,
                 asked: Sequence[bool] | None = None) -> None:
        self._layers, self.world = layers_in(*models), world
        if asked is None:
            limits = self.limits
            here = [bool(limits), any(limit.repeats for limit in limits)]
            flags_2 = torch.tensor(here, dtype=torch.int64, device=world.device)
            asked = [bool(flag) for flag in world.all_reduce(flags_2, "max").tolist()]
        self.active, self.repeats = asked

    @classmethod
    def of(cls, model: nn.Module, world: Comm) -> RowsCheck:
        """As it is now; collective at the first use in this group."""
        known = world.state.get(_AskedBefore).models
        check = cls([model], world, known.get(model))
        known[model] = check.active, check.repeats
        return check

    @property
    def limits(self) -> list[Limit]:
        """Those that the layers have now: another expert-parallel size brings others."""
        return _limits(self._layers)

    def forget(self) -> None:
        """What follows is a step or an evaluation of its own."""
        for limit in self.limits:
            limit.forget()

    def overflowed(self) -> bool:
        """See `dispatch.rows_limit.overflowed`."""
        return self.active and overflowed(self.limits, self.world)


def limits_of(models: Iterable[nn.Module]) -> list[Limit]:
    """The bounds of all layers of these models, and the pages that they share."""
    return _limits(layers_in(*models))


def _limits(layers: Iterable[MoELayer]) -> list[Limit]:
    found: list[Limit | None] = []
    for layer in layers:
        found += [layer.routed_experts.layouts.limit, layer.routed_experts.layouts.stash]
    return list({id(limit): limit for limit in found if limit is not None}.values())


def until_rows_fit(model: nn.Module, step: Callable[[], Result],
                   world: Comm | None = None) -> Result:
    """What `step()` returns; where rows did not fit, discard its gradients and repeat it.

    A repetition starts with the same state of torch's random generators, the same buffers and the
    same sums of statistics (`StatsRecorder`), and with a larger bound on all ranks. For layers with
    `dispatch.name=bounded`; where no rank has such a layer it is `step()`. Put what updates
    parameters after it:

        loss = until_rows_fit(model, lambda: forward_and_backward(batch))
        optimizer.step()

    An evaluation is a step without gradients; call this inside `torch.no_grad()`.

    Args:
        model: of this rank. The first call with it in a group is collective, and all ranks make it.
        step: forward and backward passes, which set or add to the parameters' gradients. These are
            set to None first, unless gradients are disabled.
        world: all ranks that train the model, replicas included; None: the default group.
    Raises:
        RowsOverflow: on all ranks, where `dispatch.on_overflow` is error.
    """
    world = default_comm() if world is None else world
    rows = RowsFit([model], world, check=RowsCheck.of(model, world))
    if not rows.check.active:
        return step()

    def passes() -> Result:
        if torch.is_grad_enabled():
            model.zero_grad()
        result = step()
        rows.after_passes()
        return result

    return Run([rows]).compute(passes)


class StepStart:
    """What a step changes before the optimizer's: random generators, buffers and statistics, as
    they are now.

    Args:
        models: whose buffers are kept.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.models = list(models)
        self._forget_statistics = marks()
        self._buffers = [buffer.clone() for buffer in self._now()]
        self._random = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def rewind(self) -> None:
        """Set them as they were, and forget the step's statistics, to repeat it."""
        logger.info("rows of a step did not fit: its bound is larger now, and it is repeated")
        for forget in self._forget_statistics:
            forget()
        self.restore()

    def restore(self) -> None:
        """Set random generators and buffers as they were."""
        for buffer, kept in zip(self._now(), self._buffers, strict=True):
            buffer.copy_(kept)
        torch.set_rng_state(self._random)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def _now(self) -> list[Tensor]:
        # by name: Megatron's wrapper has a list in place of the method `buffers`
        return [buffer for model in self.models for _, buffer in model.named_buffers()]


class VotesOnRows(Protocol):
    """What `RowsFit` asks of votes."""

    def rows_overflowed(self) -> bool:
        """`RowsCheck.overflowed` by vote."""


class RowsFit(RunFeature):
    """Steps and evaluations of a run begin again until their rows fit. Made by all ranks;
    collective.

    Args:
        models: this rank's parts of the model; a pipeline stage may have no MoE layer.
        world: all ranks of the models.
        start: what keeps the state that passes change, made with the models.
        check: made before; None: one of these models.
        votes: of the run; None: there are none.
    """

    def __init__(self, models: Iterable[nn.Module], world: Comm,
                 start: Callable[[list[nn.Module]], StepStart] = StepStart,
                 check: RowsCheck | None = None,
                 votes: VotesOnRows | None = None) -> None:
        self.models, self.start, self.votes = list(models), start, votes
        self.check = RowsCheck(self.models, world) if check is None else check

    def before_passes(self) -> Callable[[], None] | None:
        """What the passes change is kept where they may be repeated."""
        self.check.forget()
        return self.start(self.models).rewind if self.check.repeats else None

    def after_passes(self) -> None:
        """See `RunFeature`. `StepRepeat`: rows did not fit; the bound is larger now, on all ranks.
        `RowsOverflow`: on all ranks, where `dispatch.on_overflow` is error.
        """
        asked = self.check.overflowed if self.votes is None else self.votes.rows_overflowed
        if self.check.active and asked():
            raise StepRepeat
