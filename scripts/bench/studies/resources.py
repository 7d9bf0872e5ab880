"""What every launch of the layer needs of seven GPUs, compiled without one, and the rules that its
machine code keeps.

Launches are recorded from whole steps: the benchmark's three layers on a GPU, and a layer for each
setting that launches others. An hour on one core for all of them; Triton caches its results. With
another Triton in the path its launches are compiled: rows of all versions are on one page.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

import torch

from moe_plugin.cli import figures
from moe_plugin.kernels import kernels
from moe_plugin.messages import short
from scripts.bench import report
from scripts.bench.chips import GPU, GPUS
from scripts.bench.launches import META, Launch, recorded, step
from scripts.bench.resources import compile_for
from scripts.bench.studies.layers import LAYERS
from scripts.bench.study import DATA, Option

PAGE = "resources.md"  # and one for each GPU, `page_of`
LARGE, FINE, WIDE = LAYERS["cuda"]
SETS = ("benchmark", "settings")
OPTIONS = {"targets": Option(tuple(GPUS), "GPUs", quick=("sm_90",), choices=GPUS),
           "launches": Option(SETS, "of the benchmark's layers, and of other settings",
                              quick=SETS[:1], choices=SETS),
           "code": Option("", "what is compiled, e.g. a commit: it is on the page"),
           "jobs": Option(2, "processes")}
TITLE = "What the kernels need of a GPU"
READ = (
    "Not measured on a GPU: what the compiler reports. `blocks`: programs that a multiprocessor "
    "runs at once by registers, shared memory and warps; `occupancy`: their warps over the most "
    "that it can have. A product of large tiles wants few blocks and many registers: its loads "
    "are hidden by the pipeline's stages, not by other warps. `matrix units` and `copies`: the "
    "instructions found in the assembly (TMA: cp.async.bulk.tensor). `buffers`: tiles of an "
    "operand in shared memory, of `stages` asked for. In a launch's name: its dtype, its flags "
    "that are on, its sizes known when it is compiled."
)
RULES = (
    "Rules: it compiles; no register is spilled; shared memory is what the GPU has for a block; "
    "wgmma reads both operands from shared memory; a product has as many buffers as stages, or, "
    "where the matrix units read registers (mma.sync, MFMA) or tf32 is turned, one less; rows that "
    "are looked up in the loop take two stages a buffer. In the table: launches compiled, and how "
    "many break a rule. `code`: git's tree of a folder, whose launches these are; in brackets, if "
    "it is not that of the row. Empty: not compiled with this code. Triton brings a linker for "
    "AMD's GPUs from 3.5 on; with 3.2 and 3.3 the layer takes torch's matmuls above compute "
    "capability 8.0."
)


def layers(gpu: GPU, sets: tuple[str, ...] = SETS) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, what launches) of everything that is compiled for a GPU."""
    if "benchmark" in sets:
        for problem in LAYERS["cuda"]:
            yield problem.label(), step(problem)
    if "settings" in sets:
        yield from _settings(gpu)


def _settings(gpu: GPU) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "few rows", step(replace(LARGE, tokens=128))
    yield "few rows, gated", step(replace(FINE, tokens=512))
    for problem in (LARGE, FINE):
        yield f"main_grad{', gated' * problem.gated}", step(problem, adds=True)
    yield "padded, biases", step(
        replace(LARGE, dtype="float16"), experts={"bias": True},
        dispatch={"name": "padded", "capacity_factor": 1.25})
    yield "odd widths", step(replace(FINE, tokens=4099, model_dim=1001, hidden_dim=711,
                                     experts=61), experts={"bias": True})
    single = replace(WIDE, dtype="float32")
    yield "float32", step(single)
    if gpu.backend == "cuda":  # refused elsewhere
        yield "TF32", step(single, experts={"precision": "tf32"})
    if gpu.fp8:
        yield "fp8", step(FINE, experts={"precision": "fp8"})
    yield "512 experts", step(replace(WIDE, experts=512, top_k=8))
    yield "sigmoid, groups", step(replace(WIDE, experts=256, top_k=8), losses={"z": 1e-3}, router={
        "name": "sigmoid_bias", "groups": 8, "group_top_k": 4})
    yield "operations", partial(_operations, gpu.fp8)


