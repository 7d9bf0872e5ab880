"""Weight gradients of calls that compute with the same weights, added up where the first wrote
them.

The pieces of one layer call are such calls. Autograd would make a whole gradient for each and add
them one by one, three passes over the weights' memory a piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from moe_plugin.kernels.workspace import Workspace


@dataclass
class _Sum:
    """One weight's gradient.

    Attributes:
        calls: whose backward has run.
        experts: with a value so far.
    """

    grad_LIO: Tensor
    calls: int = 0
    experts: set[int] = field(default_factory=set)


@dataclass
class GradSums:
    """Gradients that the calls of one forward pass share; make one per pass.

    calls: that will run backward, counted by `expect`.
    """

    calls: int = 0
    _sums: dict[str, _Sum] = field(default_factory=dict)

    def expect(self) -> None:
        """One more call has run forward and will run backward."""
        self.calls += 1

    def begin(self, name: str, w_LIO: Tensor, memory: Workspace) -> tuple[Tensor, set[int]]:
        """The gradient of weight `name` [L, I, O], and the experts whose values are already in it.
        """
        if name not in self._sums:
            self._sums[name] = _Sum(memory.empty(f"gradient {name}", tuple(w_LIO.shape), w_LIO))
        return self._sums[name].grad_LIO, self._sums[name].experts

    def end(self, name: str) -> Tensor | None:
        """What a call's backward returns: the sum [L, I, O] from the last one, None from the
        others.
        """
        found = self._sums[name]
        found.calls += 1
        if found.calls < self.calls:
            return None
        del self._sums[name]  # the graph may be kept for another pass
        for expert in set(range(found.grad_LIO.shape[0])) - found.experts:
            found.grad_LIO[expert].zero_()
        return found.grad_LIO
