"""The norm of gradients that are not in memory together, as Megatron takes it without Apex and
Transformer Engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class StreamedNorm:
    """The bits of Megatron's own clipping, for one process: a `memory.weights.streamed.Clip`.

    Megatron takes the norm of the tensors' norms, of dense parameters and of experts apart, in the
    order of the optimizer: matrices of the whole model, then vectors.

    Args:
        max_norm: of all gradients; 0: they are not clipped.
    """

    def __init__(self, max_norm: float) -> None:
        self.max_norm, self._factor = max_norm, 1.0
        self._norms: dict[tuple[bool, bool, int], list[Tensor]] = {}

    @torch.no_grad()
    def add(self, place: int, parameters: Sequence[nn.Parameter]) -> None:
        """Take the gradients of a part; place: its number."""
        for parameter in parameters:
            if parameter.grad is not None:
                expert = not getattr(parameter, "allreduce", True)  # Megatron's mark
                key = (expert, parameter.dim() == 1, place)
                self._norms.setdefault(key, []).append(torch.norm(parameter.grad))

    def norm(self) -> Tensor:
        """The norm of all that was taken since the last call, 0-dim float64."""
        kinds = [self._norm_of(expert) for expert in (False, True)]
        kinds = [norm for norm in kinds if norm is not None]
        total = kinds[0] if len(kinds) == 1 else math.sqrt(sum(norm**2 for norm in kinds))
        self._factor = self.max_norm / (total + 1e-6) if self.max_norm > 0 else 1.0
        self.forget()
        return torch.tensor(total, dtype=torch.float64)

    def _norm_of(self, expert: bool) -> float | None:
        keys = sorted(key for key in self._norms if key[0] == expert)
        norms = [float(norm) for key in keys for norm in self._norms[key]]
        if not norms:
            return None
        return float(torch.norm(torch.tensor(norms, dtype=torch.float32))**2.0)**0.5

    def scale(self, gradients: Sequence[Tensor]) -> None:
        """Make them smaller where the norm is above its bound."""
        if self._factor < 1:
            for gradient in gradients:
                gradient.mul_(self._factor)

    def forget(self) -> None:
        """Drop what was taken."""
        self._norms = {}
