"""A lower bound of a layer's time: the matmuls of its experts alone, with the same library."""

from __future__ import annotations

import torch
from torch import Tensor

from scripts.bench.problem import Data, Problem


class GemmBound:
    """The matmuls of forward and backward alone, into preallocated memory.

    On CPU, the bound is one dense matmul per expert with the expert's true number of rows. On GPU,
    it is
    one dense matmul of the same FLOPs over all rows.

    Args:
        problem: sizes of the layer.
        data: weights and inputs.
        counts: number of rows of each expert.
        forward_only: whether to run only the matmuls of a forward pass.
    """

    def __init__(self, problem: Problem, data: Data, counts: list[int],
                 forward_only: bool = False) -> None:
        self.forward_only = forward_only
        rows = sum(counts)
        self.rows_RD = data.x_TD.repeat(-(-rows // problem.tokens), 1)[:rows].clone()
        self.inner_RF = torch.randn(rows, problem.hidden_dim,
                                    device=problem.device).to(problem.torch_dtype)
        self.counts = counts if problem.device == "cpu" else [rows]
        used = len(self.counts)
        self.first = [w[:used] for w in (data.w_in_LDF, data.w_gate_LDF) if w is not None]
        self.second = data.w_out_LFD[:used]
        self.out_RD, self.out_RF = torch.empty_like(self.rows_RD), torch.empty_like(self.inner_RF)
        self.grads = [torch.empty_like(w) for w in (*self.first, self.second)]

    def __call__(self) -> None:
        """Run the matmuls of one forward and backward pass."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                self._expert(expert, slice(start, start + count))
            start += count

    def _expert(self, expert: int, span: slice) -> None:
        x, h = self.rows_RD[span], self.inner_RF[span]
        out_x, out_h = self.out_RD[span], self.out_RF[span]
        for w, grad in zip(self.first, self.grads, strict=False):
            self._linear(x, w[expert], h, out_h, out_x, grad[expert])
        self._linear(h, self.second[expert], x, out_x, out_h, self.grads[-1][expert])

    def _linear(self, x: Tensor, w: Tensor, grad: Tensor, y: Tensor, grad_x: Tensor,
                grad_w: Tensor) -> None:
        """Run the three matmuls of a linear map: y = x w, grad_x = grad w^T, grad_w = x^T grad."""
        torch.mm(x, w, out=y)
        if not self.forward_only:
            torch.mm(grad, w.t(), out=grad_x)
            torch.mm(x.t(), grad, out=grad_w)
