"""Train a GPT language model with our MoE layer, for users who have megatron-core and no training
script.

    torchrun --nproc_per_node 2 -m moe_plugin.hosts.megatron.train --data-path data/corpus
    --num-layers 4 ...

On CPU (gloo) and GPU (NCCL). See docs/megatron.md.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin import determinism
from moe_plugin.config import MoEConfig, with_overrides
from moe_plugin.config.options import MOST_SECONDS
from moe_plugin.dispatch.overflow import RowsOverflow
from moe_plugin.hosts.megatron import arguments
from moe_plugin.hosts.megatron.groups import timeout_of
from moe_plugin.hosts.plain.drops import DropWarning
from moe_plugin.hosts.plain.named_errors import collectives_named, comm_of
from moe_plugin.routing import finish_step

logger = logging.getLogger("moe_plugin.megatron")


def main(argv: list[str] | None = None) -> int:
    """Command line. Errors of use end with a message and status 2, numbers that stay not
    finite with status 1, on every rank.
    """
    parser = arguments.parser()
    args = parser.parse_args(argv)
    _log_from_rank_zero()
    try:
        start(args)
        run(args)
    except (ValueError, FloatingPointError, RowsOverflow) as error:
        logging.getLogger().setLevel(logging.ERROR)
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"{parser.prog}: error: {error}\n")
        return 2 if isinstance(error, ValueError) else 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _log_from_rank_zero() -> None:
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    for name in ("moe_plugin", logger.name):
        logging.getLogger(name).setLevel(level)


def start(args: argparse.Namespace) -> None:
    """Initialize process group, device, Megatron's groups and random seeds.

    Without torchrun this is a world of one.
    """
    from moe_plugin.hosts.megatron.compat import cpu

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
    arguments.check(args, dist.get_world_size())
    if args.deterministic_mode:
        determinism.enable()
    from megatron.core import parallel_state as ps

    from moe_plugin.hosts.megatron.compat.core import quiet_unknown_mlp
    from moe_plugin.hosts.megatron.compat.settings import mend_config_warning
    from moe_plugin.hosts.megatron.state import load_without_missing

    quiet_unknown_mlp()
    mend_config_warning()
    load_without_missing()

    try:
        ps.initialize_model_parallel(
            args.tensor_model_parallel_size, args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
            distributed_timeout_minutes=timeout / timedelta(minutes=1),
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"Megatron refuses these parallel sizes for {dist.get_world_size()} processes: {error}"
        ) from error
    seed_everything(args.seed)


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
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    seed += 100 * ps.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)  # on CPU both share one generator


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Build everything, resume, train, save; returns the last log record."""
    from moe_plugin.hosts.megatron import checkpoint, model
    from moe_plugin.hosts.megatron.report import Observer, RunLog

    config = arguments.transformer_config(args, cpu=args.cpu or not torch.cuda.is_available())
    settings = arguments.our_settings(args)
    tokenizer, train_set, valid_set = _datasets(args)
    training = model.build(args, config, settings, tokenizer.vocab_size)
    progress = (checkpoint.load(args.load, training, args.trust_checkpoint)
                if args.load else checkpoint.Progress())
    log = RunLog(args.log_file or (args.save and os.path.join(args.save, "log.jsonl")), vars(args))
    observe = {path: value for path, value in settings.items() if path.startswith("observe.")}
    observer = Observer(training.moe_layers(), with_overrides(MoEConfig(), observe).observe)
    try:
        return Loop(args, training, observer, log, train_set, valid_set).run(progress)
    finally:
        log.close()


