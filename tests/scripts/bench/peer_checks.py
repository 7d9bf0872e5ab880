"""What every peer's layer must share with ours."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor

from scripts.bench.peers import ours
from scripts.bench.problem import Problem, make_data


def without_refusal(peer_module: Any) -> Any:
    """The peer's `build`, which then takes any problem."""
    return contextlib.contextmanager(inspect.unwrap(peer_module.build))


def same_function(
        peer_module: Any,
        problem: Problem) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None]]:
    """(the peer's losses, our parameters' gradients, the peer's); outputs and input gradients are
    held to each other.
    """
    data, results = make_data(problem), []
    with peer_module.build(problem, data) as peer:
        for candidate in (ours(problem, data), peer):
            x = data.x_TD.clone().requires_grad_()
            for _ in range(2):  # its list of losses does not grow
                y, losses = candidate.forward(x)
            results.append((y, losses,
                            torch.autograd.grad((y * data.grad_TD).sum(),
                                                [x, *candidate.parameters], allow_unused=True)))
    (y, _, mine), (other, losses, theirs) = results
    torch.testing.assert_close(other, y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(theirs[0], mine[0], rtol=1e-4, atol=1e-5)
    return losses, list(mine[1:]), list(theirs[1:])
