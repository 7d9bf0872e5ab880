"""Every Triton kernel compiles for each target without a GPU, and needs no more of it than it may.
"""

from __future__ import annotations

import pytest

from moe_plugin.bench.resources import (
    REGISTER_LIMIT,
    SHARED_LIMIT,
    TARGETS,
    Case,
    cases,
    compile_for,
    label,
)
from moe_plugin.kernels import kernels
from moe_plugin.kernels.triton_ops import MODULES

pytest.importorskip("triton", reason="triton is not installed")
PRODUCTS = ("matmul_kernel", "matmul_act_backward_kernel", "weight_grad_kernel",
            "weight_add_kernel")


@pytest.mark.parametrize("case", list(cases()), ids=label)
def test_compiles_within_bounds(case: Case, monkeypatch: pytest.MonkeyPatch,
                                tmp_path: object) -> None:
    # compile now, whatever an earlier run left
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for target in TARGETS:
        r = compile_for(case, target)
        assert r.registers <= (512 if target == "gfx942" else REGISTER_LIMIT), r
        assert r.spilled <= 64, r  # a few bytes past the edge cost nothing; a spilled tile does
        assert r.shared <= SHARED_LIMIT[target], r
        assert r.matrix == (
            case.kernel
            in PRODUCTS), f"{r}: a product must use the matrix units, and nothing else should"


def test_every_triton_module_is_compiled() -> None:
    assert {c.module for c in cases()
            } >= {m if m != "expert_matmul" else "grouped_gemm" for m in MODULES.values()}


def test_every_operation_has_a_triton_kernel() -> None:
    # part of route_top_k there
    assert {e.name for e in kernels if "triton" not in e.value.names()} == {"top_k_stable"}