def _datasets(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    from moe_plugin.hosts.megatron.data import ByteTokenizer, IntegerTokenizer, build_dataset

    tokenizer = IntegerTokenizer(args.vocab_size) if args.vocab_size else ByteTokenizer()
    train_set, valid_set = build_dataset(args.data_path, sequence_length=args.seq_length,
                                         samples=args.train_iters * args.global_batch_size,
                                         seed=args.seed, tokenizer=tokenizer, split=args.split,
                                         cache_dir=args.data_cache_path)
    return tokenizer, train_set, valid_set


def learning_rate(args: argparse.Namespace, iteration: int) -> float:
    """Rate of a 0-based iteration.

    Linear warm-up to `lr`, then constant, linear or cosine decay to `min_lr`.
    """
    if iteration < args.lr_warmup_iters:
        return args.lr * (iteration + 1) / args.lr_warmup_iters
    if args.lr_decay_style == "constant":
        return args.lr
    total = (args.lr_decay_iters or args.train_iters) - args.lr_warmup_iters
    done = min(1.0, (iteration - args.lr_warmup_iters) / max(1, total))
    left = 1 - done if args.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return args.min_lr + (args.lr - args.min_lr) * left


class Loop:
    """The training loop: steps, evaluation, records, checkpoints."""

    def __init__(self, args: argparse.Namespace, training: Any, observer: Any, log: Any,
                 train_set: Any, valid_set: Any) -> None:
        from megatron.core import parallel_state as ps

        from moe_plugin.hosts.megatron.compat.finite import FiniteSteps
        from moe_plugin.hosts.megatron.rows import FittingSteps

        self.args, self.training, self.observer, self.log = args, training, observer, log
        self.train_set, self.valid_set = train_set, valid_set
        self.finite = FiniteSteps(training.optimizer)
        self.until_rows_fit = FittingSteps(training.chunks)
        self.warn_of_drops = DropWarning()
        self.replica, self.replicas = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
        self.microbatches = args.global_batch_size // (args.micro_batch_size * self.replicas)
        self.device = next(training.chunks[0].parameters()).device

    def run(self, progress: Any) -> dict[str, Any]:
        """Train from `progress` to `train_iters`; returns the last record."""
        from moe_plugin.hosts.megatron.checkpoint import Progress, save
        from moe_plugin.observe import progress as progress_bar

        args, record, saved = self.args, {}, progress.iteration
        batches = [
            self._batches(self.train_set, progress.consumed_samples) for _ in self.training.chunks
        ]
        sums, since = torch.zeros(2, dtype=torch.float64), time.perf_counter()
        stream = sys.stderr if dist.get_rank() == 0 else open(os.devnull, "w")  # noqa: SIM115
        with progress_bar(args.train_iters, "training", stream=stream) as bar:
            bar.update(progress.iteration)
            for iteration in range(progress.iteration, args.train_iters):
                with self.observer.timeline.around(iteration + 1):
                    loss_2, norm = self.step(batches, learning_rate(args, iteration))
                sums += loss_2
                done = iteration + 1
                progress = Progress(done, progress.consumed_samples + args.global_batch_size)
                if done % args.log_interval == 0 or done == args.train_iters:
                    record = self._record(progress, sums, norm, time.perf_counter() - since)
                    bar.set_postfix_str(f"loss {record['lm_loss'] or math.nan:.3f}")
                    sums, since = torch.zeros(2, dtype=torch.float64), time.perf_counter()
                if args.eval_interval and done % args.eval_interval == 0:
                    self._evaluate(done)
                if args.save and args.save_interval and done % args.save_interval == 0:
                    save(args.save, self.training, progress)
                    saved = done
                bar.update(1)
                if args.exit_interval and done % args.exit_interval == 0:
                    break
        if args.save and saved != progress.iteration:
            logger.info("checkpoint: %s", save(args.save, self.training, progress))
        return record

    def _batches(self, dataset: Any, start: int) -> Iterator[Any]:
        from moe_plugin.hosts.megatron.data import batches

        return batches(dataset, start=start, micro_batch_size=self.args.micro_batch_size,
                       replica=self.replica, replicas=self.replicas, device=self.device)

    def step(self, batches: list[Any], rate: float) -> tuple[torch.Tensor, float | None]:
        """One step: (sum of losses and number of tokens, float [2], gradient norm; None: it is not
        known). batches: by chunk of the model. rate: learning rate.
        """
        from moe_plugin.hosts.megatron.compat import core

        for chunk in self.training.chunks:
            chunk.train()
        kept = _logged_losses()
        loss_2 = self.until_rows_fit(self._gradients, batches, self.microbatches,
                                     lambda: core.set_logged_losses(kept))
        self.finite.loss_is_finite = bool(loss_2.isfinite().all())
        for group in self.training.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
        stepped, norm, _ = self.training.optimizer.step()
        for chunk in self.training.chunks:
            finish_step(chunk)
        if not stepped:  # neither its losses nor its auxiliary losses are part of any mean
            core.set_logged_losses(kept)
            loss_2 = torch.zeros_like(loss_2)
        return loss_2, None if norm is None else float(norm)

    def _gradients(self, batches: list[Any]) -> torch.Tensor:
        for chunk in self.training.chunks:
            chunk.zero_grad_buffer()
        self.training.optimizer.zero_grad()
        return self._loss_sums(
            self._forward_backward(batches, self.microbatches, forward_only=False))

    def _forward_backward(self, batches: list[Any], microbatches: int, *,
                          forward_only: bool) -> list[dict[str, torch.Tensor]]:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        from moe_plugin.hosts.megatron.model import forward_step

        chunks = self.training.chunks
        several = len(chunks) > 1
        length = self.args.seq_length
        with collectives_named("a collective of Megatron's step (gradients, or between stages)"):
            return get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=batches if several else batches[0],
                model=chunks if several else chunks[0], num_microbatches=microbatches,
                seq_length=length, micro_batch_size=self.args.micro_batch_size,
                decoder_seq_length=length, forward_only=forward_only)

    def _loss_sums(self, logged: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        # (sum of losses, tokens) over micro-batches and replicas; known on the last stage, sent to
        # all
        from megatron.core import parallel_state as ps

        sums = torch.zeros(2, device=self.device)
        for entry in logged:
            sums += entry["lm loss"]
        for group in (ps.get_data_parallel_group(), ps.get_pipeline_model_parallel_group()):
            sums = comm_of(group).all_reduce(sums)
        return sums.double().cpu()

    def _record(self, progress: Any, sums: torch.Tensor, norm: float | None,
                seconds: float) -> dict[str, Any]:
        from moe_plugin.hosts.megatron.report import auxiliary_losses, line

        total, tokens = sums.tolist()
        steps = tokens / (self.args.global_batch_size * self.args.seq_length)
        record = {
            "iteration": progress.iteration, "consumed_samples": progress.consumed_samples,
            "lm_loss": total / tokens if tokens else None,
            "skipped_steps": self.finite.skipped,
            "lr": learning_rate(self.args, progress.iteration - 1),
            "loss_scale": float(self.training.optimizer.get_loss_scale()),
            "grad_norm": norm, "tokens_per_s": tokens / seconds, "seconds": seconds,
            "aux_losses": auxiliary_losses(max(1, round(steps)) * self.microbatches), "balance": {
                layer: {
                    key: row[key]
                    for key in ("max_over_mean", "drop_fraction", "unused_experts", "entropy")
                } for layer, row in self.observer.records(progress.iteration).items()
            },
        }
        rows = list(record["balance"].values())
        if rows and dist.get_rank() == 0:
            self.warn_of_drops(progress.iteration,
                               sum(row["drop_fraction"] for row in rows) / len(rows))
        self.log.write(record)
        logger.info("%s", line(record, self.args.train_iters))
        return record

    def _evaluate(self, iteration: int) -> None:
        from moe_plugin.hosts.megatron.compat import core

        if self.valid_set is None:
            return
        self.training.gather_parameters()
        for chunk in self.training.chunks:
            chunk.eval()
        batches = [self._batches(self.valid_set, 0) for _ in self.training.chunks]
        kept = _logged_losses()
        with torch.no_grad():
            total, tokens = self.until_rows_fit(
                self._losses, batches, self.args.eval_iters,
                lambda: core.set_logged_losses(kept)).tolist()
        self.log.write({"iteration": iteration, "valid_loss": total / max(1.0, tokens)})
        logger.info("iteration %d | validation loss %.4f", iteration, total / max(1.0, tokens))

    def _losses(self, batches: list[Any]) -> torch.Tensor:
        return self._loss_sums(
            self._forward_backward(batches, self.args.eval_iters, forward_only=True))


def _logged_losses() -> dict[str, torch.Tensor]:
    from moe_plugin.hosts.megatron.compat import core

    return {name: entry.values.clone() for name, entry in core.logged_losses().items()}


if __name__ == "__main__":
    raise SystemExit(main())
