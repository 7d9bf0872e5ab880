"""Time and memory of a training step that keeps, recomputes, swaps, or chooses by block.

Steps of all policies are timed by turns, so that all see the same machine. Memory is measured in a
process for each, because the resident set of a process rarely shrinks. The tier is a file, whose
bandwidth a throttle states. On two cores this takes about two minutes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_plugin import MoELayer
from moe_plugin.cli.figures import columns
from moe_plugin.config import from_dict
from moe_plugin.memory.activations.auto import MEASURING, manage
from moe_plugin.planner.trials import Steady
from moe_plugin.planner.units import show_size, show_time
from moe_plugin.utils.machine import cpu_name
from scripts.bench.child import call
from scripts.bench.memory_limit import status_bytes
from scripts.bench.study import Option
from scripts.bench.toy import ToyBlock

TITLE = "Activations kept, recomputed, swapped"
DIM, HIDDEN, EXPERTS, TOKENS = 256, 1024, 4, 512
WAYS = ("keep", "recompute", "swap", "auto")
MIB, WARM_UP = 1 << 20, len(MEASURING) + Steady.most
# freed tensors go back to the system, so that the resident set is what is in use
RETURNS = {"MALLOC_MMAP_THRESHOLD_": "65536"}
OPTIONS = {
    "blocks": Option(8, "of the model", quick=4),
    "throttle": Option(200.0, "MB/s of the tier", quick=2000.0),
    "steps": Option(7, "timed steps of each policy", quick=2),
    "folder": Option("", "on a disk; left out: that for temporary files"),
}


class AliveBytes(TorchDispatchMode):
    """Bytes of the storages that operators make while this is on, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        """Count what an operator returns."""
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        return result

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these, which are there all the time."""
        self._seen |= {x.untyped_storage()._cdata for x in tensors}

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes


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
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak = 0

    def step(self) -> None:
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.model(self.x_BSD).square().mean()
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss.item())
        self.peak = self.activations.ledger.peak
        self.activations.after_step()


def times(args: argparse.Namespace, memory: int, folder: str) -> dict[str, Any]:
    """Median seconds of a step by policy; what auto chose."""
    runs = {way: PolicyRun(args, way, memory, folder) for way in WAYS}
    for number in range(WARM_UP + args.steps):
        for run in runs.values():
            if number == WARM_UP:
                run.seconds.clear()
            run.step()
    auto = runs["auto"].activations
    if any(run.losses != runs["keep"].losses for run in runs.values()):
        raise SystemExit("losses differ between policies")
    return {
        "seconds": {way: median(run.seconds) for way, run in runs.items()},
        "all_seconds": {way: run.seconds for way, run in runs.items()},
        "policies": list(auto.policies), "predicted_s": auto.decision.seconds,
        "keep_bytes": sum(block.activation_bytes for block in auto.profile.blocks),
    }


def memory(args: argparse.Namespace, way: str, most: int, folder: str) -> dict[str, Any]:
    run = PolicyRun(args, way, most, folder)
    before = status_bytes("VmRSS")
    for _ in range(WARM_UP + 1):
        run.step()
    # of all steps: allocators keep what was freed, so that later peaks are hidden by the first
    found = {"ledger_bytes": run.peak, "resident_bytes": status_bytes("VmHWM") - before}
    with AliveBytes() as alive:
        alive.leave_out(run.model.parameters())
        alive.leave_out(p.grad for p in run.model.parameters())
        run.model(run.x_BSD).square().mean().backward()
    return {**found, "alive_bytes": alive.peak}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    # auto has half of what keeping everything takes
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
    others = sorted((seconds["recompute"], seconds["swap"]))
    chosen = Counter(result["policies"])
    names = {"keep": "keep all", "recompute": "recompute all", "swap": "swap all",
             "auto": "auto: " + ", ".join(f"{n} {name}" for name, n in sorted(chosen.items()))}
    # what is kept and recomputed is counted from a profile, which auto alone has
    ledger = {"keep": result["keep_bytes"], "recompute": None,
              **{way: memory[way]["ledger_bytes"] for way in ("swap", "auto")}}
    return [
        f"{result['blocks']} blocks (attention and {result['experts']} experts, width "
        f"{result['model_dim']}, inner width {result['hidden_dim']}, k = 2), "
        f"{result['tokens']:,} tokens, float32, one thread of {result['machine']}, torch "
        f"{result['torch']}. The tier is a file, throttled to {result['throttle_MB_s']:g} MB/s. "
        f"Median of {result['steps']} steps, all policies by turns. Losses of all policies are "
        "equal, bit for bit.",
        columns(WAYS, {
            "policy": names.get, "step, ms": lambda way: f"{1e3 * seconds[way]:.0f}",
            "activations, MiB": lambda way: (
                "" if ledger[way] is None else f"{ledger[way] / MIB:.1f}"),
            "tensors alive, MiB": lambda way: f"{memory[way]['alive_bytes'] / MIB:.0f}",
            "resident, MiB": lambda way: f"{memory[way]['resident_bytes'] / MIB:.0f}"}),
        "Activations: the most that the ledger counted. Tensors alive: the most of all tensors "
        "that forward and backward make, temporary ones and gradients included, without the "
        "weights and the gradients that they add to. Resident: the peak of the process's resident "
        "set over all its steps, those that measure included, above what it was before the first "
        "one; gradients of the weights are in it. Both hold what the expert layers keep on a CPU "
        "for the next call, which is one set for all layers.",
        f"Auto may take {show_size(result['limit_bytes'])}, half of keeping all. Its step was "
        f"predicted to take {show_time(result['predicted_s'])}. It takes "
        f"{seconds['auto'] / others[0]:.2f} times as long as the better of recomputing all and "
        f"swapping all, and the other takes {others[1] / seconds['auto']:.2f} times as long as it."]
