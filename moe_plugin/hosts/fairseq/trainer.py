"""fairseq's trainer for models with experts: gradient norm, skipped steps, checkpoints of every
rank.

For a model without experts it is fairseq's trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fairseq.trainer import Trainer
from omegaconf import open_dict
from torch import Tensor

from moe_plugin.experts.marks import expert_parameters, is_expert
from moe_plugin.hosts.fairseq import checkpoint_files as files
from moe_plugin.hosts.fairseq.compat.runtime import fp32_copies
from moe_plugin.hosts.fairseq.criterion import check_balance
from moe_plugin.hosts.fairseq.gradients import (
    expert_norm_squared,
    mark_replicas,
    replicas_of,
    sum_over_replicas,
)
from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.hosts.fairseq.observe import observer
from moe_plugin.hosts.plain.drops import DropWarning
from moe_plugin.routing import finish_step

logger = logging.getLogger(__name__)

# in a row, without a loss scaler; then the run is broken and fairseq's own error follows
MAX_SKIPPED_STEPS = 10


class MoETrainer(Trainer):
    """See the module. `fairseq-train` uses it once the user dir is loaded (`compat.registries`)."""

    def __init__(self, cfg: Any, task: Any, model: Any, criterion: Any,
                 quantizer: Any = None) -> None:
        self.has_experts = bool(expert_parameters(model))
        self._skipped, self._warn_of_drops = 0, DropWarning()
        self._replicas: dist.ProcessGroup | None = None  # made where it is needed first
        if self.has_experts:
            _refuse_unsupported(cfg)
            if cfg.distributed_training.distributed_rank == 0:
                check_balance(model, criterion)
            with open_dict(cfg):
                cfg.checkpoint.load_checkpoint_on_all_dp_ranks = True
        super().__init__(cfg, task, model, criterion, quantizer)
        self._observer = observer(
            model, self.data_parallel_process_group if self.data_parallel_world_size > 1 else None)

    def train_step(self, samples: Any, raise_oom: bool = False) -> Any:
        """fairseq's, and now and then a record of the experts' statistics."""
        before = self.get_num_updates()
        with nullcontext() if self._observer is None else self._observer.around_step(before + 1):
            logged = super().train_step(samples, raise_oom)
        if self.has_experts and self.get_num_updates() > before:
            finish_step(self._model)
        if logged and self.is_data_parallel_master:
            self._warn_of_drops(self.get_num_updates(), _dropped(logged))
        if self._observer is not None and self.get_num_updates() > before:
            self._observer.after_step(self.get_num_updates())
        return logged

    @property
    def saves_every_rank(self) -> bool:
        """Whether each rank writes and reads a file of its own."""
        return self.has_experts and self.data_parallel_world_size > 1

    @property
    def checkpoint_suffix(self) -> str:
        """`-rank-N` where every rank has its own experts."""
        suffix = super().checkpoint_suffix
        return files.with_rank_suffix(suffix,
                                      self.data_parallel_rank) if self.saves_every_rank else suffix

    @property
    def should_save_checkpoint_on_current_rank(self) -> bool:
        """Every rank, where every rank has its own experts."""
        return self.saves_every_rank or super().should_save_checkpoint_on_current_rank

    def _build_optimizer(self) -> None:
        super()._build_optimizer()
        for parameter, copy in fp32_copies(self._optimizer):
            mark_replicas(copy, replicas_of(parameter))

    def clip_grad_norm(self, clip_norm: float) -> Tensor:
        """Norm over all parameters, each expert counted once; equal on all ranks.

        Gradients are clipped by it.

        Raises:
            OverflowError: the norm is not finite: fairseq then skips the step, here on every rank,
                because every rank has the same norm. At most `MAX_SKIPPED_STEPS` steps in a row;
                with fp16 the loss scaler decides instead.
        """
        if not self.has_experts:
            return super().clip_grad_norm(clip_norm)
        norm = self.optimizer.clip_grad_norm(clip_norm, aggregate_norm_fn=self._whole_norm)
        if torch.isfinite(norm).all():
            self._skipped = 0
        elif not self.cfg.common.amp and self._skipped < MAX_SKIPPED_STEPS:
            self._skipped += 1
            raise OverflowError(
                f"gradient norm is {float(norm)}: step skipped on all ranks ({self._skipped} in a "
                "row, "
                f"at most {MAX_SKIPPED_STEPS})")
        return norm

    def _whole_norm(self, shared_norm: Tensor) -> Tensor:
        parameters = [p for p in self.optimizer.params if is_expert(p) and p.grad is not None]
        group = self.data_parallel_process_group if self.data_parallel_world_size > 1 else None
        sum_over_replicas(parameters, self._replica_group)
        squared = expert_norm_squared(parameters, group, shared_norm.device)
        return (shared_norm.double() ** 2 + squared).sqrt().to(shared_norm.dtype)

    @property
    def _replica_group(self) -> Any:
        replicas = {replicas_of(p) for p in expert_parameters(self._model).values()}
        if max(replicas, default=1) == 1 or self.data_parallel_world_size == 1:
            return None
        if self._replicas is None:
            self._replicas = _make_replica_group(
                max(replicas),
                moe_layers(self._model)[0].moe_layer.moe.config.comm.timeout_s)
        return self._replicas

    def state_dict(self) -> dict[str, Any]:
        """fairseq's state and a manifest of who wrote it."""
        state = super().state_dict()
        if self.has_experts:
            state[files.MANIFEST] = {
                "version": files.VERSION, **self._manifest(), "num_updates": self.get_num_updates()
            }
        return state

    def _manifest(self) -> dict[str, int]:
        moe = moe_layers(self._model)[0].moe_layer.moe
        return {
            "num_experts": moe.config.num_experts, "world_size": self.data_parallel_world_size,
            "rank": self.data_parallel_rank, "expert_parallel_size": moe.comm.size
        }

    def save_checkpoint(self, filename: str, extra_state: dict[str, Any]) -> None:
        """Write this rank's file; it takes its final name when every rank has written its own."""
        if not self.saves_every_rank:
            return super().save_checkpoint(filename, extra_state)
        filename = files.with_rank(filename, self.data_parallel_rank)
        if files.is_crash_dump(filename) or self.cfg.checkpoint.write_checkpoints_asynchronously:
            # other ranks may not get here: no waiting
            return super().save_checkpoint(filename, extra_state)
        write = super().save_checkpoint
        files.save(filename, lambda name: write(name, extra_state),
                   self.data_parallel_process_group)

    def load_checkpoint(self, filename: str, *args: Any, **kwargs: Any) -> Any:
        """fairseq's, after all ranks agreed on files of one step that fit this model and world.

        Raises:
            ValueError: damaged files and no older whole checkpoint, missing files, another expert
                count, another world size; on every rank.
        """
        if self.has_experts:
            group = self.data_parallel_process_group if self.saves_every_rank else None
            if self.saves_every_rank:
                filename = files.with_rank(filename, self.data_parallel_rank)
            filename = files.agree(filename, self._manifest(), group)
        return super().load_checkpoint(filename, *args, **kwargs)


def _dropped(logged: Mapping[str, Any]) -> float:
    """The share of first and second choices that a step dropped, from fairseq's log line."""
    lost = [logged[key] for key in ("overflow_expert1", "overflow_expert2") if key in logged]
    return sum(lost) / len(lost) / 100 if lost else 0.0


def _make_replica_group(replicas: int, timeout_s: float) -> Any:
    world, mine = dist.get_world_size(), None
    stride = world // replicas
    for first in range(stride):
        ranks = list(range(first, world, stride))
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
        if dist.get_rank() in ranks:
            mine = group
    return mine


def _refuse_unsupported(cfg: Any) -> None:
    backend = cfg.distributed_training.ddp_backend
    if backend in ("fully_sharded", "slowmo"):
        raise ValueError(
            f"--ddp-backend {backend} averages or shards experts; use legacy_ddp or pytorch_ddp "
            "(c10d) with MoE layers"
        )
    if cfg.optimization.use_bmuf:
        raise ValueError("--use-bmuf averages experts over ranks; must be off with MoE layers")
    if cfg.distributed_training.zero_sharding != "none":
        raise ValueError(
            f"--zero-sharding {cfg.distributed_training.zero_sharding} shards each rank's own "
            "experts; use none with MoE layers"
        )
