"""Predict how fast the benchmark's three layers can be on a GPU, from the launches of a step, the
compiled kernels and published rates, before and after a change of the code.

Bytes, FLOPs, tiles and launches are counted in a step on torch's meta device.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from moe_plugin.cli import figures
from moe_plugin.planner.units import show_time
from scripts.bench.chips import GPU, GPUS
from scripts.bench.launches import Call, recorded, step
from scripts.bench.resources import compile_for
from scripts.bench.studies.layers import LAYERS
from scripts.bench.study import Option

TITLE = "One GPU, predicted"
OPTIONS = {"state": Option("after", "name of this state of the code, a heading of the page"),
           "target": Option("sm_90", "GPU to compile for", choices=GPUS),
           "code": Option("", "identifier of the compiled code for the page, such as a commit"),
           "problems": Option(len(LAYERS["cuda"]), "number of the benchmark's layers to predict",
                              quick=1)}
AIM = (0.85, 0.70, 0.70)
READ = (
    "These numbers are predicted, not measured. The prediction computes a lower bound of the time "
    "of each kernel. The bound is the larger of two times. The first one is the kernel's FLOPs at "
    "the dense rate, divided by the share of the last wave and of the tiles that does useful work. "
    "The second one is the kernel's bytes at the memory bandwidth, with each argument counted "
    "once. Kernels run one after the other without overlap, and all experts have equal loads. The "
    "*bound of the dense rate* is the time of all matmuls at the dense rate divided by the sum of "
    "these times. A measurement cannot exceed this bound. A measurement will be lower, because the "
    "prediction leaves out the launches, latencies, clocks under load, bank conflicts and gathered "
    "rows that are read again. *Code* is the identifier of the compiled source tree in git."
)


def flops(call: Call) -> int:
    """Return the FLOPs of a matmul, or 0 for other kernels."""
    fixed, shapes = dict(call.launch.constants), call.shapes
    pair = 2 if fixed.get("PAIR") not in (None, False, "none") else 1
    if "K" in fixed and "w" in shapes:
        rows, wide = shapes["out" if "out" in shapes else "grad_h"]
        return 2 * pair * rows * wide * fixed["K"]
    if call.launch.kernel == "weight_kernel":
        return 2 * pair * _rows(call) * fixed["I"] * fixed["O"]
    return 0


def _rows(call: Call) -> int:
    """Return the rows of all experts, from the operand of a weight gradient that is not gathered.
    """
    fixed = dict(call.launch.constants)
    return call.shapes["grad" if fixed["X_GATHER"] else "x"][0]


def used(call: Call, gpu: GPU, blocks: int) -> float:
    """Return the share of a matmul's time that does useful work, from its last wave, rows and
    columns.
    """
    fixed, groups = dict(call.launch.constants), call.shapes["ends"][0]
    if call.launch.kernel == "weight_kernel":
        tile_i, tile_o = (math.ceil(fixed[n] / fixed[f"B{n}"]) for n in ("I", "O"))
        rows, height = _rows(call) / groups, call.numbers["height"]
        parts = math.ceil(rows / height) if height else 1
        tiles = groups * tile_i * tile_o * parts
        filled = fixed["I"] * fixed["O"] / (tile_i * fixed["BI"] * tile_o * fixed["BO"])
    else:
        rows, wide = call.shapes["out" if "out" in call.shapes else "grad_h"]
        high = fixed["BM"] * math.ceil(rows / groups / fixed["BM"])
        columns = fixed.get("BN", fixed.get("BLOCK"))
        across = columns * math.ceil(wide / columns)
        tiles = groups * high // fixed["BM"] * across // columns
        filled = rows / groups * wide / (high * across)
    waves = tiles / (gpu.processors * max(1, blocks))
    return waves / math.ceil(waves) * filled


def measure(args: argparse.Namespace) -> dict[str, Any]:
    made = [_layer(problem, args.target) for problem in LAYERS["cuda"][:args.problems]]
    return {"states": {args.state: {"target": args.target, "triton": version("triton"),
                                    "code": args.code, "layers": made}}}


def _layer(problem: Any, target: str) -> dict[str, Any]:
    gpu = GPUS[target]
    found, rows = recorded(step(problem), gpu.chip), []
    compiled = {call.launch: compile_for(call.launch, target) for call in found.calls}
    for call in found.calls:
        r, work = compiled[call.launch], flops(call)
        share = used(call, gpu, r.blocks) if work else 1.0
        seconds = max(work / (gpu.tflops * 1e12 * share), call.bytes / (gpu.tbytes * 1e12))
        rows.append({"label": r.label, "flops": work, "bytes": call.bytes,
                     "programs": call.programs, "registers": r.registers, "shared": r.shared,
                     "occupancy": r.occupancy, "used": share, "seconds": seconds})
    moved = sum(size for _, size in found.operations)
    return {"label": problem.label(), "rows": rows, "operations": len(found.operations),
            "operation_bytes": moved, "operation_seconds": moved / (gpu.tbytes * 1e12)}


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merge states by name."""
    return {**new, "states": old["states"] | new["states"]}


