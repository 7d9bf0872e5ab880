"""A run of the training script: process group, device, Megatron's groups and random seeds; then
model, data and loop.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from moe_plugin import determinism
from moe_plugin.comm import CommError
from moe_plugin.comm.host_collectives import collectives_named
from moe_plugin.config.options import MOST_SECONDS
from moe_plugin.hosts.megatron.compat import cpu
from moe_plugin.hosts.megatron.compat.core import quiet_unknown_mlp
from moe_plugin.hosts.megatron.compat.settings import mend_config_warning
from moe_plugin.hosts.megatron.guards import guard_of
from moe_plugin.hosts.megatron.report import RunLog, log_path
from moe_plugin.hosts.megatron.stage_layouts import (
    StageLayouts,
    initialize,
    stages_of,
    unequal_passes,
)
from moe_plugin.hosts.megatron.state import load_without_missing
from moe_plugin.hosts.megatron.trainer import arguments, checkpoint, copied_flags, model
from moe_plugin.hosts.megatron.trainer.data import build_dataset, check_prefix, tokenizer_of
from moe_plugin.hosts.megatron.trainer.loop import Loop
from moe_plugin.hosts.megatron.translate import timeout_of

logger = logging.getLogger("moe_plugin.megatron")


def start(args: argparse.Namespace) -> StageLayouts | None:
    """Initialize process group, device, Megatron's groups and random seeds.

    Without torchrun this is a world of one. With stages of unequal layout `args` gets the sizes of
    this rank's stage; returns the stages, else None.
    """
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
    quiet_unknown_mlp()
    mend_config_warning()
    load_without_missing()

    groups = functools.partial(
        ps.initialize_model_parallel,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
        distributed_timeout_minutes=timeout / timedelta(minutes=1))

    try:
        with collectives_named("the making of Megatron's process groups"):
            if stages is None:
                groups(tensor_model_parallel_size=args.tensor_model_parallel_size,
                       expert_model_parallel_size=args.expert_model_parallel_size,
                       expert_tensor_parallel_size=args.expert_tensor_parallel_size)
            else:
                initialize(stages, groups)
                own = stages.stage_of(dist.get_rank())
                vars(args).update(vars(stages.arguments(args, own)))
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
    seed += 100 * ps.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)  # on CPU both share one generator


def run(args: argparse.Namespace, stages: StageLayouts | None = None) -> dict[str, Any]:
    """Build everything, resume, train (or evaluate, with `--skip-train`), save; returns the last
    log record.

    stages: what `start` returned.
    """
    config = arguments.transformer_config(args, cpu=args.cpu or not torch.cuda.is_available())
    settings = arguments.our_settings(args)
    guard_of(args, settings)
    check_prefix(args.data_path)
    # before the data are read: settings that do not fit are found here
    training = model.build(args, config, settings, tokenizer_of(args).vocab_size)
    _, train_set, valid_set = make_datasets(args)
    _check_validation(args, valid_set)
    if stages is not None:
        training.passes = unequal_passes(stages, args, training.config, training.optimizer)
        training.stage_layouts = [str(layout) for layout in stages.layouts]
    progress = checkpoint.Progress()
    if args.load:
        progress = checkpoint.load(args.load, training, trust=args.trust_checkpoint)
    log = RunLog(log_path(vars(args)), vars(args), arguments.changed_defaults(args))
    with contextlib.closing(log):
        loop = Loop(args, training, log, train_set, valid_set)
        with contextlib.closing(loop.features):
            return loop.evaluate(progress.iteration) if args.skip_train else loop.run(progress)


def _check_validation(args: argparse.Namespace, valid_set: Any) -> None:
    """`ValueError` where there is nothing to evaluate, but it is asked for."""
    if not (args.skip_train or args.eval_interval):
        return
    asked = "skip_train" if args.skip_train else "eval_interval"
    if valid_set is None:
        raise ValueError(f"{asked}={getattr(args, asked)}: split={args.split!r} leaves nothing to "
                         "evaluate: its second part must be > 0; give --split 0,1,0, or train "
                         f"without --{asked.replace('_', '-')}")
    if not len(valid_set):
        raise ValueError(f"{asked}={getattr(args, asked)}: split={args.split!r} leaves no document "
                         "to evaluate, because whole documents are split: give more documents "
                         "(blank lines end them), a larger second part, or another text "
                         "(--data-path with --split 0,1,0)")


def make_datasets(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_of(args)
    train_set, valid_set = build_dataset(args.data_path, sequence_length=args.seq_length,
                                         samples=args.train_iters * args.global_batch_size,
                                         seed=args.seed, tokenizer=tokenizer, split=args.split,
                                         cache_dir=args.data_cache_path)
    return tokenizer, train_set, valid_set
