"""Memory and speed of training a model larger than its memory limit, in one process: in plain
PyTorch three times as large, and by the training script of Megatron.

Needs version 1 or 2 of cgroups with a writable memory controller, 5 GiB of disk and about 6
minutes; the second part megatron-core.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_plugin.cli.figures import columns
from moe_plugin.memory.tiers import DiskTier
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.utils.regular_files import write_regular
from scripts.bench.memory_limit import AnonymousPeak, call_limited
from scripts.bench.study import Option
from scripts.bench.toy import batches, loss_of, makers, through

TITLE = "Training a model three times as large as its memory"
VOCABULARY, WIDTH, EXPERTS, MIB = 256, 512, 8, 2**20
MODES = ("resident", "streamed", "streamed without overlap")
LIMIT_MIB = {"plain": 424, "megatron": 832}
# sizes of Megatron's GPT model; each layer has 16 MiB of weights
MEGATRON = ["--num-attention-heads", "8", "--num-experts", str(EXPERTS), "--moe-router-topk", "2",
            "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear", "--moe-fused-adam",
            "--untie-embeddings-and-output-weights", "--hidden-dropout", "0", "--lr", "1e-3",
            "--attention-dropout", "0", "--log-interval", "1", "--num-workers", "0"]
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def child(args: argparse.Namespace, mode: str, scratch: str, throttle: float) -> dict[str, Any]:
    """Train in this process; what was seen."""
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
                                  throttle=throttle * 1e6 or None, overlap=mode == MODES[1])
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


def megatron_child(args: argparse.Namespace, mode: str, place: str,
                   throttle: float) -> dict[str, Any]:
    """Train with Megatron's script in this process; what was seen."""
    from moe_plugin.hosts.megatron.train import main as train
    from moe_plugin.observe.history import read_run

    peak, scratch = AnonymousPeak(), Path(place)
    folder = Path(tempfile.mkdtemp(dir=scratch))
    began = time.process_time()
    with contextlib.redirect_stdout(sys.stderr):
        status = train([
            *MEGATRON, "--data-path", str(scratch / "text"), "--num-layers", str(args.layers),
            "--hidden-size", str(WIDTH), "--moe-ffn-hidden-size", str(args.hidden),
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


def write_text(scratch: Path) -> None:
    words = "one two three four five six seven eight nine ten".split()
    lines = (" ".join(words[(i * j + i) % 10] for j in range(1, 40)) for i in range(1, 600))
    write_regular(scratch / "text.txt", "\n".join(lines))
    subprocess.run([sys.executable, "-m", "moe_plugin.hosts.megatron.data", "--input",
                    str(scratch / "text.txt"), "--output-prefix", str(scratch / "text")],
                   check=True, stdout=subprocess.DEVNULL)


CHILDREN = {"plain": child, "megatron": megatron_child}


def compare(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """All modes; streamed losses are the resident ones, bit for bit."""
    limit = (LIMIT_MIB[part] if args.limit_mib < 0 else args.limit_mib) * MIB or None
    modes, throttles = (MODES, (0.0, args.throttle)) if part == "plain" else (MODES[:2], (0.0,))
    with tempfile.TemporaryDirectory(dir=args.scratch or Path.cwd()) as scratch:
        if part == "megatron":
            write_text(Path(scratch))

        def run(mode: str, most: int | None, throttle: float = 0.0) -> dict[str, Any] | None:
            return call_limited(most, CHILDREN[part], args, mode, scratch, throttle)

        rows = [{"mode": modes[0], "limit": None, **run(modes[0], None)}]
        if limit is not None and run(modes[0], limit) is not None:
            raise ValueError("the resident model fits the limit: give a smaller one")
        for throttle in dict.fromkeys(throttles):
            for mode in modes[1:]:
                seen = run(mode, limit, throttle)
                if seen is None:
                    raise ValueError(f"{mode}: killed under the limit; give a larger one")
                if seen["losses"] != rows[0]["losses"]:
                    raise RuntimeError(f"{mode}: other losses than those of the resident model")
                rows.append({"mode": mode, "limit": limit, "throttle_mb_s": throttle, **seen})
    sizes = ("layers", "hidden", "length", "micro_batches", "steps", "weights_mib")
    return {"limit": limit, "rows": rows, **{name: getattr(args, name) for name in sizes}}


def table_of(seen: dict[str, Any]) -> str:
    def there(form: str, key: str, over: float = 1.0) -> Any:
        return lambda row: form.format(row[key] / over) if key in row else ""

    return columns(seen["rows"], {
        "weights": "{mode}",
        "tier": lambda row: f"{row['throttle_mb_s']:.0f} MB/s" if row.get("throttle_mb_s") else (
            "as it is" if "throttle_mb_s" in row else ""),
        "limit MiB": lambda row: f"{row['limit'] / MIB:.0f}" if row["limit"] else "none",
        "peak of the cgroup MiB": there("{:.0f}", "cgroup_peak_bytes", MIB),
        "peak of the process MiB": there("{:.0f}", "anonymous_bytes", MIB),
        "tokens/s": "{tokens_s:.1f}", "processor s a step": "{processor_s:.1f}",
        "stalled s": there("{:.1f}", "stalled_s"),
        "copied MiB a step": there("{:.0f}", "copied_bytes", MIB * seen["steps"])})


def plain_part(seen: dict[str, Any]) -> list[str]:
    return [
        f"A language model of {seen['layers']} blocks ({EXPERTS} experts of width {WIDTH} x "
        f"{seen['hidden']}, attention), {seen['rows'][0]['model_bytes'] / MIB:.0f} MiB of float32 "
        f"weights, trains {seen['steps']} steps of {seen['micro_batches']} micro-batches with "
        "torch's fused AdamW, whose state is twice as large again. The process runs in a cgroup "
        "whose limit counts all of its memory, torch, activations and pages of files included; the "
        "resident model was killed under it, and ran without a limit for comparison. Losses of all "
        "rows are equal bit for bit. The peak of the cgroup contains pages of files, which the "
        "kernel takes back where memory is short; memory of the process alone was sampled. "
        "Tokens/s are of the fastest step, with one thread on a machine that other programs used, "
        "too: where the load is far above the cores, only processor seconds can be compared.",
        table_of(seen)]


def megatron_part(seen: dict[str, Any]) -> list[str]:
    resident, streamed = seen["rows"]
    times = {name: streamed[name] / resident[name]
             for name in ("tokens_s", "processor_s", "cgroup_peak_bytes")}
    return [
        "## In Megatron",
        "`python -m moe_plugin.hosts.megatron.train` with a GPT model of "
        f"{seen['layers']} layers, each with 16 MiB of weights in attention and {EXPERTS} experts "
        f"of {WIDTH} x {seen['hidden']}, {seen['steps']} steps of {seen['micro_batches']} "
        f"micro-batches of 2 x {seen['length']} tokens; `--moe-fused-adam`. Streamed: "
        f"`--weights-on host --weights-memory {seen['weights_mib']}MiB`, which holds two segments, "
        "gradients and the optimizer's state of a block; the rest is what Python, torch and "
        "Megatron take, and activations. The resident model was killed under the limit, too. "
        "Losses are equal bit for bit. Processor seconds are of the whole run, imports included, "
        f"by step. Streamed: {times['tokens_s']:.2f} of the tokens/s and "
        f"{times['processor_s']:.2f} times the processor seconds in "
        f"{times['cgroup_peak_bytes']:.2f} of the memory. The same holds as above.",
        table_of(seen)]


PARTS = {"plain": (partial(compare, "plain"), plain_part),
         "megatron": (partial(compare, "megatron"), megatron_part)}
OPTIONS = {
    "scratch": Option("", "folder for the tier's file (default: a new one here)"),
    "steps": Option(2, "training steps"), "layers": Option(80, "blocks", quick=2),
    "hidden": Option(384, "of experts", quick=64),
    "length": Option(32, "tokens of a sequence", quick=16),
    "micro-batches": Option(4, "of a step", quick=2),
    "limit-mib": Option(-1, "memory limit; -1: of the part, 0: none", quick=0),
    "weights-mib": Option(144, "--weights-memory of Megatron's script"),
    "throttle": Option(0.0, "MB/s of a slower tier, measured, too; 0: none"),
}
