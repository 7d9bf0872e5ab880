"""Support for `--moe-expert-parallel-at`, which changes the expert-parallel size between two steps.

Megatron's training loop stores references to several objects: the process groups of dense layers,
the optimizer, the model's wrapper and the scheduler. Because of these references, the objects are
modified in place instead of being replaced.
"""

from __future__ import annotations

import argparse
from typing import Any

from moe_plugin.checkpoint.resize import change_expert_parallel
from moe_plugin.comm.base import Comm
from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.config import RunConfig
from moe_plugin.hosts.megatron.compat import core, regrouping
from moe_plugin.hosts.megatron.compat.settings import script_arguments
from moe_plugin.hosts.megatron.layer import plugin_layers
from moe_plugin.hosts.megatron.passes import bare
from moe_plugin.hosts.megatron.refusals import RESIZE, values_of
from moe_plugin.training.resilience.resizing import ExpertParallelSteps, expert_parallel_steps


def check(args: argparse.Namespace, run: RunConfig) -> None:
    """Raise a `ValueError` if the run does not support changing the expert-parallel size."""
    sizes = run.resize.expert_parallel_at
    if sizes:
        indivisible = next((n for n in sizes.values() if args.num_experts % n), None)
        RESIZE.refuse(values_of(args, {"resize.expert_parallel_at": sizes},
                                indivisible=indivisible))


def steps_of(run: RunConfig, chunks: list[Any], optimizer: Any) -> ExpertParallelSteps | None:
    """Return the run feature that changes the expert-parallel size during the run. Return None if
    no change is requested or if the run does not train.

    Args:
        chunks: model chunks with their wrappers.
        optimizer: Megatron's optimizer, or None if the model is only evaluated.
    """
    if optimizer is None or not run.resize.expert_parallel_at:
        return None
    size = core.groups(None).experts.size()
    world = comm_of(core.all_data_group(core.groups(None).collection))
    known = {size: regrouping.expert_groups()}

    def change(size: int) -> None:
        arguments = script_arguments()
        if size not in known:
            known[size] = regrouping.make_expert_groups(size, arguments)
        regrouping.use_expert_groups(known[size])
        _change(chunks[0], optimizer, world)
        arguments["expert_model_parallel_size"] = size

    return expert_parallel_steps(run, [bare(chunk) for chunk in chunks], size, change, world,
                                 "megatron")


def _change(chunk: Any, optimizer: Any, world: Comm) -> None:
    model, groups = bare(chunk), core.groups(None)
    layers = plugin_layers(model)
    experts = (p for layer in layers for p in layer.experts.parameters())
    part = regrouping.part_of(optimizer, experts)
    copies = regrouping.main_copies(part)
    comm = comm_of(groups.experts, layers[0].plan.config.comm.timeout_s)
    changed = change_expert_parallel(model, part.optimizer, comm, world, copies)
    for layer in layers:
        layer.follow_groups(groups)
    regrouping.follow_parameters(part, changed, copies)
    regrouping.follow_groups(model, groups.collection, groups.experts.size())
    regrouping.rewrap(chunk)
