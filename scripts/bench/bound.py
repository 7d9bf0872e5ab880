"""A lower bound of a layer's time: its experts' matrix products alone, with the same library."""

from __future__ import annotations

import torch
from torch import Tensor

from scripts.bench.problem import Data, Problem


class GemmBound:
    """The matmuls of forward and backward and nothing else, into preallocated memory.

    CPU: one dense matmul per expert, with its true number of rows. GPU: one dense matmul of the
    same FLOPs over all rows. forward_only: those of a forward pass.
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
        """Run the matmuls of one forward and backward."""
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
        """The three matmuls of one linear map: y = x w, grad_x = grad w^T, grad_w = x^T grad."""
        torch.mm(x, w, out=y)
        if not self.forward_only:
            torch.mm(grad, w.t(), out=grad_x)
            torch.mm(x.t(), grad, out=grad_w)
