"""The class `TrainingSteps`, which runs the steps of a user's own training loop."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_plugin.comm import Comm, TorchComm, default_comm
from moe_plugin.comm.host_collectives import refused_together
from moe_plugin.config import GuardConfig, OffloadConfig, RunConfig
from moe_plugin.hosts.plain.sharding import blocks_of
from moe_plugin.layer import MoELayer, named_layers_in
from moe_plugin.memory.activations.auto import manage_layers
from moe_plugin.memory.activations.offload import Activations
from moe_plugin.output import MoEOutput
from moe_plugin.routing.replay import replaying
from moe_plugin.training.gradients.sync import clip_grad_norm_
from moe_plugin.training.resilience.elastic import ReplicaPlace, is_replica
from moe_plugin.training.resilience.skipped_steps import StepStart
from moe_plugin.training.resilience.step_votes import StepVotes, ballots_of
from moe_plugin.training.resilience.vote import refuse_reported_loads
from moe_plugin.training.run_features import HostSeams, make_run
from moe_plugin.utils.folder_lock import FolderLock, hold_folder
from moe_plugin.utils.run_feature import (
    RunFeature,
    SkipStep,
    StepFacts,
    StepGradients,
    StepInput,
    refuse_unfit,
)
from moe_plugin.utils.selective import hidden_from_policies
from moe_plugin.utils.tensors import is_sharded

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class TrainingSteps:
    """Runs the steps of a training loop for a model and its optimizer, with the features of a run.

    All ranks must create this object, because its constructor runs collectives.

        steps = TrainingSteps(model, optimizer, lambda model, batch: model(batch).loss, clip=1.0)
        for batch in batches:
            loss = steps(batch)

    If a gradient is not finite on any rank, all ranks skip the step. If routed rows do not fit into
    the buffers of the dispatcher, the step is repeated with larger buffers. Routers are updated at
    the end of each step.

    Args:
        model: model with MoE layers. The model's gradients must be reduced by `ddp_model` or
            `fully_shard_model`. With `guard.votes`, pass the model without a wrapper, because the
            votes reduce its gradients.
        optimizer: optimizer of the model's parameters.
        loss_of: function that receives the model and a batch, and returns a scalar loss. The loss
            must include the losses of the routers.
        settings: settings of the run (records, comparisons of twins, votes, activations). Optional.
            Defaults to `RunConfig()`.
        clip: upper bound for the gradient norm over all ranks. By default, gradients are not
            clipped.
        done: number of steps that earlier runs have completed.
        total: number of steps in the whole run. Optional. Defaults to unknown.
        world: communicator of all data-parallel ranks. Optional. Defaults to the default process
            group.
        layers: dict of the MoE layers. The keys are the names under which the layers appear in the
            run's records. Optional. Defaults to all MoE layers of the model, with their module
            names as keys.
        has_log: True if the training loop writes its own log. The report is created from this log.
        blocks: modules whose activations are managed according to `offload.activations`, in the
            order in which the forward pass calls them. Optional. Defaults to the elements of the
            model's `nn.ModuleList`s.
        tokens_of: function that returns the number of tokens in a batch, summed over all ranks. The
            number is used for the log line after the first step. Optional. Without this function,
            the line is not logged.
        lighthouse: address of the lighthouse, if this training loop is one of several replicas. See
            `ElasticReplica`.
        replica: number of this replica. See `ElasticReplica`.
        folder: path of the folder for checkpoints and logs of this training loop. Until `close` is
            called, any other run that uses the same folder raises an error. See
            `moe_plugin.utils.folder_lock`.
        features: additional run features that the user has defined.

    Attributes:
        run: object that contains the features of the run.
        norm: gradient norm of the most recent step, before clipping.
        done: number of completed steps. If this replica has loaded the state of another replica,
            the number includes the steps of that replica.
    Raises:
        ValueError: If the settings contradict each other, if they require data that this training
            loop does not have, or if another run uses the folder.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer,
                 loss_of: Callable[[nn.Module, Any], Tensor], settings: RunConfig | None = None, *,
                 clip: float = float("inf"), done: int = 0, total: int | None = None,
                 world: Comm | None = None, layers: Mapping[str, MoELayer] | None = None,
                 has_log: bool = False, blocks: Sequence[nn.Module] | None = None,
                 tokens_of: Callable[[Any], float] | None = None, lighthouse: str | None = None,
                 replica: int = 0, folder: str | os.PathLike[str] | None = None,
                 features: Sequence[RunFeature] = ()) -> None:
        self.model, self.optimizer, self.loss_of = model, optimizer, loss_of
        self.clip, self.done, self.total, self.tokens_of = clip, done, total, tokens_of
        self.world = default_comm() if world is None else world
        self.bare = model.module if isinstance(model, DistributedDataParallel) else model
        self.norm = torch.zeros(())
        settings = RunConfig() if settings is None else settings
        self._lock: FolderLock | None = None
        if folder is not None:
            self._hold(folder, settings.observe.take_over_folder)
        self._interval = settings.observe.interval
        self._by_loss = not has_log and settings.observe.writes
        if layers is None:
            layers = named_layers_in(self.bare)
        for layer in layers.values():
            if not hasattr(layer, "observer"):
                layer.register_forward_hook(_tell)
        self.run = make_run(settings, HostSeams(
            host="pytorch", models=[self.bare], world=self.world, layers=layers,
            records=self.world, has_log=has_log, speaks=self.world.rank == 0,
            activations=lambda offload: self._activations(offload, blocks), votes=self._votes,
            replicas=self._replicas(lighthouse, replica, layers), more=features))
        self._voting = self.run.find(StepVotes)

    def _hold(self, folder: str | os.PathLike[str], take_over: bool) -> None:
        with (refused_together("the folder of the run", self.world.group)
              if isinstance(self.world, TorchComm) else nullcontext()):
            if self.world.rank == 0:
                self._lock = hold_folder(folder, take_over)

    def _whole(self) -> tuple[str, bool, str]:
        return ("fully_shard_model", not any(map(is_sharded, self.bare.parameters())),
                "parameters must not be sharded; use ddp_model")

    def _replicas(self, lighthouse: str | None, replica: int,
                  layers: Mapping[str, MoELayer]) -> ReplicaPlace | None:
        if not is_replica(lighthouse, replica, lambda: refuse_unfit(
                "--moe-lighthouse", [self._whole()])):
            return None
        timeouts_s = [layer.config.comm.timeout_s for layer in layers.values()]

        def take(done: int) -> None:
            self.done = done

        return ReplicaPlace(lighthouse or "", replica, max(timeouts_s, default=60.0), [self.bare],
                            lambda: [self.optimizer], lambda: (self.done,), take)

    def _activations(self, offload: OffloadConfig,
                     blocks: Sequence[nn.Module] | None) -> Activations | None:
        managed = list(blocks_of(self.bare) if blocks is None else blocks)
        names = {id(m): name for name, m in self.bare.named_modules()}
        return manage_layers(offload, {names[id(m)]: m for m in managed}, self.world)

    def _votes(self, guard: GuardConfig) -> StepVotes:
        refuse_unfit(f"guard.votes={guard.votes}", [
            ("ddp_model", self.bare is self.model, "gradients would be averaged before the vote; "
             "pass the bare model"), self._whole()])
        refuse_reported_loads(self.bare)
        group = self.world.group if isinstance(self.world, TorchComm) else None
        return StepVotes(ballots_of(guard, self.bare, self.world), [self.bare], group=group)

    def __call__(self, batch: Any) -> Tensor | None:
        """Run one training step. Return the loss of the step as a detached tensor.

        Without votes, the loss is that of the current rank's batch. With votes, the loss is the
        mean over all ranks. Return None if the step was skipped on all ranks.

        Raises:
            FloatingPointError: On all ranks, if too many consecutive steps had non-finite
                gradients.
            RowsOverflow: see `RowsFit`.
            WrongResultError: see `TwinCheck`.
        """
        begins = StepInput(self.done + 1, lambda: batch,
                           lambda batch: self.loss_of(self.bare, batch), self.total)
        with self.run.around_step(begins):
            batches = self.run.batches([batch])
            loss = self.run.compute(lambda: self._passes(batches))
            left_out = self._update(begins.number)
        facts = self._facts(batch, loss, left_out)
        self.done += facts.made
        self.run.after_step(facts)
        return loss if left_out is None else None

    def evaluate(self, compute: Callable[[], Result]) -> Result:
        """Call `compute()` in evaluation mode and without gradients. Return its result. This is a
        collective operation.

        If routed rows do not fit into the buffers of the dispatcher, the call is repeated.
        """
        def passes() -> Result:
            result = compute()
            self.run.after_passes()
            return result

        trained = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                result = self.run.compute(passes)
        finally:
            self.model.train(trained)
        self.run.after_evaluation(self.done)
        return result

    def _passes(self, batches: Sequence[Any]) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self._backward(batches[0]) if self._voting is None else
                self._voted(self._voting))
        self.run.after_passes()
        return loss

    def _backward(self, batch: Any) -> Tensor:
        loss = self.loss_of(self.model, batch)
        loss.backward()
        return loss.detach()

    def _voted(self, votes: StepVotes) -> Tensor:
        """Return the mean loss over all ranks. The ranks vote on the loss and the gradients."""
        start = StepStart([])
        torch.manual_seed(votes.step)  # workers of the same file must draw the same random numbers
        losses = []
        for file in votes.files_dealt():
            votes.begin_file()
            file_losses = [self._backward(batch) for batch in file if batch is not None]
            losses.append(sum(file_losses, torch.zeros(1, device=self.world.device)))
        start.restore()
        scale = votes.ballots.assignment.count / self.world.size
        votes.finish(scale, scale)
        return votes.agreed_sums(losses)[0] / self.world.size

    def _update(self, number: int) -> SkipStep | None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]

        @functools.cache
        def norm() -> Tensor:
            # with votes, the other workers have copies of the same gradients, which must not count
            world = self.world if self._voting is None else self._voting.ballots.worker
            return clip_grad_norm_(parameters, self.clip, world=world)

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
        """Close all files, leave the group of replicas, and release the lock on the folder."""
        self.run.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


@hidden_from_policies
def _tell(layer: Any, _: Any, out: MoEOutput) -> None:
    # with recomputed activations only the first of the two passes is counted
    if out.stats is not None and (not layer.training or (
            torch.is_grad_enabled() and not replaying())):
        layer.observer(out.stats)
