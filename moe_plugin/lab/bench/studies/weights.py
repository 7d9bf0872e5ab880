"""Memory and speed of training a model larger than its memory limit, in one process: in plain
PyTorch three times as large, and by the training script of Megatron.

Needs version 1 or 2 of cgroups with a writable memory controller, 5 GiB of disk and about 6
minutes; the second part megatron-core. Of a part alone, the other one stays as the folder has it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_plugin import MoEConfig, MoELayer, weighted_loss
from moe_plugin.config import with_overrides
from moe_plugin.lab.bench.child import call_limited
from moe_plugin.lab.bench.memory_limit import AnonymousPeak
from moe_plugin.lab.bench.report import paragraph, table
from moe_plugin.lab.bench.study import Option
from moe_plugin.memory.tiers import DiskTier
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.regular_files import write_regular

VOCABULARY, WIDTH, EXPERTS, MIB = 256, 512, 8, 2**20
MODES = ("resident", "streamed", "streamed without overlap")
LIMIT_MIB = {"plain": 424, "megatron": 832}
COLUMNS = ["weights", "tier", "limit MiB", "peak of the cgroup MiB", "peak of the process MiB",
           "tokens/s", "processor s a step", "stalled s", "copied MiB a step"]
# sizes of Megatron's GPT model; each layer has 16 MiB of weights
MEGATRON = ["--num-attention-heads", "8", "--num-experts", str(EXPERTS), "--moe-router-topk", "2",
            "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear", "--moe-fused-adam",
            "--untie-embeddings-and-output-weights", "--hidden-dropout", "0", "--lr", "1e-3",
            "--attention-dropout", "0", "--log-interval", "1"]


class LimitedBlock(nn.Module):
    """Causal attention and experts."""

    def __init__(self, seed: int, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = with_overrides(
            MoEConfig(model_dim=WIDTH, num_experts=EXPERTS),
            {"experts.hidden_dim": hidden, "experts.compute_selection": "rule"})
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = MoELayer(self.config)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """(output, weighted balance loss)."""
        parts = self.inward(F.layer_norm(x_BSD, (WIDTH,))).unflatten(-1, (3, 8, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.outward(mixed.transpose(1, 2).flatten(2))
        out = self.moe(F.layer_norm(x_BSD, (WIDTH,)))
        return x_BSD + out.output, weighted_loss(out.losses, self.config.losses)


class Embedding(nn.Embedding):
    """Token embedding of a seed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(VOCABULARY, WIDTH)


class Head(nn.Linear):
    """Output of a seed."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(WIDTH, VOCABULARY)


def model(layers: int, hidden: int) -> list[Any]:
    """What makes the blocks, one after another."""
    return [Embedding, *(partial(LimitedBlock, 2 + i, hidden) for i in range(layers)), Head]


def batches(step: int, count: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of two noisy arithmetic progressions."""
    random = torch.Generator().manual_seed(step)
    start, by = torch.randint(0, VOCABULARY, (2, 2 * count, 1), generator=random)
    ids = (start + by % 5 * torch.arange(length + 1)) % VOCABULARY
    return [(ids_BS[:, :-1], ids_BS[:, 1:]) for ids_BS in ids.chunk(count)]


def loss_of(count: int, out: Tensor, target: Tensor) -> Tensor:
    """A micro-batch's part of the mean."""
    return F.cross_entropy(out.flatten(0, 1), target.flatten()) / count


OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def child(args: argparse.Namespace, mode: str, scratch: str, throttle: float) -> dict[str, Any]:
    """Train in this process; what was seen."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    peak, blocks = AnonymousPeak(), model(args.layers, args.hidden)
    loss, losses, seconds = partial(loss_of, args.micro_batches), [], []
    seen: dict[str, Any] = {}
    processor = []
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
        data = batches(step, args.micro_batches, args.length)
        if mode != MODES[0]:
            losses += [float(x) for x in trainer.step(data).losses]
        else:
            for x, target in data:
                balance = torch.zeros(())
                for module in modules:
                    x = module(x)
                    x, own = x if isinstance(x, tuple) else (x, None)
                    balance = balance if own is None else balance + own
                value = loss(x, target)
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

    torch.set_num_threads(1)
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
    """Sentences for Megatron's script."""
    words = "one two three four five six seven eight nine ten".split()
    lines = (" ".join(words[(i * j + i) % 10] for j in range(1, 40)) for i in range(1, 600))
    write_regular(scratch / "text.txt", "\n".join(lines))
    subprocess.run([sys.executable, "-m", "moe_plugin.hosts.megatron.data", "--input",
                    str(scratch / "text.txt"), "--output-prefix", str(scratch / "text")],
                   check=True, stdout=subprocess.DEVNULL)


PARTS = {"plain": child, "megatron": megatron_child}


def compare(args: argparse.Namespace, part: str, scratch: str) -> dict[str, Any]:
    """All modes; streamed losses are the resident ones, bit for bit."""
    limit = (LIMIT_MIB[part] if args.limit_mib < 0 else args.limit_mib) * MIB or None
    modes, throttles = MODES, (0.0, args.throttle)
    if part == "megatron":
        write_text(Path(scratch))
        modes, throttles = MODES[:2], (0.0,)

    def run(mode: str, most: int | None, throttle: float = 0.0) -> dict[str, Any] | None:
        return call_limited(most, PARTS[part], args, mode, scratch, throttle)

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
    return {"limit": limit, "layers": args.layers, "hidden": args.hidden, "length": args.length,
            "micro_batches": args.micro_batches, "steps": args.steps, "rows": rows,
            "weights_mib": args.weights_mib, "load": os.getloadavg(), "cores": os.cpu_count()}


