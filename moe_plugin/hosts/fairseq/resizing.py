"""Support for `--moe-expert-parallel-at`, which changes the expert-parallel size between updates.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from moe_plugin.checkpoint.resize import change_expert_parallel
from moe_plugin.comm.base import Comm
from moe_plugin.hosts.fairseq.compat.runtime import (
    follow_parameters,
    fp32_copies,
)
from moe_plugin.hosts.fairseq.groups import FairseqGroups, make_groups
from moe_plugin.hosts.fairseq.layers import moe_layers, run_settings
from moe_plugin.hosts.fairseq.refusals import RESIZE, values_of
from moe_plugin.hosts.fairseq.translate import setting
from moe_plugin.training.resilience.resizing import ExpertParallelSteps, expert_parallel_steps


def check(cfg: Any, model: nn.Module) -> None:
    """Raise a `ValueError` if the run does not support changing the expert-parallel size."""
    sizes = run_settings(model).resize.expert_parallel_at
    if sizes:
        RESIZE.refuse(values_of(cfg, sizes=",".join(f"{n}={size}" for n, size in sizes.items())))


def steps_of(trainer: Any, world: Comm) -> ExpertParallelSteps | None:
    """Return the run feature that changes the expert-parallel size, or None if the trainer's
    settings do not request it.

    world: communicator of all data-parallel ranks.
    """
    model, known = trainer.get_model(), dict[int, FairseqGroups]()
    moe = moe_layers(model)[0].moe_layer.moe

    def change(size: int) -> None:
        if size not in known:
            known[size] = make_groups(
                size, moe.config.comm.timeout_s,
                measured=bool(setting(trainer.cfg.model, "record_a2a_perf_stats", False)),
                dummy=bool(setting(trainer.cfg.model, "dummy_a2a", False)))
        _change(trainer, known[size], world)

    return expert_parallel_steps(run_settings(model), [model], moe.comm.size, change, world,
                                 "fairseq")


def _change(trainer: Any, groups: FairseqGroups, world: Comm) -> None:
    model, optimizer = trainer.get_model(), trainer.optimizer
    copies = dict(fp32_copies(optimizer))
    changed = change_expert_parallel(model, optimizer.optimizer, groups.expert, world, copies)
    follow_parameters(trainer.model, optimizer, changed, copies)
    for layer in moe_layers(model):
        layer.moe_layer.scale_gradients(groups.replicas)
    trainer.average_replicas()
