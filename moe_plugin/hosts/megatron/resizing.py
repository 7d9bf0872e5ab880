"""Support for `--moe-expert-parallel-at`, which changes the expert-parallel size between two steps.

Megatron's loop holds references to the process groups of dense layers, the optimizer, the model's
wrapper and the scheduler. Therefore these objects are modified in place and not replaced.
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
    "native_moe": "Megatron's own layer cannot change its size",
    "use_distributed_optimizer": "the state of a parameter is split over ranks",
    "use_megatron_fsdp": "parameters are split over ranks",
    "use_torch_fsdp2": "parameters are split over ranks",
    "optimizer_cpu_offload": "the optimizer's state is offloaded",
    "moe_lighthouse": "replicas would have experts on different ranks",
    "overlap_moe_expert_parallel_comm": "its passes would use the old experts",
    "delay_wgrad_compute": "its hooks would use the old experts",
    "enable_cuda_graph": "a graph would use the old experts",
    "external_cuda_graph": "a graph would use the old experts",
    "async_save": "the parameters could change while a checkpoint is written",
}


def check(args: argparse.Namespace, run: RunConfig) -> None:
    """Raise a `ValueError` if the expert-parallel size cannot be changed during the run.

    The error message contains the setting, the reason and the remedy.
    """
    sizes = run.resize.expert_parallel_at
    if not sizes:
        return

    def flag(name: str) -> str:
        return f"--{name.replace('_', '-')}"

    graphs = getattr(args, "cuda_graph_impl", None)
    refuse_unfit(f"resize.expert_parallel_at={sizes}", [
        *((flag(name), getattr(args, name, None) in (None, 1),
           "use 1, because experts move between whole data-parallel ranks")
          for name in MUST_BE_ONE),
        *((flag(name), not getattr(args, name, None), f"leave it out, because {why}")
          for name, why in MUST_BE_OFF.items()),
        (f"--cuda-graph-impl {graphs}", graphs in (None, "none"),
         "leave it out, because a graph would use the old experts"),
        (f"--optimizer {args.optimizer}", args.optimizer in ("adam", "sgd"), "use adam or sgd"),
        *((f"--num-experts {args.num_experts}", args.num_experts % size == 0,
           f"the number of experts must be divisible by {size}; choose a divisor")
          for size in sizes.values())])


def steps_of(run: RunConfig, chunks: list[Any], optimizer: Any) -> ExpertParallelSteps | None:
    """Return the changes of the expert-parallel size that the run requests, or None if there are
    none or if the run does not train.

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
    """Move a model to the current process groups."""
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
