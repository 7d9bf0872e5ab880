"""Scores of experts: functions that compute float32 logits from low-precision tokens, and the
registry of score functions.

A score function is a class that defines the formula, its gradient, and the kernels that implement
it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.activations import transformed, wants_graph
from moe_plugin.kernels.cpu.native.functions import scores_of
from moe_plugin.kernels.cpu.products import PARTS, widened
from moe_plugin.kernels.registry import accumulate_dtype
from moe_plugin.utils.registry import Registry

ADDED = 1e-20  # added to a sum of scores before dividing by it, as in Megatron and DeepSeek-V3
_FEW = 16  # number of 32-bit values in an AVX-512 register
_MANY = 64  # tokens from which the work takes longer than launching four operations


class ScoreFunction:
    """Base class of score functions.

    A subclass must define `scores`; all other members are optional.

    Attributes:
        kernels: implementations of `kernels.router.route_top_k` that support this score function.
            "torch" requires the method `slope_`, and "triton" requires a branch in `gpu/router.py`.
            If `kernels` is empty, the router uses separate torch operations.
        is_softmax: True if the scores of a token sum to 1 and each logit affects the scores of all
            experts.
        elementwise: True if each score depends only on the logit of the same expert. Only
            elementwise scores (and softmax) can be computed with `batch_invariant`.
    """

    kernels: frozenset[str] = frozenset()
    is_softmax: bool = False
    elementwise: bool = False

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores [T, E], which are nonnegative and differentiable."""
        raise NotImplementedError

    def reference(self, logits_TE: Tensor) -> Tensor:
        """Compute the scores with the simplest formula, as a reference for the exactness tests."""
        return self.scores(logits_TE)

    def slope_(self, pull: Tensor, scores: Tensor) -> Tensor:
        """Multiply `pull` in place by the slope `d log(score) / d logit` of each expert. Both
        tensors may have any shape.

        For a softmax, the term that is the same for all logits is excluded.
        """
        raise NotImplementedError

    def shares(self, scores_TE: Tensor) -> Tensor:
        """Return the scores divided by their sum. Losses and entropy use the normalized scores."""
        return scores_TE if self.is_softmax else shares(scores_TE)


score_functions: Registry[type[ScoreFunction]] = Registry("score function", base=ScoreFunction)


@score_functions.register("softmax")
class Softmax(ScoreFunction):
    """The softmax, `exp(logit)` divided by the sum of `exp(logit)` over all experts."""

    kernels = frozenset({"torch", "triton"})
    is_softmax = True

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores; see `ScoreFunction.scores`."""
        # The number of tokens is checked last, because under torch.compile the check would become a
        # guard on it.
        if torch.compiler.is_compiling() or torch.is_grad_enabled() \
                or logits_TE.device.type != "cpu" or logits_TE.shape[1] >= _FEW \
                or logits_TE.shape[0] <= _MANY:
            return torch.softmax(logits_TE, 1)
        # If a row does not fill a vector register, torch's softmax processes it one element at a
        # time, which takes 3 times as long.
        e_TE = (logits_TE - logits_TE.amax(1, keepdim=True)).exp()
        return e_TE / e_TE.sum(1, keepdim=True)

    def slope_(self, pull: Tensor, scores: Tensor) -> Tensor:
        """Return `pull` unchanged, because the slope is 1; see `ScoreFunction.slope_`."""
        return pull


@score_functions.register("sigmoid")
class Sigmoid(ScoreFunction):
    """The sigmoid, `1 / (1 + exp(-logit))`. The scores of different experts are independent."""

    kernels = frozenset({"torch", "triton"})
    elementwise = True

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores; see `ScoreFunction.scores`."""
        return torch.sigmoid(logits_TE)

    def slope_(self, pull: Tensor, scores: Tensor) -> Tensor:
        """Multiply `pull` by the slope 1 - score; see `ScoreFunction.slope_`."""
        return pull.mul_(1 - scores)


SOFTMAX = Softmax()


