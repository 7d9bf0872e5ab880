"""Every Triton kernel compiles for each target without a GPU, and needs no more of it than it may;
the products use the instructions that the target has for them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from moe_plugin.kernels import gpu, kernels
from moe_plugin.kernels.triton_ops import MODULES
from moe_plugin.lab.bench.chips import GPUS
from moe_plugin.lab.bench.resources import Case, Resources, cases, compile_for, compiled

pytest.importorskip("triton", reason="triton is not installed")
MATRIX = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "mfma"}
# in the fast suite: the products as a layer of many rows launches them, on the GPU with most
# instructions of its own
FAST = ("first", "first gated", "second", "input grad gated", "act backward gated",
        "weight grad in", "weight grad out, added", "tiles")


def machine_code(case: Case, target: str) -> str:
    """The instructions of a compiled kernel, by the disassembler that comes with Triton.

    Raises: FileNotFoundError: it is not there.
    """
    from triton.backends.nvidia import compiler

    tool = Path(compiler.__file__).parent / "bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled(case, target).asm["cubin"])
        return subprocess.run([tool, "-sass", path], capture_output=True, text=True,
                              check=True).stdout


def check(case: Case, target: str) -> Resources:
    """Compile within bounds."""
    r, gpu = compile_for(case, target), GPUS[target]
    assert r.registers <= gpu.most_registers and r.shared <= gpu.shared_block, r
    assert r.spilled == 0, r
    assert r.blocks >= 1, r
    assert r.matrix == (MATRIX[target] if case.product else ""), r
    assert r.copies == case.copies, r
    return r


def named(target: str) -> dict[str, Case]:
    """The cases of a target by label."""
    return {case.label: case for case in cases(target)}


@pytest.mark.parametrize("label", FAST)
def test_hopper(label: str) -> None:
    check(named("sm_90")[label], "sm_90")


@pytest.mark.parametrize("label", ["softmax top k of 8, backward", "top k of 64, backward"])
def test_router_on_hopper(label: str) -> None:
    """Where the assembler spills to run more programs at once, if nothing bounds the registers."""
    check(named("sm_90")[label], "sm_90")


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_other_targets(target: str) -> None:
    """The largest product."""
    check(named(target)["first gated"], target)


def test_machine_code_of_hopper() -> None:
    """What the assembler made of it: matrix instructions of a warp group, tile copies, and no local
    memory.
    """
    try:
        found = machine_code(named("sm_90")["second"], "sm_90")
    except FileNotFoundError:
        pytest.skip("this Triton brings no disassembler")
    assert "HGMMA" in found and "UTMALDG" in found
    assert "LDL" not in found and "STL" not in found


@pytest.mark.slow
@pytest.mark.parametrize("target", list(GPUS))
def test_everything(target: str) -> None:
    for case in cases(target):
        check(case, target)


def test_every_triton_module_is_compiled() -> None:
    modules = {m for name in MODULES.values()
               for m in (("grouped_gemm", "weight_grads") if name == "expert_matmul" else (name,))}
    assert {c.module for c in cases("sm_90")} >= modules


def test_every_kernel_is_compiled() -> None:
    """Each that host code launches: those of `kernels.gpu` that are called so."""
    folder = Path(gpu.__file__).parent
    launched = {name for path in folder.glob("*.py")
                for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    assert launched and {c.kernel for c in cases("sm_90")} >= launched


@pytest.mark.parametrize("target", list(GPUS))
def test_the_page_has_every_kernel(target: str) -> None:
    page = Path(__file__).parents[3] / "docs" / "benchmarks" / "data" / f"resources_{target}.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    assert rows[2:] == [case.label for case in cases(target)], (
        "out of date; run: moe-plugin bench resources")


def test_every_operation_has_a_triton_kernel() -> None:
    # part of route_top_k there
    assert {e.name for e in kernels if "triton" not in e.value.names()} == {"top_k_stable"}
