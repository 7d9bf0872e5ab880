"""Predict how fast the benchmark's three layers can be on a GPU, before and after a change of the
code. The prediction uses the launches of a step, the compiled kernels and published peak rates.

Bytes, FLOPs, tiles and launches are counted during a step on torch's meta device.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from scripts.bench.launches import Call, recorded, step
from scripts.bench.report import columns, page
from scripts.bench.resources import GPU, GPUS, compile_for
from scripts.bench.studies.layers import LAYERS
from scripts.bench.study import Option

TITLE = "One GPU, predicted"
OPTIONS = {"state": Option("after", "name of this state of the code, a heading of the page"),
           "target": Option("sm_90", "GPU to compile for", choices=GPUS),
           "code": Option("", "identifier of the compiled code for the page, such as a commit"),
           "problems": Option(len(LAYERS["cuda"]), "number of the benchmark's layers to predict",
                              quick=1)}
AIM = (0.85, 0.70, 0.70)


def flops(call: Call) -> int:
    """Return the FLOPs of a matmul kernel, or 0 for any other kernel."""
    fixed, shapes = dict(call.launch.constants), call.shapes
    pair = 2 if fixed.get("PAIR") not in (None, False, "none") else 1
    if "K" in fixed and "w" in shapes:
        rows, wide = shapes["out" if "out" in shapes else "grad_h"]
        return 2 * pair * rows * wide * fixed["K"]
    if call.launch.kernel == "weight_kernel":
        return 2 * pair * _rows(call) * fixed["I"] * fixed["O"]
    return 0


def _rows(call: Call) -> int:
    """Return the total number of rows of all experts, read from the ungathered operand of a weight
    gradient.
    """
    fixed = dict(call.launch.constants)
    return call.shapes["grad" if fixed["X_GATHER"] else "x"][0]


def used(call: Call, gpu: GPU, blocks: int) -> float:
    """Return the fraction of a matmul's time that does useful work. The last wave of blocks, and
    the last tiles along rows and columns, are only partly filled.
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
    """Merge the results for different states of the code."""
    return {**new, "states": old["states"] | new["states"]}


def bound(layer: Mapping[str, Any], gpu: GPU) -> float:
    """Return the largest fraction of the peak dense rate that a layer can reach."""
    dense = sum(row["flops"] for row in layer["rows"]) / (gpu.tflops * 1e12)
    return dense / (sum(row["seconds"] for row in layer["rows"]) + layer["operation_seconds"])


def body(found: dict[str, Any]) -> list[str]:
    states = found["states"]
    gpu = GPUS[next(iter(states.values()))["target"]]
    labels = list(dict.fromkeys(one["label"] for state in states.values()
                                for one in state["layers"]))
    cells = [{
        **one, "state": name, "code": state.get("code"),
        "bytes": one["operation_bytes"] + sum(row["bytes"] for row in one["rows"]),
        "flops": sum(row["flops"] for row in one["rows"]), "bound": bound(one, gpu),
        "aim": AIM[labels.index(label)]}
        for label in labels for name, state in states.items() for one in state["layers"]
        if one["label"] == label]
    return page(
        __name__, found, gpu=gpu, cells=cells,
        triton=", ".join(sorted({one["triton"] for one in states.values()})),
        tables=[part for one in cells for part in (f"## {one['label']}, {one['state']}",
                                                   _kernels(one))])


def _kernels(layer: Mapping[str, Any]) -> str:
    rows = [*layer["rows"], {
        "label": f"{layer['operations']} operations of torch", "flops": 0,
        "bytes": layer["operation_bytes"], "seconds": layer["operation_seconds"]}]
    empty = dict.fromkeys(("programs", "registers", "shared", "occupancy", "used"))
    return columns([{**empty, **row, "flops": row["flops"] or None,
                     "used": row["used"] if row["flops"] else None} for row in rows], {
        "launch": "{label}", "TFLOP": "{flops:tera.2}", "MB": "{bytes:MB,.1}",
        "programs": "{programs}", "registers": "{registers}", "shared bytes": "{shared}",
        "occupancy": "{occupancy:.0%}", "useful": "{used:.0%}", "at least": "{seconds:time}"})
