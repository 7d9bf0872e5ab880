"""fairseq's trainer for models with experts: gradient norm, skipped steps and checkpoints.

Models without experts are trained in exactly the same way as with fairseq's trainer.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from fairseq import metrics
from omegaconf import open_dict
from torch import Tensor

from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.formats.fairseq.entries import PARAMETERS
from moe_plugin.checkpoint.reshard import moe_layers as named_layers
from moe_plugin.comm import TorchComm
from moe_plugin.comm.host_collectives import collectives_named, named
from moe_plugin.experts.base import expert_parameters, is_expert
from moe_plugin.hosts.fairseq import run as of_run
from moe_plugin.hosts.fairseq import sharding
from moe_plugin.hosts.fairseq.changed_settings import changed_line
from moe_plugin.hosts.fairseq.compat.checkpoints import giving
from moe_plugin.hosts.fairseq.compat.launch import is_ours
from moe_plugin.hosts.fairseq.compat.names import Trainer, build_lr_scheduler
from moe_plugin.hosts.fairseq.compat.patching import Overlay
from moe_plugin.hosts.fairseq.compat.runtime import fp32_copies, shards_optimizer_state
from moe_plugin.hosts.fairseq.criterion import check_balance
from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.hosts.fairseq.refusals import EXPERTS, values_of
from moe_plugin.hosts.fairseq.resume import agree, newest_of_other_size, read_part
from moe_plugin.hosts.fairseq.run import FileTurns
from moe_plugin.hosts.fairseq.streamed import streamed_model
from moe_plugin.training.gradients import fused
from moe_plugin.training.gradients.parts import Part, count_once, shards, slices
from moe_plugin.training.gradients.replicas import (
    ReplicaReducer,
    mark_replicas,
    replica_comm,
    replicas_of,
)
from moe_plugin.training.resilience.averaging_peers import PeerSteps
from moe_plugin.tuning.collectives import prepare_replicas
from moe_plugin.utils.replaced import replaced
from moe_plugin.utils.run_feature import StepGradients, StepInput

logger = logging.getLogger(__name__)

_PEERS = "moe_peers"  # key of the outer optimizer's state in a checkpoint's extra state
_OF_STEP = "a collective of the training step (gradients in DistributedDataParallel, or its log)"


class MoETrainer(Trainer):
    """The trainer that `fairseq-train` uses for models with experts."""

    def __init__(self, cfg: Any, task: Any, model: Any, criterion: Any,
                 quantizer: Any = None) -> None:
        self.has_experts = bool(expert_parameters(model))
        self._validating, self._dummy, self._epoch_batches = False, False, 0
        self._reducer: ReplicaReducer | None = None  # built with the first optimizer
        self._wrapped_model: Any  # set by fairseq
        of_run.check(cfg, model)
        if self.has_experts:
            EXPERTS.refuse(values_of(cfg))
            if cfg.distributed_training.distributed_rank == 0:
                check_balance(model, criterion)
            with open_dict(cfg):
                cfg.checkpoint.load_checkpoint_on_all_dp_ranks = True
        if shards_optimizer_state(cfg):
            sharding.check(cfg, criterion)
        self.streamed = streamed_model(cfg, task, model, criterion)
        super().__init__(cfg, self.streamed.task if self.streamed else task, model, criterion,
                         quantizer)
        if self.is_data_parallel_master:
            # fairseq's --log-file contains only the lines of this logger
            logging.getLogger("fairseq_cli.train").info(changed_line(cfg))
        self.run = of_run.run_of(self)

    @property
    def use_distributed_wrapper(self) -> bool:
        """Return True if torch's `DistributedDataParallel` reduces the gradients."""
        return not of_run.completes_gradients(self._model) and super().use_distributed_wrapper

    @property
    def _group(self) -> Any:
        return self.data_parallel_process_group if self.data_parallel_world_size > 1 else None

    def train_step(self, samples: Any, raise_oom: bool = False) -> Any:
        """Run fairseq's training step, and call the features of the run before and after it."""
        before = self.get_num_updates()
        step = StepInput(before + 1, lambda: self._prepare_sample(samples[0])[0],
                         lambda batch: self._criterion(self._model, batch)[0],
                         of_run.total_updates(self.cfg, self._epoch_batches))
        with self.run.around_step(step):
            batches = self.run.batches(samples)
            logged = self.run.compute(lambda: self._passes(batches, raise_oom))
        facts = of_run.facts_of(self, before, logged, self._epoch_batches)
        self.run.after_step(facts)
        self.run.after_log(facts)
        return logged

    def _passes(self, batches: Any, raise_oom: bool) -> Any:
        if self._reducer is not None:
            self._reducer.passes = len(batches)
        if self.streamed is not None:
            self.streamed.begin([self._prepare_sample(batch) for batch in batches],
                                self.get_num_updates())
        with collectives_named(_OF_STEP, self._group):
            return super().train_step(batches, raise_oom)

    def _prepare_sample(self, sample: Any, is_dummy: bool = False) -> tuple[Any, bool]:
        """Prepare a batch like fairseq. The MoE layers ignore the tokens of a dummy batch."""
        prepared, dummy = super()._prepare_sample(sample, is_dummy)
        if dummy != self._dummy:
            self._dummy = dummy
            for layer in moe_layers(self._model):
                layer.moe_layer.ignored = dummy
        return prepared, dummy

    def get_train_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Return fairseq's iterator over batches, and store the number of batches per epoch."""
        batches = super().get_train_iterator(*args, **kwargs)
        self._epoch_batches = of_run.batches_of(batches)
        return batches

    def _aggregate_logging_outputs(self, logging_outputs: Any, *sums: Any,
                                   ignore: bool = False) -> Any:
        return of_run.aggregated(self.run, super()._aggregate_logging_outputs, logging_outputs,
                                 *sums, ignore=ignore)

    def valid_step(self, sample: Any, raise_oom: bool = False) -> Any:
        """Run fairseq's validation step.

        If rows do not fit into their buffers, all ranks repeat the batch or raise an error.
        """
        original = super().valid_step
        with replaced(self, _validating=True):
            return self.run.compute(lambda: original(sample, raise_oom))

    def _reduce_and_log_stats(self, *args: Any, **kwargs: Any) -> Any:
        if self._validating:
            self.run.after_passes()  # a batch that is repeated must not be in the mean twice
        return super()._reduce_and_log_stats(*args, **kwargs)

    def validated(self, numbers: Mapping[str, Any]) -> None:
        """After each validation, pass the values in fairseq's log to the features of the run."""
        self.run.after_evaluation(self.get_num_updates(), of_run.dropped(numbers))

    @property
    def saves_every_rank(self) -> bool:
        """Return True if each rank writes and reads its own checkpoint file."""
        return self.has_experts and self.data_parallel_world_size > 1

    @property
    def checkpoint_suffix(self) -> str:
        """Return the suffix `-rank-N` if each rank writes its own checkpoint file."""
        suffix = super().checkpoint_suffix
        return files.with_rank_suffix(suffix,
                                      self.data_parallel_rank) if self.saves_every_rank else suffix

    @property
    def should_save_checkpoint_on_current_rank(self) -> bool:
        """Return True on every rank if each rank writes its own checkpoint file."""
        return self.saves_every_rank or super().should_save_checkpoint_on_current_rank

    @property
    def is_sharded(self) -> bool:
        """Return True if each rank stores only a shard of the optimizer state."""
        return shards_optimizer_state(self.cfg) and self.data_parallel_world_size > 1

    @property
    def is_fsdp(self) -> bool:
        """Return False, because True would require fairscale."""
        return False

    @property
    def always_call_state_dict_during_save_checkpoint(self) -> bool:
        """Return True if the ranks must gather their shards before one rank writes a checkpoint."""
        return self.is_sharded

    @property
    def model(self) -> Any:
        """The wrapped model: the sharded model, or an object that contains all streamed weights."""
        if self.streamed is not None:
            return self.streamed.whole
        backend = self.cfg.distributed_training.ddp_backend
        if self._wrapped_model is None and self.is_sharded and backend == "fully_sharded":
            self._wrapped_model = sharding.shard_model(self._model.to(self.device), self.cfg,
                                                       self.data_parallel_process_group)
        return super().model

    @property
    def _world(self) -> TorchComm:
        return TorchComm(self.data_parallel_process_group)

    def _build_optimizer(self) -> None:
        if self.streamed is not None:
            self._optimizer = self.streamed.optimizer
            self._lr_scheduler = build_lr_scheduler(self.cfg.lr_scheduler, self._optimizer)
            self._lr_scheduler.step_update(0)  # fairseq also sets the first rate this way
            return
        reduces = self.data_parallel_world_size > 1 and not self.run.reduces
        if self._reducer is None and self.has_experts and reduces:
            self.average_replicas()
        if not self.is_sharded:
            super()._build_optimizer()
            parts: list[Part] = []
        else:
            model, parts = self.model, self._parts()
            updated = [part.local for part in parts]  # the tensors that the optimizer updates
            parts += [Part(p, p, p.shape, None) for p in self.criterion.parameters()]
            count_once(parts, self.data_parallel_world_size)
            with replaced(self, _wrapped_model=Overlay(model, parameters=lambda: updated)):
                super()._build_optimizer()
        if self.is_sharded:
            sharding.shard_optimizer(self._optimizer, [p for p in parts if p.local.requires_grad])
        if self.has_experts and reduces:
            sharding.reduce_replicas(self._optimizer, lambda: self._reducer)
        if (votes := self.run.find(FileTurns)) is not None:
            self._optimizer.all_reduce_grads = votes.reduce_by_vote
        self._mark_copies()

    def _mark_copies(self) -> None:
        for parameter, copy in fp32_copies(self._optimizer):
            mark_replicas(copy, replicas_of(parameter))

    def average_replicas(self) -> None:
        """Average the gradients of experts over the ranks that store the same experts."""
        moe = moe_layers(self._model)[0].moe_layer.moe
        timeout_s = moe.config.comm.timeout_s
        world = TorchComm(self.data_parallel_process_group, timeout_s)
        comm = replica_comm(moe.comm, world, self)
        self._reducer = None
        if self._optimizer is not None:
            self._mark_copies()
        if comm is not None:
            comm = prepare_replicas(comm, moe.config.comm, not moe.config.deterministic)
            experts = expert_parameters(self.model).values()
            self._reducer = ReplicaReducer(experts, comm, at_end_of_backward=False)

    def _parts(self) -> list[Part]:
        if self.cfg.distributed_training.zero_sharding != "os":
            return shards(self.model.parameters(), self._world)
        replicas = None if self._reducer is None else self._reducer.comm
        return slices(self.model.parameters(), self._world, replicas)

    def clip_grad_norm(self, clip_norm: float) -> Tensor:
        """Clip the gradients by their norm over all parameters. Return the norm.

        Each expert is counted once, and all ranks compute the same norm.

        Raises:
            SkipStep: On all ranks, if the norm is not finite or a replica of the run was lost.
            FloatingPointError: If too many consecutive steps were skipped.
            RowsOverflow, StepRepeat: If rows do not fit into their buffers. See
                `resilience.skipped_steps`.
        """
        self.run.after_passes()

        @functools.cache
        def norm() -> Tensor:
            if not self.has_experts and not self.is_sharded:
                return super(MoETrainer, self).clip_grad_norm(clip_norm)
            return self.optimizer.clip_grad_norm(clip_norm, aggregate_norm_fn=self._whole_norm)

        self.run.after_backward(StepGradients(
            self.get_num_updates() + 1, lambda: [p.grad for p in self.optimizer.params],
            lambda: bool(torch.isfinite(norm()).all())))
        for name, value in self.run.numbers().items():
            metrics.log_scalar(name, value, weight=0, priority=450, round=0)
        return norm()

    def _check_grad_norms(self, grad_norm: Tensor) -> None:
        """Check that all ranks (or the majority, if the ranks vote) have computed the same norm."""
        if (votes := self.run.find(FileTurns)) is None:
            super()._check_grad_norms(grad_norm)
        else:
            votes.check_norm(grad_norm)

    def _whole_norm(self, shared_norm: Tensor) -> Tensor:
        """Return the global gradient norm, given the norm of this rank's dense gradients."""
        parameters = [p for p in self.optimizer.params if p.grad is not None]
        if self.is_sharded:
            squared = norm_squared(parameters, self._group, shared_norm.device)
        elif (votes := self.run.find(FileTurns)) is not None:  # ranks of other workers don't count
            squared = votes.norm_squared(parameters, shared_norm.device)
        else:
            experts = [p for p in parameters if is_expert(p)]
            squared = shared_norm.double() ** 2 + norm_squared(experts, self._group,
                                                                shared_norm.device)
        return squared.sqrt().to(shared_norm.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return fairseq's state, with a manifest of the ranks and experts that wrote it."""
        state = super().state_dict()
        if (peers := self.run.find(PeerSteps)) is not None:
            state["extra_state"][_PEERS] = [peers.outer_state(block.number)
                                            for block in peers.trainer.blocks]
        if self.has_experts:
            state[files.MANIFEST] = {
                "version": files.VERSION, **self._manifest(),
                "num_updates": self.get_num_updates(), PARAMETERS: self._parameter_names()
            }
        return state

    def _parameter_names(self) -> list[str]:
        """Return the names of the optimizer's parameters, or [] if they are packed in a tensor."""
        named = [*self._model.named_parameters(),
                 *((f"criterion.{name}", p) for name, p in self.criterion.named_parameters())]
        names = [name for name, parameter in named if parameter.requires_grad]
        stored = sum(len(group["params"]) for group in self.optimizer.param_groups)
        return names if len(names) == stored else []

    def _manifest(self) -> dict[str, int]:
        moe = moe_layers(self._model)[0].moe_layer.moe
        return {
            "num_experts": moe.config.num_experts, "world_size": self.data_parallel_world_size,
            "rank": self.data_parallel_rank, "expert_parallel_size": moe.comm.size
        }

    def save_checkpoint(self, filename: str, extra_state: dict[str, Any]) -> None:
        """Write this rank's file, which is renamed when all ranks have written their files."""
        if files.is_crash_dump(filename) and is_ours(sys.exc_info()[1]):
            return None  # the error message is complete: a dump would not help
        if self.is_sharded and files.is_crash_dump(filename):
            logger.warning("%s is not written: it would need the parts of all ranks", filename)
            return None
        if not self.saves_every_rank:
            return super().save_checkpoint(filename, extra_state)
        filename = files.with_rank(filename, self.data_parallel_rank)
        if files.is_crash_dump(filename) or self.cfg.checkpoint.write_checkpoints_asynchronously:
            # other ranks may never get here, so this rank must not wait for them
            return super().save_checkpoint(filename, extra_state)
        write = super().save_checkpoint
        files.save(filename, lambda name: write(name, extra_state),
                   self.data_parallel_process_group)

    def load_checkpoint(self, filename: str, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, after all ranks have agreed on files from the same step.

        A different number of ranks may have written the files.

        Raises:
            ValueError: On all ranks, if files are missing or damaged, or expert counts differ.
        """
        extra_state = self._load(filename, *args, **kwargs)
        if (peers := self.run.find(PeerSteps)) is not None and extra_state is not None:
            peers.saved = extra_state.pop(_PEERS, None)
        return extra_state

    def _load(self, filename: str, *args: Any, **kwargs: Any) -> Any:
        if not self.has_experts:
            return super().load_checkpoint(filename, *args, **kwargs)
        group = self.data_parallel_process_group if self.saves_every_rank else None
        if self.saves_every_rank:
            filename = files.with_rank(filename, self.data_parallel_rank)
        written = newest_of_other_size(filename, self._manifest(), group)
        if written is None:
            filename = agree(filename, self._manifest(), group)
            return super().load_checkpoint(filename, *args, **kwargs)
        origins = named_layers(self.model.state_dict())
        shards = {prefix: at["shards"] for prefix, at in origins.items() if "shards" in at}
        reset = bool(args[0] if args else kwargs.get("reset_optimizer"))
        with giving(read_part(written, self._manifest(), shards, group, model_only=reset)):
            return super().load_checkpoint(written.paths[0], *args, **kwargs)


def norm_squared(parameters: list[torch.nn.Parameter], group: Any,
                 device: torch.device) -> Tensor:
    """Return the sum of squared gradients over all ranks, a float64 tensor equal on every rank.

    A parameter that R ranks store (see `replicas_of`) is counted only once. The parameter's sum of
    squares is divided by R before the sums are added over ranks. As a result, a NaN or Inf on any
    rank is visible on every rank.

    Raises: CommError: If a collective failed or timed out.
    """
    grads: list[Any] = [p.grad for p in parameters]
    squared = fused.squared_norm(grads, device, [replicas_of(p) for p in parameters])
    if group is not None:
        with named("all_reduce of the gradient norm", group):
            dist.all_reduce(squared, group=group)
    return squared
