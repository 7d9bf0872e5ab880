"""Measure the memory and speed of training a model that is larger than its memory limit.

A single process trains a model three times as large as the limit in plain PyTorch, and another
model with Megatron's training script.

The study requires cgroups (version 1 or 2) with a writable memory controller and 5 GiB of disk
space, and takes about 6 minutes. The second part requires megatron-core.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_plugin.cli.corpus import build_corpus
from moe_plugin.memory.tiers import DiskTier
from moe_plugin.memory.weights.streamed import StreamedTrainer
from scripts.bench.child import AnonymousPeak, compare_limited
from scripts.bench.quickstart import data_of
from scripts.bench.report import page
from scripts.bench.study import Option
from scripts.bench.toy import batches, loss_of, makers, through

TITLE = "Training a model three times as large as its memory"
VOCABULARY, WIDTH, EXPERTS, MIB = 256, 512, 8, 2**20
MODES = ("resident", "streamed", "streamed without overlap")
CORPUS_BYTES = 100_000  # size of the text on which Megatron trains
LIMIT_MIB = {"plain": 424, "megatron": 832}
# options of Megatron's GPT model; each layer has 16 MiB of weights
MEGATRON = ["--num-attention-heads", "8", "--num-experts", str(EXPERTS), "--moe-router-topk", "2",
            "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear", "--moe-fused-adam",
            "--untie-embeddings-and-output-weights", "--hidden-dropout", "0", "--lr", "1e-3",
            "--attention-dropout", "0", "--log-interval", "1", "--num-workers", "0"]
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def child(args: argparse.Namespace, mode: str, scratch: str) -> dict[str, Any]:
    """Train one mode in this process. Return the losses, times and memory of the run."""
    torch.use_deterministic_algorithms(True)
    peak, loss = AnonymousPeak(), partial(loss_of, args.micro_batches)
    blocks = makers(VOCABULARY, args.layers, WIDTH, EXPERTS, args.hidden)
    losses, seconds, processor = [], [], []
    seen: dict[str, Any] = {}
    if mode == MODES[0]:
        modules = [make() for make in blocks]
        params = [p for module in modules for p in module.parameters()]
        optimizer = OPTIMIZER(params)
        seen["model_bytes"] = sum(p.numel() * p.element_size() for p in params)
    else:
        trainer = StreamedTrainer(blocks, loss, OPTIMIZER, DiskTier(scratch),
                                  overlap=mode == MODES[1])
        seen["model_bytes"] = sum(block.layout.nbytes for block in trainer.blocks)
    for step in range(args.steps):
        began, used = time.perf_counter(), time.process_time()
        data = batches(step, args.micro_batches, 2, args.length, VOCABULARY)
        if mode != MODES[0]:
            losses += [float(x) for x in trainer.step(data).losses]
        else:
            for x, target in data:
                y, balance = through(modules, x)
                value = loss(y, target)
                (value + balance).backward()
                losses.append(float(value.detach()))
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        processor.append(time.process_time() - used)
    if mode != MODES[0]:
        trainer.settle()
        counters = trainer.copier.counters
        seen |= {"copied_bytes": counters.bytes, "stalled_s": counters.stalled_s,
                 "copying_s": counters.busy_s, "device_bytes": trainer.device_bytes}
        trainer.close()
    tokens = 2 * args.length * args.micro_batches
    seen |= {"losses": losses, "seconds": seconds, "anonymous_bytes": peak.bytes,
             "tokens_s": tokens / min(seconds), "processor_s": min(processor)}
    return seen


def megatron_child(args: argparse.Namespace, mode: str, place: str) -> dict[str, Any]:
    """Train with Megatron's script in this process."""
    from moe_plugin.hosts.megatron.train import main as train
    from moe_plugin.observe.history import read_run

    peak, scratch = AnonymousPeak(), Path(place)
    folder = Path(tempfile.mkdtemp(dir=scratch))
    began = time.process_time()
    with contextlib.redirect_stdout(sys.stderr):
        status = train([
            *MEGATRON, "--data-path", str(scratch / "megatron" / "train"), "--num-layers",
            str(args.layers), "--hidden-size", str(WIDTH), "--moe-ffn-hidden-size",
            str(args.hidden),
            "--seq-length", str(args.length), "--micro-batch-size", "2", "--global-batch-size",
            str(2 * args.micro_batches), "--train-iters", str(args.steps), "--moe-stats-interval",
            "1", "--log-file", str(folder / "log.jsonl"), "--moe-stats-jsonl",
            str(folder / "stats.jsonl"), *(
                ["--weights-on", "host", "--moe-activation-path", str(scratch),
                 "--weights-memory", f"{args.weights_mib}MiB"] if mode == MODES[1] else [])])
    if status:
        raise RuntimeError(f"the training script ended with status {status}")
    read = read_run(folder)
    seen: dict[str, Any] = {
        "losses": [step.loss for step in read.steps], "anonymous_bytes": peak.bytes,
        "tokens_s": max(step.tokens_per_s or 0.0 for step in read.steps),
        "processor_s": (time.process_time() - began) / args.steps}
    if copies := read.copies.get("weights"):
        seen |= {"copied_bytes": sum(record.bytes for record in copies),
                 "stalled_s": sum(record.stalled_s for record in copies),
                 "device_bytes": max(record.resident_bytes for record in copies)}
    return seen