def bound(layer: Mapping[str, Any], gpu: GPU) -> float:
    """Return the share of the dense rate that a layer can reach at most."""
    dense = sum(row["flops"] for row in layer["rows"]) / (gpu.tflops * 1e12)
    return dense / (sum(row["seconds"] for row in layer["rows"]) + layer["operation_seconds"])


def _moved(layer: Mapping[str, Any]) -> int:
    return layer["operation_bytes"] + sum(row["bytes"] for row in layer["rows"])


def body(found: dict[str, Any]) -> Iterator[str]:
    states = found["states"]
    gpu = GPUS[next(iter(states.values()))["target"]]
    yield (f"This page predicts how fast the layers of the benchmark can be on an {gpu.name}. Its "
           f"data sheet states {gpu.tflops:g} TFLOP/s for dense bf16 matmuls, {gpu.tbytes:g} TB/s "
           f"of memory bandwidth and {gpu.processors} multiprocessors. The kernels were compiled "
           f"by Triton {', '.join(sorted({one['triton'] for one in states.values()}))}.")
    yield READ
    labels = list(dict.fromkeys(one["label"] for state in states.values()
                                for one in state["layers"]))
    cells = [(label, name, next(one for one in state["layers"] if one["label"] == label))
             for label in labels for name, state in states.items()
             if any(one["label"] == label for one in state["layers"])]
    yield figures.columns(cells, {
        "layer": lambda c: c[0], "state": lambda c: c[1],
        "code": lambda c: states[c[1]].get("code", ""),
        "Triton launches": lambda c: str(len(c[2]["rows"])),
        "operations of torch": lambda c: str(c[2]["operations"]),
        "TFLOP": lambda c: f"{sum(row['flops'] for row in c[2]['rows']) / 1e12:.2f}",
        "GB": lambda c: f"{_moved(c[2]) / 1e9:.1f}",
        "predicted bound of the dense rate": lambda c: f"{bound(c[2], gpu):.0%}",
        "aim": lambda c: f"{AIM[labels.index(c[0])]:.0%}"})
    yield ("The following tables list the kernels of each layer. *Useful* is the share of a "
           "matmul's tiles and last wave that does useful work. *At least* is the lower bound of "
           "the time.")
    for label, name, layer in cells:
        yield f"## {label}, {name}"
        yield figures.columns([*layer["rows"], {
            "label": f"{layer['operations']} operations of torch", "flops": 0,
            "bytes": layer["operation_bytes"], "seconds": layer["operation_seconds"]}], {
                "launch": "{label}",
                "TFLOP": lambda r: f"{r['flops'] / 1e12:.2f}" if r["flops"] else "",
                "MB": lambda r: f"{r['bytes'] / 1e6:,.1f}",
                **{head: lambda r, of=of: str(r.get(of, "")) for head, of in (
                    ("programs", "programs"), ("registers", "registers"),
                    ("shared bytes", "shared"))},
                "occupancy": lambda r: f"{r['occupancy']:.0%}" if "occupancy" in r else "",
                "useful": lambda r: f"{r['used']:.0%}" if r["flops"] else "",
                "at least": lambda r: show_time(r["seconds"])})
