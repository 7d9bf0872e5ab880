"""A training step captured in a CUDA graph; needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_plugin.layer import MoELayer


def replays(layer: MoELayer, x: Tensor, times: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The layer's forward and backward captured once, and replayed on new values of x.

    x: [T, D] tokens on a GPU. Yields, each time, pairs of what the replay and the layer itself
    give: the output, the gradients of x and of all parameters.
    """
    x = x.detach().requires_grad_()

    def step() -> tuple[Tensor, ...]:
        y = layer(x).output
        return (y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()]))

    graph, captured = _captured(step)
    for seed in range(times):
        values = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            x.copy_(values)
        graph.replay()
        yield list(zip(captured, step(), strict=True))


def _captured(step: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph,
                                                               tuple[Tensor, ...]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled and tuned before a capture
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
