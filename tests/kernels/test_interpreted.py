"""Every Triton kernel against its float64 reference, in Triton's interpreter (a process of its own:
Triton reads the switch once).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moe_plugin.kernels import kernels
from tests.kernels.problems import SHAPES

pytest.importorskip("triton", reason="triton is not installed")
FAST = [e.name for e in kernels if "triton" in e.value.names() and not e.name.startswith("expert_")]
PRODUCTS = [e.name for e in kernels if "triton" in e.value.names() and e.name.startswith("expert_")]


def interpret(module: str, *names: str) -> str:
    """Run a module under the interpreter; its output."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", module, *names], capture_output=True, text=True,
                          env=env, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return done.stdout


def check_parity(*words: str) -> None:
    lines = interpret("tests.kernels.interpreted", *words).splitlines()
    said = dict(line.split() for line in lines)
    assert set(said) == set(words) - {"--all"}
    assert all(int(count) >= len(SHAPES) for count in said.values()), said


@pytest.mark.parametrize("names", [FAST, PRODUCTS], ids=["rows, router, layout", "products"])
def test_parity(names: list[str]) -> None:
    check_parity(*names)


@pytest.mark.slow
def test_parity_of_all_arguments_in_all_dtypes() -> None:
    """Two minutes: `bash scripts/test.sh --all tests/kernels/test_interpreted.py`."""
    check_parity("--all", *FAST, *PRODUCTS)


def test_layer_on_kernels() -> None:
    said = interpret("tests.kernels.interpreted_layer")
    for words in ("cells: 8", "main_grad: added", "tables: once", "beside: the same"):
        assert words in said


def test_flattened_loops() -> None:
    pytest.importorskip("triton.tools.tensor_descriptor", reason="this Triton has none")
    assert "flattened: 8" in interpret("tests.kernels.interpreted_flat")


def test_values_offsets_and_experts_at_the_edge() -> None:
    assert "edges: 6" in interpret("tests.kernels.interpreted_edges")
