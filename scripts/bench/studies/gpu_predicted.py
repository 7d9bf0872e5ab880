"""What the benchmark's three layers can reach on a GPU, predicted from the launches of a step, from
what the compiler makes of them, and from published rates; before and after a change.

Bytes, FLOPs, tiles and launches are counted from a step on torch's meta device.
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
OPTIONS = {"state": Option("after", "of the code: a heading of the page"),
           "target": Option("sm_90", "the GPU", choices=GPUS),
           "code": Option("", "what is compiled, e.g. a commit: it is on the page"),
           "problems": Option(len(LAYERS["cuda"]), "of the benchmark's layers, from the first",
                              quick=1)}
AIM = (0.85, 0.70, 0.70)
READ = (
    "Predicted, not measured. A kernel takes at least its FLOPs at the data sheet's dense rate "
    "over the share of its last wave and of its tiles that works, and at least its bytes at the "
    "data sheet's bandwidth: each tensor that it is given, buffers of parts in full, once. Kernels "
    "follow each other, nothing overlaps, loads are even. The bound is the time of the products' "
    "FLOPs at the dense rate over the sum of these times: what no measurement will exceed, with "
    "launches themselves and all that the rates leave out (latencies, clocks under load, bank "
    "conflicts, gathered rows that are read again) still to be subtracted. `code`: git's tree of a "
    "folder, whose launches these are."
)


def flops(call: Call) -> int:
    """Of a product; 0 for other kernels."""
    fixed, shapes = dict(call.launch.constants), call.shapes
    pair = 2 if fixed.get("PAIR") not in (None, False, "none") else 1
    if "K" in fixed and "w" in shapes:
        rows, wide = shapes["out" if "out" in shapes else "grad_h"]
        return 2 * pair * rows * wide * fixed["K"]
    if call.launch.kernel == "weight_kernel":
        return 2 * pair * _rows(call) * fixed["I"] * fixed["O"]
    return 0


def _rows(call: Call) -> int:
    """Of all experts: of the operand of a weight gradient that is not gathered."""
    fixed = dict(call.launch.constants)
    return call.shapes["grad" if fixed["X_GATHER"] else "x"][0]


def used(call: Call, gpu: GPU, blocks: int) -> float:
    """Share of a product's time and tiles that works: the last wave, rows and columns."""
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
    """States are kept by name."""
    return {**new, "states": old["states"] | new["states"]}


def bound(layer: Mapping[str, Any], gpu: GPU) -> float:
    """Share of the dense rate that is not excluded."""
    dense = sum(row["flops"] for row in layer["rows"]) / (gpu.tflops * 1e12)
    return dense / (sum(row["seconds"] for row in layer["rows"]) + layer["operation_seconds"])


def _moved(layer: Mapping[str, Any]) -> int:
    return layer["operation_bytes"] + sum(row["bytes"] for row in layer["rows"])


def body(found: dict[str, Any]) -> Iterator[str]:
    states = found["states"]
    gpu = GPUS[next(iter(states.values()))["target"]]
    yield (f"{gpu.name}: {gpu.tflops:g} TFLOP/s dense bf16 and {gpu.tbytes:g} TB/s, from the data "
           f"sheet; {gpu.processors} multiprocessors. Triton "
           f"{', '.join(sorted({one['triton'] for one in states.values()}))}.")
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
                "used": lambda r: f"{r['used']:.0%}" if r["flops"] else "",
                "at least": lambda r: show_time(r["seconds"])})