def divisor(total_T1: Tensor, add: float = ADDED, least: float = 0.0) -> Tensor:
    """Return `max(total + add, least)`, the divisor of scores whose sum is `total`."""
    total_T1 = total_T1 + add
    return total_T1.clamp(min=least) if least else total_T1


def shares(scores_TE: Tensor, add: float = ADDED, least: float = 0.0) -> Tensor:
    """Divide nonnegative scores [T, E] (or [T, K]) by the `divisor` of their sum over axis 1."""
    return scores_TE / divisor(scores_TE.sum(1, keepdim=True), add, least)


def shares_of_rest(weights_TK: Tensor, add: float, least: float) -> Tensor:
    """Normalize the remaining weights of each token; see `shares`. If a token has no remaining
    weights, the output is 0.
    """
    # The smallest normal number as divisor turns 0 / 0 into 0.
    return shares(weights_TK, add, max(least, torch.finfo(weights_TK.dtype).tiny))


class _WideLinear(torch.autograd.Function):
    """A linear map with float32 outputs. Tokens are saved for backward in their original dtype
    rather than in float32.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        dtype = accumulate_dtype(x_TD.dtype)
        if in_parts(x_TD):
            return _sum_of_parts(x_TD, _parts(weight_ED, 0, 3).t(), weight_ED.shape[0], 1)
        weight_ED = weight_ED.to(dtype)
        if x_TD.device.type != "cpu":
            return F.linear(x_TD.to(dtype), weight_ED)
        native = scores_of(x_TD, weight_ED)
        if native is not None:
            return native.scores(x_TD, weight_ED.contiguous())
        scores_TE = x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=dtype)
        for span, x_ND in widened(x_TD, dtype):
            torch.mm(x_ND, weight_ED.t(), out=scores_TE[span])
        return scores_TE

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        grad_x = grad_weight = None
        native = None if wants_graph() else scores_of(x_TD, weight_ED)
        if native is not None:
            grad_TE = grad_TE.contiguous()
            if ctx.needs_input_grad[0]:
                grad_x = native.grad_tokens(grad_TE, weight_ED.to(grad_TE.dtype).contiguous())
            if ctx.needs_input_grad[1]:
                grad_weight = native.grad_weight(grad_TE, x_TD).to(weight_ED.dtype)
            return grad_x, grad_weight
        if ctx.needs_input_grad[0]:
            grad_x = _grad_tokens(grad_TE, weight_ED, x_TD.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _grad_weight(grad_TE, x_TD).to(weight_ED.dtype)
        return grad_x, grad_weight


def in_parts(x_TD: Tensor) -> bool:
    """Return true if matmuls with these tokens are computed as sums of several 16-bit matmuls.

    Matmuls are split if the tokens are bfloat16 and on a GPU, and if torch can return float32 sums.
    Each float32 operand is split into three bfloat16 tensors, which together represent all 24 bits.
    With these operands, only the sum is rounded. In addition, the matrix units can read the
    bfloat16 tokens without conversion. A float32 matmul would not use the matrix units and would
    need a float32 copy of the tokens. The split matmul takes one fifth of the time of the float32
    matmul (measured on an H100).
    """
    return x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and hasattr(torch.ops.aten.mm, "dtype")


def _parts(x: Tensor, dim: int, number: int) -> Tensor:
    """Split x into `number` bfloat16 tensors with 8 bits each.

    The sum of these tensors is x. The tensors are concatenated along `dim`.

    A bfloat16 tensor is returned unchanged.
    """
    if x.dtype == torch.bfloat16:
        return x
    # The parts are joined into one operand, so that a single matmul multiplies all of them.
    parts = x.new_empty((*x.shape[:dim], number, *x.shape[dim:]), dtype=torch.bfloat16)
    for n in range(number):
        if n:  # the rounding error of the parts so far
            x = x - parts.select(dim, n - 1)
        parts.select(dim, n).copy_(x)
    return parts.flatten(dim, dim + 1)


def _sum_of_parts(a: Tensor, b: Tensor, size: int, dim: int) -> Tensor:
    """Multiply the 16-bit matrices a and b in float32, and sum the output over consecutive groups
    of `size` elements along `dim`.
    """
    product = torch.mm(a, b, out_dtype=torch.float32)
    return product if product.shape[dim] == size else product.unflatten(dim, (-1, size)).sum(dim)


def _grad_weight(grad_TE: Tensor, x_TD: Tensor) -> Tensor:
    """Compute `grad^T @ x`, [E, D], in the dtype of the gradient: float32 (or float64)."""
    if in_parts(x_TD) and not wants_graph():
        return _sum_of_parts(_parts(grad_TE, 1, 3).t(), x_TD, grad_TE.shape[1], 0)
    if x_TD.device.type != "cpu" or wants_graph():
        return grad_TE.t() @ x_TD.to(grad_TE.dtype)
    experts, width = grad_TE.shape[1], x_TD.shape[1]
    # Partial sums over parts of the tokens run in parallel. A single matmul with few rows and
    # columns and a long sum over tokens takes up to twice as long.
    sums_PED = grad_TE.new_zeros(PARTS, experts, width)
    for span, x_ND in widened(x_TD, grad_TE.dtype):
        grad_NE, even = grad_TE[span], x_ND.shape[0] // PARTS * PARTS
        sums_PED.baddbmm_(grad_NE[:even].view(PARTS, -1, experts).transpose(1, 2),
                          x_ND[:even].view(PARTS, -1, width))
        if even < x_ND.shape[0]:
            sums_PED[0].addmm_(grad_NE[even:].t(), x_ND[even:])
    return sums_PED.sum(0)


def _grad_tokens(grad_TE: Tensor, weight_ED: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `grad @ weight` in `dtype`, [T, D]. grad_TE: float32 (float64)."""
    on_cpu = grad_TE.device.type == "cpu"
    if dtype == torch.bfloat16 and not (
            on_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        if weight_ED.dtype == dtype:
            # A 16-bit matmul, summed in float32 and rounded once, takes half as long as a 32-bit
            # matmul. Each gradient is split into two parts with a relative error of at most 2^-17.
            return _parts(grad_TE, 1, 2) @ weight_ED.repeat(2, 1)
        if not on_cpu and weight_ED.dtype == torch.float32 and not wants_graph():
            return _product_of_parts(grad_TE, weight_ED)
    return (grad_TE @ weight_ED.to(grad_TE.dtype)).to(dtype)


def _product_of_parts(grad_TE: Tensor, weight_ED: Tensor) -> Tensor:
    """Compute `grad @ weight` for float32 operands with bfloat16 matmuls. The error is about 2^-16
    before rounding.

    Each operand is split into a larger and a smaller part, both bfloat16. One matmul sums the
    product of the two larger parts and the two products of a larger and a smaller part.
    """
    experts = len(weight_ED)
    grads_T2E, weights_2ED = _parts(grad_TE, 1, 2), _parts(weight_ED, 0, 2)
    larger_ED, smaller_ED = weights_2ED.split(experts)
    return (torch.cat([grads_T2E, grads_T2E[:, :experts]], 1)
            @ torch.cat([larger_ED, larger_ED, smaller_ED]))


def linear_scores(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Compute `x @ weight^T` in float32 (float64 for float64 tokens), [T, E]. Autograd is
    supported.

    Args:
        x_TD: tokens [T, D] of any floating-point dtype.
        weight_ED: weights [E, D] of any floating-point dtype.
    """
    if x_TD.dtype == weight_ED.dtype == torch.float32:
        return F.linear(x_TD, weight_ED)
    dtype = accumulate_dtype(x_TD.dtype)
    if x_TD.dtype == dtype or torch.compiler.is_compiling() or transformed():
        return F.linear(x_TD.to(dtype), weight_ED.to(dtype))
    return _WideLinear.apply(x_TD, weight_ED)
