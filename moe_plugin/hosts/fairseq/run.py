"""Data that fairseq passes to the features of a run (see `moe_plugin.training.run`), and what votes
and `--moe-expert-parallel-at` need from fairseq.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from fairseq import metrics
from torch import Tensor, nn

from moe_plugin.checkpoint.resize import change_expert_parallel
from moe_plugin.comm import LocalComm
from moe_plugin.comm.base import Comm
from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.experts.base import is_expert
from moe_plugin.hosts.fairseq import refusals
from moe_plugin.hosts.fairseq.compat.names import EpochBatchIterator
from moe_plugin.hosts.fairseq.compat.runtime import follow_parameters, fp32_copies
from moe_plugin.hosts.fairseq.groups import FairseqGroups
from moe_plugin.hosts.fairseq.layers import moe_layers, run_settings
from moe_plugin.hosts.fairseq.models import training_groups
from moe_plugin.hosts.fairseq.translate import setting
from moe_plugin.memory.activations.auto import manage_layers
from moe_plugin.memory.activations.offload import Activations
from moe_plugin.observe.history.host_logs import step_record
from moe_plugin.planner.vote_assignments import assign
from moe_plugin.training.gradients import fused
from moe_plugin.training.resilience.elastic import ReplicaPlace, is_replica
from moe_plugin.training.resilience.resizing import ExpertParallelSteps, expert_parallel_steps
from moe_plugin.training.resilience.step_votes import StepVotes, ballots_of
from moe_plugin.training.resilience.stopping import RUN
from moe_plugin.training.resilience.vote import Ballots, refuse_reported_loads
from moe_plugin.training.run import Run
from moe_plugin.training.run_features import HostSeams, make_run
from moe_plugin.utils.run_feature import StepFacts, StepInput

logger = logging.getLogger(__name__)
NORM_ERROR = 1e-6  # largest accepted relative difference of norms, as in fairseq
INNER = "train_inner"  # fairseq's name for the values between two log lines


def config_of(model: nn.Module) -> Any:
    """Return the settings of a model's MoE layers, or None if the model has no MoE layers."""
    layers = moe_layers(model)
    return layers[0].moe_layer.moe.config if layers else None


def completes_gradients(model: nn.Module) -> bool:
    """Return the value that `Run.reduces` will have, even before the run object exists."""
    return run_settings(model).guard.votes > 0


def check(cfg: Any, model: nn.Module) -> None:
    """Raise a `ValueError` if a setting is not supported in this run."""
    config = config_of(model)
    wants_replicas(cfg, model)
    if config is None:
        return
    check_resizing(cfg, model)
    run = run_settings(model)
    guard, values = run.guard, refusals.values_of(cfg, config, run)
    if guard.twins:
        refusals.TWINS.refuse(values)
    if guard.votes:
        refusals.VOTES.refuse(values)
        refuse_reported_loads(model)
        workers = values["distributed_training.distributed_world_size"]
        workers //= moe_layers(model)[0].moe_layer.moe.comm.size
        assign(guard.assignment, workers, guard.votes)


def wants_replicas(cfg: Any, model: nn.Module) -> bool:
    """Return True if the run is one of several replicas.

    Raises:
        ValueError: If a setting cannot be used together with replicas.
    """
    lighthouse, replica = (setting(cfg.model, f"moe_{name}") for name in ("lighthouse", "replica"))
    return is_replica(lighthouse, replica or 0, lambda: refusals.REPLICAS.refuse(
        refusals.values_of(cfg, run_settings(model), dense=config_of(model) is None)))


def run_of(trainer: Any) -> Run:
    """Create the run object of a `MoETrainer`. This is a collective operation."""
    model, cfg = trainer.get_model(), trainer.cfg
    config = config_of(model)
    if config is None:
        return Run([RUN])
    group = trainer.data_parallel_process_group if trainer.data_parallel_world_size > 1 else None
    world = LocalComm() if group is None else comm_of(group)
    flags = cfg.model
    return make_run(run_settings(model), replace(
        seams_of(model, world), speaks=trainer.is_data_parallel_master,
        skips_steps=cfg.common.amp, streamed=trainer.streamed and trainer.streamed.trainer,
        resize=lambda _: steps_of(trainer, world),
        activations=lambda _: _activations(cfg, model, world),
        votes=lambda guard: FileTurns(ballots_of(guard, model, world), model,
                                      trainer.get_criterion(), group),
        # a function, because the trainer builds a new optimizer when it loads a checkpoint
        replicas=ReplicaPlace(
            flags.moe_lighthouse, flags.moe_replica, config.comm.timeout_s,
            [model, trainer.get_criterion()], lambda: [trainer.optimizer],
            lambda: (trainer.get_num_updates(),), trainer.set_num_updates)
        if wants_replicas(cfg, model) else None))


