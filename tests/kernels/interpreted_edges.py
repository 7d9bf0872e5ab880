"""Run in a process of its own with TRITON_INTERPRET=1: Triton kernels where values are not finite,
offsets do not fit 32 bits, and experts do not exist.

    TRITON_INTERPRET=1 python -m tests.kernels.interpreted_edges
"""

from __future__ import annotations

import os
import tempfile

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_plugin.kernels import RowGroups, kernels
from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.gpu import fp8, rows
from moe_plugin.kernels.gpu.tilings import activate, activation_grad
from moe_plugin.records import RowCounts


@triton.jit
def _points(x, value, slope, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    point = tl.load(x + at)
    tl.store(value + at, activate(point, ACT))
    tl.store(slope + at, activation_grad(point, ACT))


def activations() -> None:
    """Value and derivative are torch's, those of NaN and zero included."""
    x = torch.tensor([float("nan"), 0.0, -0.0, 1.5, -1.5, 30.0, -30.0, 1e-40])
    for name in ACTIVATIONS:
        value, slope = torch.empty_like(x), torch.empty_like(x)
        _points[(1,)](x, value, slope, name, x.numel())
        mine = x.clone().requires_grad_()
        wanted = ACTIVATIONS[name].value(mine)
        wanted.sum().backward()
        for got, want in ((value, wanted.detach()), (slope, mine.grad)):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True,
                                       msg=f"{name}: {got}, wanted {want}")


def sparse(folder: str, values: int, dtype: torch.dtype) -> Tensor:
    """So many zeros in a file without blocks: only what is written takes memory."""
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.truncate(values * torch.empty(0, dtype=dtype).element_size())
    return torch.from_file(file.name, shared=True, size=values, dtype=dtype)


def far_values(folder: str) -> None:
    """take_values: the third part of the values begins behind 2^31 of them."""
    number = (1 << 30) + 5
    values_CN = sparse(folder, 3 * number, torch.float32).view(3, number)
    values_CN[:, 7] = torch.tensor([1.0, 2.0, 4.0])
    got = kernels.get("take_values")(values_CN, torch.tensor([7, -1, 8]))
    assert got.tolist() == [7.0, 0.0, 0.0], got


def far_weights(folder: str) -> None:
    """A matrix whose rows are 2^25 values apart: from row 64 on they are behind 2^31."""
    inner, outer, step = 80, 16, 1 << 25
    memory = sparse(folder, inner * step, torch.float16)
    w_LIO = memory.as_strided((1, inner, outer), (inner * step, step, 1))
    generator = torch.Generator().manual_seed(0)
    w_LIO.copy_(torch.randn(w_LIO.shape, generator=generator))
    x_RI = torch.randn(3, inner, generator=generator).half()
    groups = RowGroups(RowCounts([3]), x_RI.device)
    got = kernels.get("expert_matmul").implementation("triton")(x_RI, groups, w_LIO, None, None,
                                                                "ieee")
    torch.testing.assert_close(got.double(), x_RI.double() @ w_LIO[0].double(), rtol=2e-3,
                               atol=2e-2)
    codes, scales = fp8.quantize_weights_fp8(w_LIO)
    wanted = fp8.quantize_weights_fp8(w_LIO.contiguous())
    assert torch.equal(codes.view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(scales, wanted[1])


def grids() -> None:
    """No grid grows along an axis that ends at 65,535 where sizes do."""
    seen = []

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            seen.append(grid)
            return lambda *args, **constants: None

    saved = rows.write_kernel, rows.read_kernel, rows.chunk_kernel
    rows.write_kernel = rows.read_kernel = rows.chunk_kernel = Launches()
    try:
        large = torch.empty(2, 1 << 28, dtype=torch.float16, device="meta")
        small = torch.empty(3, device="meta")
        rows.write_pages(small, small, large, large)
        rows.read_pages(small, large, large, 8, small)
        rows.transpose_chunks(torch.empty(4, 1 << 29, device="meta"), 2, 2)
    finally:
        rows.write_kernel, rows.read_kernel, rows.chunk_kernel = saved
    assert len(seen) == 3 and all(max((0, *grid[1:])) <= 65_535 for grid in seen), seen


def experts_that_do_not_exist() -> None:
    """They count as none, and nothing is written outside of the results."""
    experts, ids_N = 4, torch.tensor([0, 7, 3, 4, -1, 3, 1 << 33])
    wanted = torch.where((ids_N < experts) & (ids_N >= 0), ids_N, -1)
    allocate, made = torch.zeros, []

    def guarded(*size: int, **options: object) -> Tensor:
        made.append(allocate(size[0] + 16, *size[1:], **options))
        return made[-1][:size[0]]

    torch.zeros = guarded
    try:
        got = (*rows.running_count(ids_N, experts),
               *rows.sorted_choices(ids_N[:, None], experts),
               rows.choice_load(ids_N[:, None], experts))
    finally:
        torch.zeros = allocate
    assert made and not any(tensor[-16:].any() for tensor in made)
    references = [kernels.get(name).implementation("torch")
                  for name in ("running_count", "sorted_choices", "choice_load")]
    want = (*references[0](wanted, experts), *references[1](wanted[:, None], experts),
            references[2](wanted[:, None], experts))
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs), (mine, theirs)


def gate_gradient() -> None:
    """dots are of the rounded activation, which the forward pass has multiplied."""
    generator = torch.Generator().manual_seed(1)
    grad, w, h, gate = (torch.randn(shape, generator=generator).half() * size
                        for shape, size in (((6, 16), 1), ((2, 24, 16), 1), ((6, 24), 3),
                                            ((6, 24), 3)))
    groups = RowGroups(RowCounts([4, 2]), grad.device)
    for given in (None, gate):
        *_, after, dots_CR = kernels.get("expert_matmul_act_backward").implementation("triton")(
            grad, groups, w, h, given, None, None, "silu", "ieee")
        u_RF = torch.cat([grad[:4].double() @ w[0].double().t(),
                          grad[4:].double() @ w[1].double().t()])
        torch.testing.assert_close(dots_CR.sum(0).double(), (u_RF * after.double()).sum(1),
                                   rtol=1e-5, atol=1e-5)


def main() -> None:
    """All of them; prints how many there were."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checks = [activations, grids, experts_that_do_not_exist, gate_gradient,
                  lambda: far_values(folder), lambda: far_weights(folder)]
        for check in checks:
            check()
    print(f"edges: {len(checks)}")


if __name__ == "__main__":
    main()
