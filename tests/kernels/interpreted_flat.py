"""Run in a process of its own with TRITON_INTERPRET=1: the loop over all tiles that GPUs flatten,
whose operands come by descriptors, where the interpreter else runs a loop of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from moe_plugin.kernels import kernels
from moe_plugin.kernels.gpu import expert_matmul, grouped_gemm
from tests.kernels.interpreted import check_result, check_same
from tests.kernels.problems import SHAPES, arguments, fresh

PRODUCTS = ("expert_matmul", "expert_matmul_act", "expert_matmul_gated", "expert_matmul_sum")


class Flat:
    """`product_kernel`, launched as on a GPU where both operands have descriptors."""

    def __init__(self) -> None:
        self.kernel, self.launches = grouped_gemm.product_kernel, 0

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            given = dict(zip(self.kernel.arg_names, args, strict=False))
            if given["x_tiles"] is not None and given["w_tiles"] is not None:
                constants |= {"WHILE": False, "FLATTEN": True}
                self.launches += 1
            self.kernel[grid](*args, **constants)

        return launch


def main() -> None:
    """Each matmul of rows that lie in order, next to its reference and, bit for bit, to the loop
    of the interpreter.
    """
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    flat = Flat()
    for name in PRODUCTS:
        for label in ("plain", "starving experts"):
            before, what = flat.launches, f"{name}, {label}, flattened"
            for args in arguments(name, SHAPES[label], torch.float32):
                with patch.object(grouped_gemm, "product_kernel", flat), patch.object(
                        expert_matmul, "copies_tiles", lambda *_: True):
                    got = kernels.get(name)(*fresh(args))
                if flat.launches > before:  # others gather their rows
                    break
            assert flat.launches == before + 1, f"{what}: no descriptors"
            check_result(name, got, args, torch.float32, what)
            check_same(got, kernels.get(name)(*fresh(args)), what)
    print(f"flattened: {flat.launches}")


if __name__ == "__main__":
    main()