def _operations(fp8: bool) -> None:
    """Those that one rank's layer does not launch: of exchanges and of pages."""
    t, k, d = WIDE.tokens, WIDE.top_k, WIDE.model_dim

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    rows_RD, source_R = new(t * k, d), new(t * k, dtype=torch.int64)
    position_TK, scales = new(t, k, dtype=torch.int64), new(t * k, d // 128, dtype=torch.float32)
    record_M, pages_SP = new(64, dtype=torch.int64), new(65, 1 << 20)
    for name, *args in (
            ("transpose_chunks", rows_RD, 4, 2), ("dot_rows", new(t, d), rows_RD, position_TK),
            ("take_rows", new(t, d), source_R, k, None),
            *((("quantize_fp8", rows_RD, 128), ("dequantize_fp8", rows_RD.to(torch.float8_e4m3fn),
                                                scales, 128, torch.bfloat16)) if fp8 else ()),
            ("write_pages", rows_RD.view(-1), record_M, pages_SP, pages_SP),
            ("read_pages", record_M, pages_SP, pages_SP, t * k * d, new(dtype=torch.bool))):
        kernels.get(name).implementation("triton")(*args)


def launches(target: str, sets: tuple[str, ...] = SETS) -> dict[Launch, str]:
    """All that are compiled for a target, each with the layer that first makes it."""
    found: dict[Launch, str] = {}
    for name, run in layers(GPUS[target], sets):
        for call in recorded(run, GPUS[target].chip).calls:
            found.setdefault(call.launch, name)
    return found


def row(launch: Launch, target: str) -> dict[str, Any]:
    """What is found of one launch; `failed`: the rules that it breaks."""
    try:
        found = compile_for(launch, target)
    except Exception as error:  # whatever a compiler raises
        return {"label": launch.label, "failed": [f"does not compile: {_reason(error)}"]}
    return {**asdict(found), "failed": list(found.failed(GPUS[target]))}


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return short(next((line for line in lines if "ptxas fatal" in line), lines[-1]))


def rows(target: str, wanted: Mapping[Launch, str], jobs: int) -> Iterator[dict[str, Any]]:
    """A row for each launch, in order. A compiler may end its process: that is a row, too."""
    left = list(wanted)
    while left:
        with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
            try:
                for future in [pool.submit(row, launch, target) for launch in left]:
                    made = future.result()
                    yield {**made, "from": wanted[left.pop(0)]}
            except BrokenProcessPool:
                if jobs == 1:  # it was the first that is left
                    launch = left.pop(0)
                    yield {"label": launch.label, "from": wanted[launch],
                           "failed": ["does not compile: the compiler ended its process"]}
                jobs = 1


def measure(args: argparse.Namespace) -> dict[str, Any]:
    sets, found = tuple(args.launches), {}
    for target in args.targets:
        made = list(rows(target, launches(target, sets), args.jobs))
        found[target] = {"number": len(made), "code": args.code, "rows": made}
    return {"triton": {version("triton"): found}}


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Targets of a version are replaced; of older versions the rows that fail stay."""
    versions = {name: dict(targets) for name, targets in old["triton"].items()}
    for name, targets in new["triton"].items():
        versions[name] = versions.get(name, {}) | targets
    *older, newest = sorted(versions, key=_parts)
    kept = {name: {target: {**one, "rows": [each for each in one["rows"] if each["failed"]]}
                   for target, one in versions[name].items()} for name in older}
    return {**new, "triton": {**kept, newest: versions[newest]}}


def _parts(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".")[:3])


def body(found: dict[str, Any]) -> Iterator[str]:
    versions = found["triton"]
    yield f"Triton {', '.join(versions)}."
    yield READ
    yield RULES
    newest = versions[list(versions)[-1]]
    yield figures.columns(GPUS, {
        "GPU": lambda target: GPUS[target].name,
        "kernels": lambda target: f"[{target}]({page_of(target)})" if target in newest else target,
        "code": lambda target: newest.get(target, {}).get("code", ""),
        **{f"Triton {name}": lambda target, of=targets: _counted(
            of.get(target), newest.get(target, {}).get("code", "")) for name, targets in
            versions.items()}})
    broken = _broken(versions)
    if broken:
        yield "## Rules that are broken"
        yield figures.columns(broken.items(), {
            "launch": lambda item: item[0][0], "rule": lambda item: item[0][1],
            "where": lambda item: "; ".join(
                f"{target}: {', '.join(names)}" for target, names in item[1].items())})


def _counted(one: dict[str, Any] | None, code: str) -> str:
    if one is None:
        return ""
    bad = sum(bool(row["failed"]) for row in one["rows"])
    own = one.get("code", "")
    other = f" ({own})" * (own != code)
    return f"{one['number']}" + f", {bad} break a rule" * bool(bad) + other


def _broken(versions: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, list[str]]]:
    """Versions by target, by launch and rule."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, targets in versions.items():
        for target, one in targets.items():
            none = one["number"] == sum(
                each["failed"][:1] != [] and each["failed"][0].startswith("does not compile")
                for each in one["rows"])
            for each in one["rows"][:1] if none else one["rows"]:
                for why in each["failed"]:
                    label = "all launches" if none else each["label"]
                    where = found.setdefault((label, why), {}).setdefault(target, [])
                    if name not in where:
                        where.append(name)
    return found


def page_of(target: str) -> str:
    """Name of the page of one GPU's kernels."""
    return f"{DATA}/resources_{target}.md"


def pages(found: dict[str, Any]) -> dict[str, str]:
    """The newest version's rows."""
    name = list(found["triton"])[-1]
    return {page_of(target): report.document(
        f"# {TITLE}: {GPUS[target].name}",
        f"Made by `moe-plugin bench resources`. Triton {name}, {target}.",
        f"[What the columns mean](../{PAGE}).", figures.columns(one["rows"], {
            "launch": "{label}", "of": "{from}", **{
                head: lambda row, of=of: "" if row.get(of) is None else str(row[of])
                for head, of in (
                    ("registers", "registers"), ("spilled bytes", "spilled"),
                    ("shared bytes", "shared"), ("blocks", "blocks"), ("matrix units", "matrix"))},
            "occupancy": lambda row: f"{row['occupancy']:.0%}" if "occupancy" in row else "",
            "stages": lambda row: str(row.get("stages") or ""),
            "buffers": lambda row: str(row.get("buffers") or ""),
            "copies": lambda row: "TMA" if row.get("copies") else "",
            "breaks": lambda row: "; ".join(row["failed"])}))
        for target, one in found["triton"][name].items()}
