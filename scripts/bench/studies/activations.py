"""Measure the time and memory of training steps with different policies for activations. A policy
keeps, recomputes or swaps all activations, or chooses one of these options for each block.

The policies run alternately, so that background noise affects all of them equally. Memory is
measured in a separate process for each policy, because the resident memory of a process rarely
shrinks. Activations are swapped to a file whose bandwidth is limited by an option. The study takes
about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from statistics import median
from typing import Any

import torch
from torch import nn

from moe_plugin import MoELayer
from moe_plugin.cli.measure.traced_layers import AliveBytes
from moe_plugin.config import from_dict
from moe_plugin.memory.activations.auto import MEASURING, manage
from moe_plugin.planner.trials import Steady
from moe_plugin.utils.machine import cpu_name
from scripts.bench.child import call, status_bytes
from scripts.bench.report import page
from scripts.bench.study import Option
from scripts.bench.sweep import alternate
from scripts.bench.toy import ToyBlock

TITLE = "Activations kept, recomputed or swapped"
DIM, HIDDEN, EXPERTS, TOKENS = 256, 1024, 4, 512
WAYS = ("keep", "recompute", "swap", "auto")
WARM_UP = len(MEASURING) + Steady.most
# lets malloc return freed tensors to the system, so that the resident set contains only used memory
RETURNS = {"MALLOC_MMAP_THRESHOLD_": "65536"}
OPTIONS = {
    "blocks": Option(8, "number of blocks of the model", quick=4),
    "throttle": Option(200.0, "bandwidth of the file in MB/s", quick=2000.0),
    "steps": Option(7, "timed steps of each policy", quick=2),
    "folder": Option("", "folder on a disk for the file (default: the folder of temporary files)"),
}


class PolicyRun:
    def __init__(self, args: argparse.Namespace, way: str, memory: int, folder: str) -> None:
        torch.manual_seed(0)
        settings = {"model_dim": DIM, "num_experts": EXPERTS, "experts": {"hidden_dim": HIDDEN}}
        self.model = nn.Sequential(*(ToyBlock(MoELayer(from_dict(settings)))
                                     for _ in range(args.blocks)))
        self.activations = manage(list(self.model), way, memory=memory if way == "auto" else None,
                                  folder=folder, throttle=1e6 * args.throttle)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.x_BSD = torch.randn(1, TOKENS, DIM)
        self.losses: list[float] = []
        self.peak = 0

    def step(self) -> float:
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.model(self.x_BSD).square().mean()
        loss.backward()
        self.optimizer.step()
        seconds = time.perf_counter() - started
        self.losses.append(loss.item())
        self.peak = self.activations.ledger.peak
        self.activations.after_step()
        return seconds


def times(args: argparse.Namespace, memory: int, folder: str) -> dict[str, Any]:
    """Return the median step time of each policy in seconds, and the choices of `auto`."""
    runs = {way: PolicyRun(args, way, memory, folder) for way in WAYS}
    seconds = alternate({way: run.step for way, run in runs.items()}, args.steps, WARM_UP)
    auto = runs["auto"].activations
    if any(run.losses != runs["keep"].losses for run in runs.values()):
        raise SystemExit("The losses of the policies differ, but they must be bitwise equal.")
    return {
        "seconds": {way: median(found) for way, found in seconds.items()},
        "all_seconds": seconds,
        "policies": list(auto.policies), "predicted_s": auto.decision.seconds,
        "keep_bytes": sum(block.activation_bytes for block in auto.profile.blocks),
    }


def memory(args: argparse.Namespace, way: str, most: int, folder: str) -> dict[str, Any]:
    run = PolicyRun(args, way, most, folder)
    before = status_bytes("VmRSS")
    for _ in range(WARM_UP + 1):
        run.step()
    # The peak is that of all steps: allocators retain freed memory, so the first peak would hide
    # later ones.
    found = {"ledger_bytes": run.peak, "resident_bytes": status_bytes("VmHWM") - before}
    with AliveBytes() as alive:
        alive.leave_out(run.model.parameters())
        alive.leave_out(p.grad for p in run.model.parameters())
        run.model(run.x_BSD).square().mean().backward()
    return {**found, "alive_bytes": alive.peak}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    # auto gets half of the memory that keeping all activations needs
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
        probe = PolicyRun(args, "auto", 1 << 40, folder)
        for _ in range(WARM_UP):
            probe.step()
        everything = sum(b.activation_bytes for b in probe.activations.profile.blocks)
        probe.activations.release()
        limit = everything // 2
        timed = call(times, args, limit, folder, environment=RETURNS)
        rows = {way: call(memory, args, way, limit, folder, environment=RETURNS) for way in WAYS}
    return {"machine": cpu_name(), "torch": torch.__version__, "throttle_MB_s": args.throttle,
            "steps": args.steps, "blocks": args.blocks, "tokens": TOKENS, "model_dim": DIM,
            "hidden_dim": HIDDEN, "experts": EXPERTS,
            "keep_bytes": everything, "limit_bytes": limit, **timed, "memory": rows}


def body(result: dict[str, Any]) -> list[str]:
    seconds, memory = result["seconds"], result["memory"]
    faster, slower = sorted((seconds["recompute"], seconds["swap"]))
    chosen = sorted(Counter(result["policies"]).items())
    names = {"keep": "keep all", "recompute": "recompute all", "swap": "swap all",
             "auto": "auto: " + ", ".join(f"{n} {name}" for name, n in chosen)}
    # The ledger counts only swapped activations and those of auto. The bytes of `keep` come from
    # the profile of auto, and for `recompute` there is no number.
    ledger = {"keep": result["keep_bytes"], "recompute": None,
              **{way: memory[way]["ledger_bytes"] for way in ("swap", "auto")}}
    return page(__name__, result, auto=seconds["auto"], faster=faster, slower=slower, ways=[
        {**memory[way], "policy": names[way], "seconds": seconds[way], "ledger": ledger[way]}
        for way in WAYS])
