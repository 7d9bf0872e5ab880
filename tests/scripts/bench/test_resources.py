"""Every launch of the layer is recorded without a GPU, compiles for each target, and needs no more
of it than it may; the products use the instructions that the target has for them.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.kernels import RowGroups, gpu, kernels
from moe_plugin.kernels.frozen import FROZEN_FORMATS, FrozenWeight
from moe_plugin.kernels.groups import SCHEDULES
from moe_plugin.kernels.triton_ops import no_schedule
from moe_plugin.records import RowCounts
from scripts.bench.launches import META, Launch, recorded, step
from scripts.bench.resources import GPU, GPUS, Resources, compile_for, compiled
from scripts.bench.studies.layers import LAYERS
from tests.kernels.interpreted import DTYPES
from tests.kernels.problems import SHAPES, arguments

pytest.importorskip("triton", reason="triton is not installed")
LARGE, FINE, WIDE = LAYERS["cuda"]
MATRIX = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "mfma"}


def every_launch(target: str) -> list[Launch]:
    """Everything that is compiled for a target: what the benchmark's three layers launch, a layer
    for each setting that launches others, and operations of exchanges and pages.
    """
    gpu = GPUS[target]
    runs = [*map(step, LAYERS["cuda"]), *_settings(gpu),
            functools.partial(_operations, gpu.fp8)]
    return list(dict.fromkeys(call.launch for run in runs
                              for call in recorded(run, gpu.chip).calls))


def _settings(gpu: GPU) -> Iterator[Callable[[], object]]:
    """Steps of a layer for each setting that launches others."""
    yield step(replace(LARGE, tokens=128))
    yield step(replace(FINE, tokens=512))
    for problem in (LARGE, FINE):
        yield step(problem, adds=True)
    yield step(replace(LARGE, dtype="float16"), experts={"bias": True},
               dispatch={"name": "padded", "capacity_factor": 1.25})
    yield step(replace(FINE, tokens=4099, model_dim=1001, hidden_dim=711, experts=61),
               experts={"bias": True})
    single = replace(WIDE, dtype="float32")
    yield step(single)
    if gpu.backend == "cuda":  # refused elsewhere
        yield step(single, experts={"precision": "tf32"})
    if gpu.fp8:
        yield step(FINE, experts={"precision": "fp8"})
    yield step(replace(WIDE, experts=512, top_k=8))
    yield step(replace(WIDE, experts=256, top_k=8), losses={"z": 1e-3}, router={
        "name": "sigmoid_bias", "groups": 8, "group_top_k": 4})


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
    for rows, (format, form), back in itertools.product((64, 4096), FROZEN_FORMATS.items(),
                                                        (False, True)):
        groups = RowGroups(RowCounts([rows] * 8), META)
        parts = [new(8, *shape, dtype=torch.uint8) for shape in form.shapes(2048, 1408)]
        kernels.get("expert_matmul_frozen").implementation("triton")(
            new(groups.total, 1408 if back else 2048), groups,
            FrozenWeight(format, tuple(parts), torch.bfloat16), back)


@functools.cache
def launches(target: str, *kernels_: str) -> list[Launch]:
    """Those of the benchmark's second layer."""
    calls = recorded(step(FINE), GPUS[target].chip).calls
    found = list(dict.fromkeys(call.launch for call in calls))
    return [launch for launch in found if not kernels_ or launch.kernel in kernels_]


def check(launch: Launch, target: str) -> Resources:
    """Compile within the rules."""
    r, gpu = compile_for(launch, target), GPUS[target]
    assert list(r.failed(gpu)) == [], r
    assert r.blocks >= 1, r
    product = "product" in launch.kernel or launch.kernel in ("act_backward_kernel",
                                                               "weight_kernel")
    # NVIDIA's matrix units multiply no float32 as it is; AMD's do
    exact = ("PRECISION", "ieee") in launch.constants and gpu.backend == "cuda" and (
        "*fp32" in dict(launch.types).get("x", dict(launch.types).get("grad", "")))
    assert bool(r.matrix) == (product and not exact), r
    assert not r.matrix or r.matrix == MATRIX.get(target, r.matrix), r
    return r


@pytest.mark.parametrize("kernel", ["product", "act_backward", "weight", ""])
def test_every_launch_of_a_layer_on_hopper(kernel: str) -> None:
    """Products, and all others."""
    for launch in launches("sm_90"):
        name = launch.kernel.removesuffix("_kernel")
        if name == kernel or not kernel and name not in ("product", "act_backward", "weight"):
            r = check(launch, "sm_90")
            assert r.copies == any(of.startswith("tensordesc") for _, of in launch.types)


