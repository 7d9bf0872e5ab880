"""Run in a process of its own with TRITON_INTERPRET=1: cells of the exactness matrix with every operation in Triton."""

from __future__ import annotations

import torch

import moe_plugin.kernels.gpu.common as common
from moe_plugin.comm import LocalComm
from moe_plugin.kernels import kernels
from tests.exactness.harness import compare, config_of, reference, run_rank
from tests.oracle import Case


def main() -> None:
    """Plain and gated experts, both dispatchers, a skewed load, dropped tokens; one rank: the interpreter knows no threads."""
    assert common.INTERPRETED
    assert kernels.get("take_rows").choose(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), 1, None) == "triton"
    cells = 0
    for case, dispatch in [
        (Case(1, 4, 2, [7]), "ragged"), (Case(1, 4, 2, [6], [2], 0.5), "padded"), (Case(1, 3, 3, [5], None, None, "gated_ffn"), "ragged"),
        (Case(1, 4, 1, [5], None, None, "gated_ffn", activation="silu"), "ragged"), (Case(1, 4, 2, [8], None, 1.0, skew=3.0), "padded"),
        (Case(1, 2, 1, [0]), "ragged"),
    ]:
        config = config_of(case, dispatch__name=dispatch, experts__compute="kernels")
        results = [run_rank(case, LocalComm(), config, torch.float32)]
        compare(case, results, reference(case, torch.float32), rtol=2e-5, atol=2e-5)
        cells += 1
    print(f"cells: {cells}")


if __name__ == "__main__":
    main()
