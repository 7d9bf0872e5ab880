"""A training loop of one's own, with the features of a run around its steps."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_plugin.comm import Comm, default_comm
from moe_plugin.config import ObserveConfig
from moe_plugin.gradients.norm import clip_grad_norm_
from moe_plugin.layer import MoELayer
from moe_plugin.observe.features import FirstStepLine, LayerRecords
from moe_plugin.observe.prediction import prediction_check
from moe_plugin.output import MoEOutput
from moe_plugin.resilience.finite import FiniteSteps
from moe_plugin.resilience.overflow import RowsFit
from moe_plugin.resilience.twins import TwinCheck
from moe_plugin.routing.replay import replaying
from moe_plugin.routing.steps import RouterSteps
from moe_plugin.run import Run, RunFeature, SkipStep, StepFacts, StepGradients, StepInput

logger = logging.getLogger(__name__)


class TrainingSteps:
    """Steps of a model and its optimizer, with the features of a run.

        steps = TrainingSteps(model, optimizer, lambda model, batch: model(batch).loss, clip=1.0)
        for batch in batches:
            loss = steps(batch)

    A step with a number that is not finite on any rank is skipped on all of them; rows that did not
    fit are computed again; routers end the step. Collective.

    Args:
        model: with MoE layers; `ddp_model` or `fully_shard_model` complete its gradients.
        optimizer: of its parameters.
        loss_of: of a model and a batch, the routers' losses included; a scalar.
        clip: bound of the gradient norm over all ranks.
        done: steps that were made before; total: of the whole run, None: not known.
        world: all data-parallel ranks; None: those of the default group.
        layers: MoE layers by the names that records have; None: all, by their places.
        observe: where statistics of the layers go; has_log: the loop writes a log of its own that
            the report reads.
        twins: steps between checks that ranks compute alike (`TwinCheck`); 0: none.
        tokens_of: the tokens of all ranks in a step, for the line after the first; None: no line.
        features: more of them, such as `Activations` or `ReplicaSteps`.

    Attributes: `run`: the features. `norm`: of the last step's gradients, before clipping.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer,
                 loss_of: Callable[[nn.Module, Any], Tensor], *, clip: float = float("inf"),
                 done: int = 0, total: int | None = None, world: Comm | None = None,
                 layers: Mapping[str, MoELayer] | None = None, has_log: bool = False,
                 observe: ObserveConfig = ObserveConfig(), twins: int = 0,
                 tokens_of: Callable[[Any], float] | None = None,
                 features: Sequence[RunFeature] = ()) -> None:
        self.model, self.optimizer, self.loss_of = model, optimizer, loss_of
        self.clip, self.done, self.total, self.tokens_of = clip, done, total, tokens_of
        self.world = default_comm() if world is None else world
        self.bare = model.module if isinstance(model, DistributedDataParallel) else model
        self.norm = torch.zeros(())
        self._by_loss = not has_log and observe.writes
        records = self._records(observe, layers, has_log) if observe.writes else None
        self._interval = observe.interval
        self.run = Run([
            FirstStepLine(), prediction_check(observe, self.world, [self.bare], "pytorch"),
            TwinCheck(self.bare, self.world, every=twins) if twins else None,
            *features, records, RowsFit([self.bare], self.world), FiniteSteps(),
            RouterSteps([self.bare])])

    def _records(self, observe: ObserveConfig, layers: Mapping[str, MoELayer] | None,
                 has_log: bool) -> LayerRecords:
        if layers is None:
            layers = {name: m for name, m in self.bare.named_modules() if isinstance(m, MoELayer)}
        for layer in layers.values():
            layer.register_forward_hook(_tell)
        return LayerRecords(observe, layers, self.world, host="pytorch", has_log=has_log)

    def __call__(self, batch: Any) -> Tensor | None:
        """A step; its loss on this rank, detached; None: no parameter has changed, on any rank.

        Raises:
            FloatingPointError: too many steps in a row were not finite.
            RowsOverflow, WrongResultError: see `RowsFit`, `TwinCheck`; on all ranks.
        """
        begins = StepInput(self.done + 1, lambda: batch,
                           lambda batch: self.loss_of(self.bare, batch))
        with self.run.around_step(begins):
            loss = self.run.compute(lambda: self._passes(batch))
            left_out = self._update(begins.number)
        facts = self._facts(batch, loss, left_out)
        self.done += facts.made
        self.run.after_step(facts)
        return loss if left_out is None else None

    def _passes(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss_of(self.model, batch)
        loss.backward()
        self.run.after_passes()
        return loss.detach()

    def _update(self, number: int) -> SkipStep | None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]

        @functools.cache
        def norm() -> Tensor:
            return clip_grad_norm_(parameters, self.clip, world=self.world)

        try:
            self.run.after_backward(StepGradients(number, lambda: [p.grad for p in parameters],
                                                  lambda: bool(norm().isfinite())))
        except SkipStep as reason:
            if self.world.rank == 0:
                logger.warning("%s", reason)
            return reason
        finally:
            self.norm = norm() if norm.cache_info().currsize else self.norm
        self.optimizer.step()
        return None

    def _facts(self, batch: Any, loss: Tensor, left_out: SkipStep | None) -> StepFacts:
        lost = left_out is not None and left_out.lost
        number, mean = self.done + 1, None
        if self._by_loss and not lost and number % self._interval == 0:
            mean = float(self.world.all_reduce(loss.float()) / self.world.size)
        return StepFacts(number, made=not lost, skipped=left_out is not None and not lost,
                         tokens=None if self.tokens_of is None else self.tokens_of(batch),
                         left=None if self.total is None else max(0, self.total - number),
                         loss=mean)

    def close(self) -> None:
        """Close files and leave other replicas."""
        self.run.close()


def _tell(layer: MoELayer, _: Any, out: MoEOutput) -> None:
    # one pass counts where activations are recomputed
    if out.stats is not None and (not layer.training or (
            torch.is_grad_enabled() and not replaying())):
        layer.observer(out.stats)
