"""Score functions by name: how a token's logits become scores of experts. One class each, with the
formula, its gradient, and which kernels compute it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.registry import Registry

_FEW = 16  # 32-bit numbers in a register of AVX-512
_MANY = 64  # tokens whose scores take longer than the launch of four operations


class ScoreFunction:
    """Base of score functions; `scores` alone is enough for one.

    Attributes:
        kernels: implementations of `kernels.router.route_top_k` that compute it: "torch" needs
            `slope_`, "triton" a branch in `gpu/router.py`; none: routing is computed step by step.
        is_softmax: scores of a token sum to 1, and each logit pulls on the scores of all experts.
    """

    kernels: frozenset[str] = frozenset()
    is_softmax: bool = False

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Scores [T, E] >= 0, differentiable."""
        raise NotImplementedError

    def slope_(self, pull: Tensor, scores: Tensor) -> Tensor:
        """`pull` times d log(score) / d logit of the same expert, in place; both of any shape.

        Of a softmax without the part that all logits share.
        """
        raise NotImplementedError

    def shares(self, scores_TE: Tensor) -> Tensor:
        """Scores divided by their sum: the distribution that losses and entropy read."""
        return scores_TE if self.is_softmax else shares(scores_TE)


score_functions: Registry[type[ScoreFunction]] = Registry("score function", base=ScoreFunction)


@score_functions.register("softmax")
class Softmax(ScoreFunction):
    """exp(logit) over the sum of all experts' exp(logit)."""

    kernels = frozenset({"torch", "triton"})
    is_softmax = True

    def scores(self, logits_TE: Tensor) -> Tensor:
        """See `ScoreFunction.scores`."""
        # the number of tokens last: under torch.compile asking for it would be a guard on it
        if torch.compiler.is_compiling() or torch.is_grad_enabled() \
                or logits_TE.device.type != "cpu" or logits_TE.shape[1] >= _FEW \
                or logits_TE.shape[0] <= _MANY:
            return torch.softmax(logits_TE, 1)
        # torch goes through rows that do not fill a register number by number: 3 times as long
        e_TE = (logits_TE - logits_TE.amax(1, keepdim=True)).exp()
        return e_TE / e_TE.sum(1, keepdim=True)

    def slope_(self, pull: Tensor, scores: Tensor) -> Tensor:
        """See `ScoreFunction.slope_`: 1."""
        return pull


@score_functions.register("sigmoid")
class Sigmoid(ScoreFunction):
    """1 / (1 + exp(-logit)), each expert by itself."""

    kernels = frozenset({"torch", "triton"})

    def scores(self, logits_TE: Tensor) -> Tensor:
        """See `ScoreFunction.scores`."""
        return torch.sigmoid(logits_TE)

    def slope_(self, pull: Tensor, scores: Tensor) -> Tensor:
        """See `ScoreFunction.slope_`: 1 - score."""
        return pull.mul_(1 - scores)


SOFTMAX = Softmax()


def at_least_eps(total_T1: Tensor) -> Tensor:
    """A divisor that is not 0."""
    return total_T1.clamp(min=torch.finfo(total_T1.dtype).eps)


def shares(scores_TE: Tensor) -> Tensor:
    """Non-negative scores [T, E] (or [T, K]) divided by their sum over axis 1."""
    return scores_TE / at_least_eps(scores_TE.sum(1, keepdim=True))
