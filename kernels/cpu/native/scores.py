"""Matmuls of a router with few experts on a CPU, in C.

bfloat16 tokens and a matrix of which one side is a few experts: torch takes three times as long
(4,096 tokens of width 512, 8 experts: scores 0.76 to 0.26 ms, gradient of the tokens 0.52 to 0.17,
of the weight 0.97 to 0.31; AMD Zen 5, two threads).

Legend: T tokens, D width, E experts. x_TD: bfloat16; all other tensors float32; all contiguous.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.native import build
from moe_plugin.kernels.cpu.native.calls import INT, INT64, POINTER, function, readable, threads

EXPERTS = 16  # from twice as many on torch's matmuls are faster
PARTS = 16  # of the tokens, whose sums are added up in the end


class Scores:
    """The matmuls, by compiled functions."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        sizes, pointers = (INT64, INT64, INT64), [POINTER] * 3
        self._scores = function(functions, "router_scores", *sizes, *pointers, INT)
        self._grad_tokens = function(functions, "router_grad_tokens", *sizes, *pointers, INT)
        self._grad_weight = function(functions, "router_grad_weight", *sizes, *pointers, INT64, INT)

    def scores(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """x weight^T, [T, E]."""
        (tokens, width), experts = x_TD.shape, weight_ED.shape[0]
        scores_TE = weight_ED.new_empty(tokens, experts)
        self._scores(tokens, width, experts, x_TD.data_ptr(), weight_ED.data_ptr(),
                     scores_TE.data_ptr(), threads(x_TD))
        return scores_TE

    def grad_tokens(self, grad_TE: Tensor, weight_ED: Tensor) -> Tensor:
        """grad weight, bfloat16 [T, D]; summed in float32, rounded once."""
        (tokens, experts), width = grad_TE.shape, weight_ED.shape[1]
        grad_TD = weight_ED.new_empty(tokens, width, dtype=torch.bfloat16)
        self._grad_tokens(tokens, width, experts, grad_TE.data_ptr(), weight_ED.data_ptr(),
                          grad_TD.data_ptr(), threads(grad_TD))
        return grad_TD

    def grad_weight(self, grad_TE: Tensor, x_TD: Tensor) -> Tensor:
        """grad^T x, [E, D]."""
        (tokens, experts), width = grad_TE.shape, x_TD.shape[1]
        sums_PED = grad_TE.new_empty(PARTS, experts, width)
        self._grad_weight(tokens, width, experts, grad_TE.data_ptr(), x_TD.data_ptr(),
                          sums_PED.data_ptr(), PARTS, threads(x_TD))
        return sums_PED.sum(0)


def scores_of(x_TD: Tensor, weight_ED: Tensor) -> Scores | None:
    """The matmuls of these tokens with this weight; None: torch's, whose errors say what does not
    fit.
    """
    fit = (x_TD.dtype == torch.bfloat16 and readable(x_TD) and x_TD.is_contiguous()
           and readable(weight_ED) and x_TD.dim() == weight_ED.dim() == 2
           and weight_ED.shape[1] == x_TD.shape[1] and 0 < weight_ED.shape[0] <= EXPERTS)
    return _scores() if fit else None


def why_not() -> str | None:
    """Why this machine does not have the matmuls; None where it has."""
    return build.why_not("router.c")


@functools.cache
def _scores() -> Scores | None:
    found = build.library("router.c")
    return None if isinstance(found, str) else Scores(found)