def seams_of(model: nn.Module, world: Any) -> HostSeams:
    """Return the model, its named MoE layers and the communicator for the run. Layers are named by
    their position in the model, for example `decoder.layers.1`.
    """
    names = {id(module): name for name, module in model.named_modules()}
    return HostSeams(host="fairseq", models=[model], world=world, records=world, layers={
        names[id(layer)]: layer.moe_layer for layer in moe_layers(model)})


def _activations(cfg: Any, model: nn.Module, comm: Any) -> Activations | None:
    """Return the object that offloads or recomputes the activations of encoder and decoder layers,
    or None if all activations are kept.
    """
    asked = run_settings(model)
    stacks: dict[str, Any] = dict(model.named_children())
    layers = {f"{stack}.layers.{i}": layer for stack in ("encoder", "decoder")
              if (part := stacks.get(stack)) is not None
              for i, layer in enumerate(part.layers)}
    if asked.offload.activations != "keep":
        refusals.ACTIVATIONS.refuse(refusals.values_of(cfg, asked))
    return manage_layers(asked.offload, layers, comm)


def aggregated(run: Run, aggregate: Callable[..., Any], logging_outputs: Any, *sums: Any,
               ignore: bool) -> Any:
    """Sum the logged values over all ranks in the same way as fairseq.

    If several ranks compute the same batch, the batch is counted only once.

    Args:
        run: the run.
        aggregate: the trainer's own function for summing values over ranks.
        logging_outputs: logged values of the current rank's batches.
        sums: additional values to sum. The first additional value must be the sample size.
        ignore: True if the current rank's batch is a dummy.
    """
    votes = run.find(FileTurns)
    if votes is None or not votes.running:
        return aggregate(logging_outputs, *sums, ignore=ignore)
    logged, (_, *others) = aggregate(votes.counted(logging_outputs), *sums)
    return logged, (votes.sample_size(), *others)


def facts_of(trainer: Any, before: int, logged: Mapping[str, Any] | None,
             batches: int) -> StepFacts:
    """Return a `StepFacts` object that describes the latest step of the trainer.

    Args:
        trainer: the trainer.
        before: number of updates before this step.
        logged: return value of `train_step`.
        batches: number of batches in an epoch, or 0 if the number is unknown.
    """
    left_out, updates = trainer.run.left_out, trainer.get_num_updates()
    # after a lost step the number of updates may be that of another replica's state
    made = updates > before and left_out is None
    number = updates if made else before + 1
    if not logged or not trainer.is_data_parallel_master:
        return StepFacts(number, made, skipped=left_out is not None and not left_out.lost)
    words, total = metrics.get_meter("default", "wpb"), total_updates(trainer.cfg, batches)
    return StepFacts(number, made, tokens=None if words is None else float(words.val),
                     left=None if total is None else max(0, total - updates),
                     dropped=dropped(logged), logged=_line(trainer.cfg, updates) if made else None)


def _line(cfg: Any, updates: int) -> Any:
    """Return the statistics in fairseq's next log line, or None if no line follows this update."""
    known = metrics.get_meters(INNER)
    if updates % cfg.common.log_interval or known is None:
        return None
    return step_record(known.get_smoothed_values(), INNER)


def dropped(logged: Mapping[str, Any]) -> float:
    """Return the fraction of dropped first and second choices, computed from fairseq's log line."""
    lost = [float(logged[key]) for key in ("overflow_expert1", "overflow_expert2") if key in logged]
    return sum(lost) / len(lost) / 100 if lost else 0.0


def batches_of(iterator: Any) -> int:
    """Return the number of batches in an epoch, or 0 if the number is unknown."""
    return len(iterator) if isinstance(iterator, EpochBatchIterator) else 0


def total_updates(cfg: Any, batches: int) -> int | None:
    """Return the number of updates in the whole run, from `--max-update` and `--max-epoch`.

    Return None if neither flag determines the number. batches: number of batches in an epoch.
    """
    settings, ends = cfg.optimization, []
    if settings.max_update:
        ends.append(settings.max_update)
    if settings.max_epoch and batches:
        every = list(settings.update_freq)  # by epoch; the last one counts for all that follow
        every += every[-1:] * (settings.max_epoch - len(every))
        ends.append(sum(math.ceil(batches / n) for n in every[:settings.max_epoch]))
    return min(ends, default=None)


def check_resizing(cfg: Any, model: nn.Module) -> None:
    """Raise a `ValueError` if the run does not support changing the expert-parallel size."""
    sizes = run_settings(model).resize.expert_parallel_at
    if sizes:
        refusals.RESIZE.refuse(refusals.values_of(
            cfg, sizes=",".join(f"{n}={size}" for n, size in sizes.items())))


