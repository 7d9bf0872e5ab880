"""`--moe-expert-parallel-at`: another expert-parallel size between two steps of Megatron's loop.

Groups of dense layers, the optimizer, the wrapper of the model and the scheduler stay the same
objects: the loop has them in its hands.
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
from moe_plugin.training.resilience.resizing import ExpertParallelSteps, expert_parallel_steps
from moe_plugin.utils.run_feature import refuse_unfit

MUST_BE_ONE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_tensor_parallel_size", "gtp_weight_remat_size", "expert_gtp_weight_remat_size")
MUST_BE_OFF = {
    "native_moe": "Megatron's own layer cannot change",
    "use_distributed_optimizer": "a parameter's state lies in parts on other ranks",
    "use_megatron_fsdp": "a parameter lies in parts on other ranks",
    "use_torch_fsdp2": "a parameter lies in parts on other ranks",
    "optimizer_cpu_offload": "the optimizer's state is elsewhere",
    "moe_lighthouse": "replicas would have experts on other ranks than this one",
    "overlap_moe_expert_parallel_comm": "its passes have the old experts",
    "delay_wgrad_compute": "its hooks have the old experts",
    "enable_cuda_graph": "a graph has the old experts",
    "external_cuda_graph": "a graph has the old experts",
    "async_save": "a checkpoint that is being written reads what changes",
}


def check(args: argparse.Namespace, run: RunConfig) -> None:
    """`ValueError` where a run cannot change its size: setting, reason and remedy."""
    sizes = run.resize.expert_parallel_at
    if not sizes:
        return

    def flag(name: str) -> str:
        return f"--{name.replace('_', '-')}"

    graphs = getattr(args, "cuda_graph_impl", None)
    refuse_unfit(f"resize.expert_parallel_at={sizes}", [
        *((flag(name), getattr(args, name, None) in (None, 1),
           "experts move between whole data-parallel ranks; use 1") for name in MUST_BE_ONE),
        *((flag(name), not getattr(args, name, None), f"{why}; leave it out")
          for name, why in MUST_BE_OFF.items()),
        (f"--cuda-graph-impl {graphs}", graphs in (None, "none"),
         "a graph has the old experts; leave it out"),
        (f"--optimizer {args.optimizer}", args.optimizer in ("adam", "sgd"), "use adam or sgd"),
        *((f"--num-experts {args.num_experts}", args.num_experts % size == 0,
           f"{size} expert-parallel ranks must divide it, as in Megatron; use a divisor")
          for size in sizes.values())])


def steps_of(run: RunConfig, chunks: list[Any], optimizer: Any) -> ExpertParallelSteps | None:
    """The changes that a script's run is asked for; None also where it only evaluates.

    Args:
        chunks: of the model, wrapped.
        optimizer: Megatron's.
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
    """Let a model follow the present groups."""
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