CHILDREN = {"plain": child, "megatron": megatron_child}


def compare(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run all modes, and check that the losses with streamed weights are bitwise equal to the
    losses with resident weights.
    """
    limit = (LIMIT_MIB[part] if args.limit_mib < 0 else args.limit_mib) * MIB or None
    modes = MODES if part == "plain" else MODES[:2]
    with tempfile.TemporaryDirectory(dir=args.scratch or Path.cwd()) as scratch:
        if part == "megatron":
            build_corpus(Path(scratch), size=CORPUS_BYTES)
            data_of("megatron", Path(scratch))
        rows = compare_limited(limit, modes, CHILDREN[part], args, scratch)
    for row in rows:
        if row["losses"] != rows[0]["losses"]:
            raise RuntimeError(f"{row['mode']}: the losses differ from those of the resident model")
    sizes = ("layers", "hidden", "length", "micro_batches", "steps", "weights_mib")
    return {"limit": limit, "rows": rows, **{name: getattr(args, name) for name in sizes}}


def cells(seen: dict[str, Any]) -> list[dict[str, Any]]:
    return [{
        "stalled_s": None, **row, "disk": "" if row["mode"] == MODES[0] else "full speed",
        "limit": f"{row['limit'] / MIB:.0f}" if row["limit"] else "none",
        "copied": row["copied_bytes"] / seen["steps"] if "copied_bytes" in row else None}
        for row in seen["rows"]]


def megatron_part(seen: dict[str, Any]) -> list[str]:
    resident, streamed = seen["rows"]
    times = {name: streamed[name] / resident[name]
             for name in ("tokens_s", "processor_s", "cgroup_peak_bytes")}
    return page(__name__, seen, "megatron", times=times, cells=cells(seen))


PARTS = {"plain": (partial(compare, "plain"),
                   lambda seen: page(__name__, seen, cells=cells(seen))),
         "megatron": (partial(compare, "megatron"), megatron_part)}
OPTIONS = {
    "scratch": Option("", "folder for the files of weights (default: a new one here)"),
    "steps": Option(2, "number of training steps"),
    "layers": Option(80, "number of blocks", quick=2),
    "hidden": Option(384, "inner width of an expert", quick=64),
    "length": Option(32, "tokens per sequence", quick=16),
    "micro-batches": Option(4, "micro-batches per step", quick=2),
    "limit-mib": Option(-1, "memory limit in MiB; -1 uses that of the part, 0 sets no limit",
                        quick=0),
    "weights-mib": Option(144, "--weights-memory of Megatron's script in MiB"),
}