def steps_of(trainer: Any, world: Comm) -> ExpertParallelSteps | None:
    """Return the run feature that changes the expert-parallel size, or None if the trainer's
    settings do not request it.

    world: communicator of all data-parallel ranks.
    """
    model, known = trainer.get_model(), dict[int, FairseqGroups]()
    moe = moe_layers(model)[0].moe_layer.moe

    def change(size: int) -> None:
        if size not in known:
            known[size] = training_groups(trainer.cfg.model, size, moe.config.comm.timeout_s)
        _move_experts(trainer, known[size], world)

    return expert_parallel_steps(run_settings(model), [model], moe.comm.size, change, world,
                                 "fairseq")


def _move_experts(trainer: Any, groups: FairseqGroups, world: Comm) -> None:
    model, optimizer = trainer.get_model(), trainer.optimizer
    copies = dict(fp32_copies(optimizer))
    changed = change_expert_parallel(model, optimizer.optimizer, groups.expert, world, copies)
    follow_parameters(trainer.model, optimizer, changed, copies)
    for layer in moe_layers(model):
        layer.moe_layer.scale_gradients(groups.replicas)
    trainer.average_replicas()


class FileTurns(StepVotes):
    """`StepVotes` for fairseq's training step, which calls the criterion once for each batch.

    Args:
        ballots: see `StepVotes`.
        model: the model without its wrapper.
        criterion: the criterion without its wrapper.
        group: process group of the data-parallel ranks.
    """

    def __init__(self, ballots: Ballots, model: nn.Module, criterion: nn.Module,
                 group: Any) -> None:
        super().__init__(ballots, [model, criterion], group=group)
        self.criterion = criterion

    def reduce_by_vote(self, module: nn.Module) -> None:
        """Vote on the gradients. Replaces the optimizer's method `all_reduce_grads`."""
        # fairseq averages gradients over ranks, and an expert's gradient is already divided by its
        # group
        scale = self.ballots.assignment.count / self.ballots.comm.size
        self.finish(scale / self.ballots.sharing.size, scale)

    def norm_squared(self, parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
        """Return the squared norm of a worker's gradients after the vote, as a float64 tensor.

        Each parameter is counted once. This is a collective operation of the worker's ranks.
        """
        grads: dict[bool, list[Any]] = {
            expert: [p.grad for p in parameters if is_expert(p) == expert]
            for expert in (False, True)}
        shared, experts = (fused.squared_norm(some, device) for some in grads.values())
        return shared + self.ballots.sharing.all_reduce(experts)

    def check_norm(self, norm: Tensor) -> None:
        """Log a warning if some ranks have a different gradient norm than the majority. This is a
        collective operation.

        This method replaces fairseq's check that all ranks have the same norm.

        Raises:
            FloatingPointError: On all ranks, if there is no majority.
        """
        norms_K = self.ballots.comm.all_gather(norm.detach().double().view(1)).cpu()
        # the median is the norm of the majority, if there is one
        middle = norms_K.nan_to_num(float("inf")).sort().values[len(norms_K) // 2]
        if not middle.isfinite():
            return
        wrong = (~((norms_K - middle).abs() <= NORM_ERROR * middle)).nonzero().flatten().tolist()
        if 2 * len(wrong) >= len(norms_K):
            raise FloatingPointError(
                f"step {self.step}: no majority of the {len(norms_K)} workers has the same "
                f"gradient norm ({norms_K.tolist()}), although they voted on the gradients. Their "
                "weights differ. Resume from the newest checkpoint, and check these machines")
        if wrong and self.ballots.comm.rank == self.ballots.worker.rank == 0:
            logger.warning("step %d: these ranks have another gradient norm than the majority: %s",
                           self.step,
                           self.ranks_of(wrong))

    @contextmanager
    def around_step(self, step: StepInput) -> Iterator[None]:
        """Run the training step, with hooks before and after each call of the criterion."""
        hooks = (self.criterion.register_forward_pre_hook(self._begin),
                 self.criterion.register_forward_hook(self._end))
        try:
            with super().around_step(step):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _restart(self) -> None:
        super()._restart()
        self._at = 0
        self._sizes: list[float] = []

    def _begin(self, criterion: nn.Module, args: Any) -> None:
        if self._at < len(self.dealt) and self.dealt[self._at].begins:
            self.begin_file()
            self._sizes.append(0.0)

    def _end(self, criterion: nn.Module, args: Any, output: Any) -> None:
        if self._at < len(self.dealt):
            self._sizes[-1] += float(output[1]) if self.dealt[self._at].batch else 0.0
            self._at += 1

    def counted(self, logged: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the logged values of the batches on this rank that are included in the log."""
        kept = [entry for entry, batch in zip(logged, self.dealt, strict=False) if batch.counts]
        return kept or [{name: value * 0 for name, value in entry.items()} for entry in logged[:1]]

    def sample_size(self) -> float:
        """Return the total sample size of all files. The ranks agree on this number by vote. This
        is a collective operation.
        """
        sizes = torch.tensor(self._sizes or [0.0], dtype=torch.float64)
        return float(self.agreed_sums(sizes.split(1)))
