"""Memory and speed of `moe-plugin reshard` on a synthetic checkpoint, next to `cp` of its files.

Needs four times the checkpoint's size on the disk, and about 5 minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from moe_plugin import checksums
from moe_plugin.checkpoint import torch_files
from moe_plugin.checkpoint.formats.plain import part_name, write_index
from moe_plugin.checkpoint.source import Derived, TensorEntry, window_shape
from moe_plugin.lab.bench.report import columns
from moe_plugin.lab.bench.study import Option

TITLE = "Resharding a checkpoint"
RANKS, EXPERTS, WIDTH, HIDDEN = 4, 16, 512, 2048
TARGETS = (2, 8, 32)  # 32: experts of two shards
FIELDS = ("exp_avg", "exp_avg_sq")
PAUSE_S = 5.0


def noise(*shape: int) -> Derived:
    """Random values, drawn where they are read: compression or sparse files would flatter."""
    generator = torch.Generator().manual_seed(0)
    return Derived(("model", ""), TensorEntry(shape, torch.float32),
                   lambda window: torch.randn(window_shape(window), generator=generator))


def write_checkpoint(folder: Path, gib: float) -> int:
    """A checkpoint of four ranks with Adam's state; returns its size."""
    folder.mkdir()
    experts = {"w_in_LDF": (EXPERTS // RANKS, WIDTH, HIDDEN),
               "w_out_LFD": (EXPERTS // RANKS, HIDDEN, WIDTH)}
    layer_bytes = 3 * RANKS * sum(4 * torch.Size(shape).numel() for shape in experts.values())
    layers = max(1, round(gib * 2**30 / layer_bytes))
    for rank in range(RANKS):
        model: dict[str, Any] = {}
        for layer in range(layers):
            prefix = f"layers.{layer}."
            model[prefix + "_extra_state"] = {"version": 1, "num_experts": EXPERTS,
                                              "ep_rank": rank, "ep_size": RANKS}
            model |= {f"{prefix}experts.{name}": noise(*shape) for name, shape in experts.items()}
            model[prefix + "norm.weight"] = noise(WIDTH)
        state = {name: {field: noise(*value.entry.shape) for field in FIELDS}
                 for name, value in model.items() if isinstance(value, Derived)}
        with torch_files.SealedWriter() as writer:
            writer.write(folder / part_name(rank, RANKS), {
                "model": model, "optimizer": {"by_name": state, "groups": [{"lr": 0.1}]}})
    write_index(folder, RANKS, {"step": 1})
    return sum(path.stat().st_size for path in folder.iterdir())


def timed(command: list[str]) -> tuple[float, float, str]:
    """Seconds until a command ended and its data is on the disk; processor seconds; what it
    printed.
    """
    os.sync()
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    os.sync()
    took, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took, used, done.stdout


def compare(home: Path, size: int, rounds: int) -> list[dict[str, Any]]:
    source, target = home / "source", home / "target"
    seconds: dict[int, list[float]] = {parts: [] for parts in (0, *TARGETS)}
    processor: dict[int, list[float]] = {parts: [] for parts in (0, *TARGETS)}
    peaks = dict.fromkeys(TARGETS, 0.0)
    for _ in range(rounds):
        for parts in seconds:
            shutil.rmtree(target, ignore_errors=True)
            time.sleep(PAUSE_S)
            command = (["cp", "-r", str(source), str(target)] if parts == 0 else
                       [sys.executable, "-m", "moe_plugin.cli.main", "reshard", str(source),
                        str(target), "--ep", str(parts)])
            took, used, said = timed(command)
            seconds[parts].append(took)
            processor[parts].append(used)
            if parts:
                peak, unit = re.findall(r"peak memory ([\d.]+) ([MG])iB", said)[0]
                peaks[parts] = max(peaks[parts], float(peak) * (1024 if unit == "G" else 1))
    copy = statistics.median(seconds[0])
    return [{
        "what": f"`reshard --ep {parts}`" if parts else "`cp -r`", "seconds": took,
        "mib_s": size / took / 2**20, "ratio": took / copy,
        "processor_s": statistics.median(processor[parts]), "peak_mib": peaks.get(parts),
    } for parts in seconds for took in [statistics.median(seconds[parts])]]


def body(found: dict[str, Any]) -> list[str]:
    return [
        f"A plain checkpoint of {RANKS} ranks, {found['bytes'] / 2**30:.2f} GiB with Adam's state "
        f"({EXPERTS} experts of width {WIDTH} x {HIDDEN} in each layer, random float32), becomes "
        "one of other numbers of ranks; 32 ranks cut each expert in two. `cp -r` copies the same "
        f"files in the same run, in turn; median of {found['rounds']} rounds, each until the data "
        f"is on the disk (`sync`). Each begins {PAUSE_S:g} s after the result before it was "
        "removed: a virtual machine may give freed memory back to its host meanwhile; at once `cp` "
        "would find it still there, and `reshard`, whose Python starts first, would not. The time "
        "of `reshard` includes the start of Python, the verification of all checksums of the "
        f"source and the sums of what it writes, by `{found['checksums']}`. Peak memory is the "
        "largest resident set of the process, mapped pages of files and Python with torch included "
        "(about 230 MiB before it begins). `reshard` computes while `cp` waits for the disk: "
        f"where the load average is far above the machine's {found['cores']} cores, the "
        "processor's seconds say more than the ratio of times.",
        columns(found["rows"], {
            "what": "{what}", "seconds": "{seconds:.1f}", "MiB/s": "{mib_s:.0f}",
            "time / cp": "{ratio:.2f}", "processor s": "{processor_s:.1f}",
            "peak memory MiB": lambda row: (
                "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}")})]


OPTIONS = {
    "gib": Option(4.0, "size", quick=0.1), "rounds": Option(3, "of each command", quick=1),
    "scratch": Option("", "where the checkpoints are (default: here)"),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.scratch or Path.cwd()) as home:
        size = write_checkpoint(Path(home) / "source", args.gib)
        rows = compare(Path(home), size, args.rounds)
    return {"bytes": size, "rounds": args.rounds, "rows": rows,
            "checksums": checksums.crc32.__module__}