@pytest.mark.parametrize(("target", "buffers"), [("sm_80", 3), ("sm_90", 4)])
def test_weight_gradients_have_as_many_buffers_as_a_gpu_takes(target: str, buffers: int) -> None:
    """Of rows that are gathered in the loop of the sum, of one gradient and of two; mma.sync reads
    one of them from registers, wgmma all from shared memory.
    """
    found = launches(target, "weight_kernel")
    assert {dict(launch.constants)["PAIR"] for launch in found} == {False, True}
    for launch in found:
        r = compile_for(launch, target)
        assert (r.buffers, r.spilled, r.through_registers[0]) == (buffers, 0, 0), r
        assert bool(r.through_registers[1]) == (target == "sm_90"), r


@pytest.mark.parametrize("target", [target for target in GPUS if target != "sm_90"])
def test_other_targets(target: str) -> None:
    """The product with most operands."""
    check(launches(target, "product_kernel")[0], target)


def test_sums_spill_nothing_because_their_registers_are_bounded() -> None:
    """A small float32 weight gradient, added to another, does without the bound: for the sake of
    one more program at once.
    """
    groups = RowGroups(RowCounts([4096] * 8), META)
    x, grad = (torch.empty(groups.total, width, device=META) for width in (256, 384))
    kernel = kernels.get("expert_weight_grad_add").implementation("triton")
    into = torch.empty(8, 256, 384, device=META)
    calls = recorded(lambda: kernel(x, grad, groups, None, None, "ieee", into),
                     GPUS["sm_100"].chip).calls
    [launch] = [call.launch for call in calls if call.launch.kernel == "weight_kernel"]
    check(launch, "sm_100")
    bare = replace(launch, options=tuple(one for one in launch.options if one[0] != "maxnreg"))
    assert bare != launch and compile_for(bare, "sm_100").spilled > 0


def machine_code(launch: Launch, target: str) -> str:
    """The instructions of a compiled kernel, by the disassembler that comes with Triton.

    Raises: FileNotFoundError: it is not there.
    """
    from triton.backends.nvidia import compiler

    tool = Path(compiler.__file__).parent / "bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled(launch, target).asm["cubin"])
        return subprocess.run([tool, "-sass", path], capture_output=True, text=True,
                              check=True).stdout


def test_machine_code_of_hopper() -> None:
    """What the assembler made of it: matrix instructions of a warp group, tile copies, and no local
    memory.
    """
    try:
        found = machine_code(launches("sm_90", "product_kernel")[1], "sm_90")
    except FileNotFoundError:
        pytest.skip("this Triton brings no disassembler")
    assert "HGMMA" in found and "UTMALDG" in found
    assert "LDL" not in found and "STL" not in found


@pytest.mark.slow
@pytest.mark.parametrize("target", list(GPUS))
def test_everything(target: str) -> None:
    for launch in every_launch(target):
        check(launch, target)


@pytest.mark.slow
@pytest.mark.parametrize("name", [e.name for e in kernels if "triton" in e.value.names()])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_everything_of_the_exactness_problems(name: str, target: str) -> None:
    """What their arguments are compiled to on a GPU, with its tiles, not the interpreter's."""
    for launch in dict.fromkeys(_exact(name, target)):
        check(launch, target)


def _exact(name: str, target: str) -> Iterator[Launch]:
    kernel = kernels.get(name).implementation("triton")
    for shape in SHAPES.values():
        for dtype in DTYPES[:1] if name.startswith("route_") else DTYPES:
            for args in arguments(name, shape, dtype):
                there = [_moved(value) for value in args]
                calls = recorded(lambda: kernel(*there), GPUS[target].chip).calls  # noqa: B023
                yield from (call.launch for call in calls)


def _moved(value: Any) -> Any:
    if isinstance(value, RowGroups):
        return replace(value, device=META)
    return value.to(META) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", ["take_rows", "expert_matmul_gated"])
def test_arguments_of_the_exactness_problems_are_compiled_for(name: str) -> None:
    """A width of 17 or 33 is no multiple of 16, an address inside a table is none of 16 bytes."""
    found = list(_exact(name, "sm_90"))
    assert len(set(found)) >= 8
    assert any(not {"width", "wide", "stride_k", "height"} & set(one.aligned) for one in found)


