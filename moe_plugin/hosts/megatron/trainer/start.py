"""Process group, device, Megatron's groups and random seeds of the training script."""

from __future__ import annotations

import argparse
import os
import random
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_plugin import determinism
from moe_plugin.comm import CommError
from moe_plugin.comm.host_collectives import collectives_named
from moe_plugin.config.options import MOST_SECONDS
from moe_plugin.hosts.megatron.trainer import arguments, copied_flags
from moe_plugin.hosts.megatron.trainer.stage_layouts import StageLayouts, initialize, stages_of
from moe_plugin.hosts.megatron.translate import timeout_of


def start(args: argparse.Namespace) -> StageLayouts | None:
    """Initialize process group, device, Megatron's groups and random seeds.

    Without torchrun this is a world of one. With stages of unequal layout `args` gets the sizes of
    this rank's stage; returns the stages, else None.
    """
    from moe_plugin.hosts.megatron.compat import cpu

    copied_flags.follow(args)
    gpu = torch.cuda.is_available() and not args.cpu
    if not gpu:
        cpu.enable(force=args.cpu)
    timeout = _timeout(args)
    backend = "nccl" if gpu else "gloo"
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        pass  # by the caller
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1,
                                timeout=timeout)
    stages = stages_of(args, dist.get_world_size())
    for stage in range(len(stages.layouts) if stages else 1):
        sized = stages.arguments(args, stage) if stages else args
        arguments.check(sized, dist.get_world_size())
    if args.deterministic_mode:
        determinism.enable()
    from megatron.core import parallel_state as ps

    from moe_plugin.hosts.megatron.compat.core import quiet_unknown_mlp
    from moe_plugin.hosts.megatron.compat.settings import mend_config_warning
    from moe_plugin.hosts.megatron.state import load_without_missing

    quiet_unknown_mlp()
    mend_config_warning()
    load_without_missing()

    def groups(sizes: argparse.Namespace) -> None:
        ps.initialize_model_parallel(
            sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=sizes.num_virtual_stages_per_pipeline_rank,
            distributed_timeout_minutes=timeout / timedelta(minutes=1),
            expert_model_parallel_size=sizes.expert_model_parallel_size,
            expert_tensor_parallel_size=sizes.expert_tensor_parallel_size)

    try:
        with collectives_named("the making of Megatron's process groups"):
            if stages is None:
                groups(args)
            else:
                initialize(stages, args, groups)
    except CommError:
        raise
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"Megatron refuses these parallel sizes for {dist.get_world_size()} processes: {error}"
        ) from error
    seed_everything(args.seed)
    return stages


def _timeout(args: argparse.Namespace) -> timedelta:
    """Of every group: the shorter of Megatron's argument and ours, because our exchanges run in
    Megatron's groups.
    """
    native_s, ours = 60 * args.distributed_timeout_minutes, arguments.our_settings(args)
    if not 0 < native_s <= MOST_SECONDS:
        raise ValueError(
            f"distributed_timeout_minutes={args.distributed_timeout_minutes} is out of bounds: "
            f"must be > 0 and <= {MOST_SECONDS / 60:g}; use 10")
    return timedelta(seconds=min(native_s, timeout_of(ours)))


def seed_everything(seed: int) -> None:
    """Seeds as Megatron's training sets them: by pipeline stage."""
    import numpy as np
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    seed += 100 * ps.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)  # on CPU both share one generator