def cells_of(seen: dict[str, Any]) -> list[list[str]]:
    """Of a part's table."""
    cells = []
    for row in seen["rows"]:
        tier = f"{row['throttle_mb_s']:.0f} MB/s" if row.get("throttle_mb_s") else "as it is"
        cells.append([
            row["mode"], tier if "throttle_mb_s" in row else "",
            "none" if row["limit"] is None else f"{row['limit'] / MIB:.0f}",
            f"{row['cgroup_peak_bytes'] / MIB:.0f}", f"{row['anonymous_bytes'] / MIB:.0f}",
            f"{row['tokens_s']:.1f}",
            f"{row['processor_s']:.1f}",
            f"{row['stalled_s']:.1f}" if "stalled_s" in row else "",
            f"{row['copied_bytes'] / MIB / seen['steps']:.0f}" if "copied_bytes" in row else ""])
    return cells


def page(seen: dict[str, Any]) -> str:
    """The page."""
    parts = {"plain": plain_part, "megatron": megatron_part}
    return "\n".join(line for name, part in parts.items() if name in seen
                     for line in part(seen[name]))


def megatron_part(seen: dict[str, Any]) -> list[str]:
    """Of the page: Megatron's training script."""
    resident, streamed = seen["rows"]
    return [
        "## In Megatron", "",
        paragraph(
            "`python -m moe_plugin.hosts.megatron.train` with a GPT model of "
            f"{seen['layers']} layers, each with 16 MiB of weights in attention and {EXPERTS} "
            f"experts of {WIDTH} x {seen['hidden']}, "
            f"{seen['steps']} steps of {seen['micro_batches']} micro-batches of 2 x "
            f"{seen['length']} tokens; `--moe-fused-adam`. Streamed: `--weights-on host "
            f"--weights-memory {seen['weights_mib']}MiB`, which holds two segments, gradients and "
            "the optimizer's state of a block; the rest is what Python, torch and Megatron take, "
            "and activations. The resident model was killed under the limit, too. Losses are equal "
            "bit for bit. Processor seconds are of the whole run, imports included, by step. "
            "Streamed: "
            f"{streamed['tokens_s'] / resident['tokens_s']:.2f} of the tokens/s and "
            f"{streamed['processor_s'] / resident['processor_s']:.2f} times the processor seconds "
            f"in {streamed['cgroup_peak_bytes'] / resident['cgroup_peak_bytes']:.2f} of the "
            "memory. "
            f"Load average {', '.join(f'{x:.1f}' for x in seen['load'])}; the same holds as "
            "above."),
        "", table(COLUMNS, cells_of(seen)), ""]


def plain_part(seen: dict[str, Any]) -> list[str]:
    """Of the page: plain PyTorch."""
    size = seen["rows"][0]["model_bytes"]
    return [
        "# Training a model three times as large as its memory", "",
        paragraph(
            "Made by `moe-plugin bench weights`. A language model of "
            f"{seen['layers']} blocks ({EXPERTS} experts of width {WIDTH} x {seen['hidden']}, "
            f"attention), {size / MIB:.0f} MiB of float32 weights, trains {seen['steps']} steps of "
            f"{seen['micro_batches']} micro-batches with torch's fused AdamW, whose state is twice "
            "as large again. The process runs in a cgroup whose limit counts all of its memory, "
            "torch, activations and pages of files included; the resident model was killed under "
            "it, and ran without a limit for comparison. Losses of all rows are equal bit for "
            "bit. The peak of the cgroup contains pages of files, which the kernel takes back "
            "where memory is short; memory of the process alone was sampled. Tokens/s are of the "
            f"fastest step, with one thread on a machine of {seen['cores']} cores, which other "
            "programs used, too: where the load is far above the cores, only processor seconds can "
            "be compared. Load average "
            f"{', '.join(f'{x:.1f}' for x in seen['load'])}."),
        "", table(COLUMNS, cells_of(seen)), ""]


OPTIONS = {
    "parts": Option(tuple(PARTS), "of the page", choices=PARTS),
    "scratch": Option("", "folder for the tier's file (default: a new one here)"),
    "steps": Option(2, "training steps"), "layers": Option(80, "blocks", quick=2),
    "hidden": Option(384, "of experts", quick=64),
    "length": Option(32, "tokens of a sequence", quick=16),
    "micro-batches": Option(4, "of a step", quick=2),
    "limit-mib": Option(-1, "memory limit; -1: of the part, 0: none", quick=0),
    "weights-mib": Option(144, "--weights-memory of Megatron's script"),
    "throttle": Option(0.0, "MB/s of a slower tier, measured, too; 0: none"),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All parts."""
    found = {}
    for part in args.parts:
        with tempfile.TemporaryDirectory(dir=args.scratch or Path.cwd()) as scratch:
            found[part] = compare(args, part, scratch)
    return found


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Parts that were not measured again stay."""
    return {**old, **new}
