"""Train a GPT language model with our MoE layer, for users who have megatron-core and no training
script.

    torchrun --nproc_per_node 2 -m moe_plugin.hosts.megatron.train --data-path data/corpus
    --num-layers 4 ...

On CPU (gloo) and GPU (NCCL). See docs/megatron.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.comm.job_abort import claim_first_report, is_of_another_rank, says_why
from moe_plugin.config import run_config
from moe_plugin.config.flags import as_given
from moe_plugin.dispatch.overflow import RowsOverflow
from moe_plugin.hosts.megatron.trainer import arguments
from moe_plugin.hosts.megatron.trainer.data import build_dataset, check_prefix, tokenizer_of
from moe_plugin.hosts.megatron.trainer.loop import Loop
from moe_plugin.hosts.megatron.trainer.passes import Passes
from moe_plugin.hosts.megatron.trainer.stage_layouts import StageLayouts, unequal_passes
from moe_plugin.hosts.megatron.trainer.start import start
from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS
from moe_plugin.memory.tiers import TierError
from moe_plugin.quiet import MEGATRON, hidden
from moe_plugin.resilience.stopping import stops_in_one_line
from moe_plugin.resilience.twins import WrongResultError

logger = logging.getLogger("moe_plugin.megatron")


def main(argv: list[str] | None = None) -> int:
    """Command line. Errors of use end with a message and status 2, numbers that stay not
    finite or are wrong on a rank, a full disk and the end of another rank, with status 1, on every
    rank. The first rank that has a message says it: others may have none.
    """
    parser = arguments.parser()
    args = parser.parse_args(argv)
    _log_from_rank_zero()
    try:
        with stops_in_one_line(), hidden(MEGATRON), says_why():
            run(args, start(args))
    except Exception as error:
        if not isinstance(error, _SAY_ALL) and not is_of_another_rank(error):
            raise
        logging.getLogger().setLevel(logging.ERROR)
        rank = os.environ.get("RANK", "0")
        if claim_first_report(str(error)) if dist.is_initialized() else rank == "0":
            where = "" if rank == "0" else f" (rank {rank})"
            text = as_given(str(error), vars(args), NATIVE_ARGUMENTS)
            sys.stderr.write(f"{parser.prog}: error: {text}{where}\n")
        return 2 if isinstance(error, ValueError) else 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


# errors whose message says all
_SAY_ALL = ValueError, FloatingPointError, RowsOverflow, WrongResultError, TierError


def _log_from_rank_zero() -> None:
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    for name in ("moe_plugin", logger.name):
        logging.getLogger(name).setLevel(level)


def run(args: argparse.Namespace, stages: StageLayouts | None = None) -> dict[str, Any]:
    """Build everything, resume, train (or evaluate, with `--skip-train`), save; returns the last
    log record.

    stages: what `start` returned.
    """
    from moe_plugin.hosts.megatron.trainer import checkpoint
    from moe_plugin.hosts.megatron.trainer.report import RunLog
    from moe_plugin.hosts.megatron.trainer.run import guard_of

    config = arguments.transformer_config(args, cpu=args.cpu or not torch.cuda.is_available())
    settings = arguments.our_settings(args)
    guard_of(args, settings)
    check_prefix(args.data_path)
    build, passes, loop, load = _kind(args)
    # before the data are read: settings that do not fit are found here
    training = build(args, config, settings, tokenizer_of(args).vocab_size)
    _, train_set, valid_set = make_datasets(args)
    _check_validation(args, valid_set)
    if stages is not None:
        training.passes = unequal_passes(stages, args, training)
        training.stage_layouts = [str(layout) for layout in stages.layouts]
    progress = load(args.load, training) if args.load else checkpoint.Progress()
    log = RunLog(args.log_file or (args.save and os.path.join(args.save, "log.jsonl")), vars(args),
                 arguments.changed_defaults(args))
    if args.skip_train:
        with contextlib.closing(log):
            return passes(args, training, log, valid_set).evaluate(progress.iteration)
    try:
        training_loop = loop(args, training, log, train_set, valid_set)
        try:
            return training_loop.run(progress)
        finally:
            training_loop.features.close()
    finally:
        log.close()


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


def _kind(args: argparse.Namespace) -> tuple[Callable[..., Any], type[Passes], type[Loop],
                                              Callable[..., Any]]:
    """What builds a model, evaluates, trains and loads a checkpoint, with weights on the device or
    streaming.
    """
    from moe_plugin.hosts.megatron.trainer import checkpoint, model

    if run_config(arguments.our_settings(args)).offload.weights == "host":
        from moe_plugin.hosts.megatron.trainer import streamed, streamed_loop

        return (streamed.build, streamed_loop.StreamedPasses, streamed_loop.StreamedLoop,
                streamed_loop.load)
    load = functools.partial(checkpoint.load, trust=args.trust_checkpoint)
    return model.build, Passes, Loop, load


def make_datasets(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_of(args)
    train_set, valid_set = build_dataset(args.data_path, sequence_length=args.seq_length,
                                         samples=args.train_iters * args.global_batch_size,
                                         seed=args.seed, tokenizer=tokenizer, split=args.split,
                                         cache_dir=args.data_cache_path)
    return tokenizer, train_set, valid_set