def test_every_kernel_is_compiled() -> None:
    """Each that host code launches: those of `kernels.gpu` that are called so."""
    folder = Path(gpu.__file__).parent
    launched = {name for path in folder.glob("*.py")
                for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    assert launched and {launch.kernel for launch in every_launch("sm_90")} >= launched


def test_a_recorded_launch_has_the_sizes_of_the_layer() -> None:
    found = recorded(step(FINE), GPUS["sm_90"].chip)
    first = next(call for call in found.calls if call.launch.kernel == "product_kernel")
    p = FINE
    assert first.shapes["x"] == (p.tokens, p.model_dim)
    assert first.shapes["w"] == (p.experts, p.model_dim, p.hidden_dim)
    assert first.shapes["out"] == (p.rows, p.hidden_dim)
    weights = 2 * p.experts * p.model_dim * p.hidden_dim
    rows = p.tokens * p.model_dim + 3 * p.rows * p.hidden_dim
    tables = first.bytes - 2 * (weights + rows)
    assert 8 * p.rows <= tables < 9 * p.rows, "tokens of the rows, and small tables"
    assert first.programs == GPUS["sm_90"].processors
    assert ("K", p.model_dim) in first.launch.constants and "wide" in first.launch.aligned
    assert ("stride_n", 1) in first.launch.constants


def test_products_beside_an_exchange_have_a_program_a_tile() -> None:
    """The exchange gets a processor when a tile ends, and not when the product does."""
    gpu, programs = GPUS["sm_90"], {}
    for beside in (False, True):
        groups = RowGroups(RowCounts([512] * 64), META, beside)
        x, w = torch.empty(1 << 15, 256, device=META), torch.empty(64, 256, 512, device=META)
        one = kernels.get("expert_matmul").implementation("triton")
        [call] = [call for call in recorded(lambda: one(x, groups, w, None, None, "tf32"),  # noqa: B023
                                            gpu.chip).calls if call.launch.kernel != "tile_kernel"]
        programs[beside] = call.programs
    assert programs[False] == gpu.processors
    assert programs[True] >= (1 << 15) // 128 * (512 // 128)


@functools.cache
def scheduled(target: str, name: str) -> list[Launch]:
    """Of products of rows in order, gated and plain, in a schedule."""
    groups = RowGroups(RowCounts([512] * 64), META, False, name)
    x, w = (torch.empty(shape, device=META, dtype=torch.bfloat16)
            for shape in ((1 << 15, 1024), (64, 1024, 512)))
    plain, gated = (kernels.get(op).implementation("triton")
                    for op in ("expert_matmul", "expert_matmul_gated"))

    def run() -> None:
        gated(x, groups, w, None, w, None, None, "silu", "ieee")
        plain(x, groups, w, None, None, "ieee")

    found = recorded(run, GPUS[target].chip).calls[-2:]
    return [call.launch for call in found]


@pytest.mark.parametrize("target,name", [
    ("sm_90", "split"), ("sm_100", "split"), ("sm_100", "specialized")])
def test_schedules_are_compiled(target: str, name: str) -> None:
    """Each within the rules, and each to something else than the usual one."""
    which = int(name == "specialized")
    usual, other = (scheduled(target, each)[which] for each in ("", name))
    check(other, target)
    made = compiled(other, target).asm
    assert compiled(usual, target).asm["ptx"] != made["ptx"]
    assert ("ttg.warp_specialize" in made["ttgir"]) == (name == "specialized")


def test_schedules_that_a_gpu_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {}
    for version, capability in (("3.2.0", (10, 0)), ("3.9.0", (9, 0)), ("3.9.0", (10, 0))):
        monkeypatch.setattr("triton.__version__", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        said[version, capability[0]] = {
            name: why for name, schedule in SCHEDULES.items()
            if (why := no_schedule.__wrapped__(schedule, torch.device("cuda", 0)))}
    assert said["3.2.0", 10] == {
        "specialized": "Triton 3.2.0 has no specialized warps; Triton 3.4 is needed"}
    [(name, why)] = said["3.9.0", 9].items()
    assert name == "specialized" and "has 9.0" in why
    assert not said["3.9.0", 10]


def test_parts_are_joined_by_programs_for_the_groups_that_have_some() -> None:
    """Of 64 experts: a grid of all their matrices would be 180,224 programs."""
    gpu = GPUS["sm_90"]
    joins = [call.programs for call in recorded(step(FINE), gpu.chip).calls
             if call.launch.kernel == "join_kernel"]
    assert len(joins) == 2 and max(joins) <= 16 * gpu.processors


def test_rules() -> None:
    gpu = GPUS["sm_90"]
    good = Resources("", 128, 0, 1 << 17, 1, 0.1, "wgmma", True, 3, 3, (0, 8))
    assert list(good.failed(gpu)) == []
    for change, why in (
            ({"spilled": 8}, "8 bytes spilled"), ({"registers": 256}, "256 registers: at most 255"),
            ({"shared": 1 << 18}, "262144 bytes of shared memory: at most 232448"),
            ({"buffers": 2}, "2 of 3 stages have a buffer"),
            ({"through_registers": (2, 8)}, "left operand through registers in 2 of 8 wgmma")):
        assert list(replace(good, **change).failed(gpu)) == [why]
    assert list(replace(good, matrix="mma.sync", buffers=2).failed(gpu)) == []


def test_every_operation_has_a_triton_kernel() -> None:
    # part of route_top_k there; products in blocks are torch's own
    assert {e.name for e in kernels if "triton" not in e.value.names()} == {
        "top_k_stable", "expert_matmul_blocks", "expert_weight_grad_blocks"}
