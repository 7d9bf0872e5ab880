"""What a compiler's graphs hold of autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch.torch_version import TorchVersion


def with_own_results(backend: str) -> Callable[..., Any]:
    """The backend; it takes no graph with a result as `kernels.derivatives.own` forbids it.

    Not on torch 2.11, which also returns what a forward has on its way to a result: there wrong
    gradients tell.
    """
    inner = torch._dynamo.lookup_backend(backend)
    if TorchVersion(torch.__version__) < "2.12":
        return inner

    def checked(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        shared = [name for module in graph.modules() if isinstance(module, fx.GraphModule)
                  for node in module.graph.nodes
                  if node.target is torch.ops.higher_order.autograd_function_apply
                  for name in _with_two_names(getattr(module, node.args[0].target).graph)]
        assert not shared, f"results of autograd functions under two names: {shared}"
        return inner(graph, inputs, **options)

    return checked


def _with_two_names(forward: fx.Graph) -> list[str]:
    [values] = forward.output_node().args
    results = values[0] if isinstance(values[0], (tuple, list)) else values[:1]
    return [f"{result.name} = {node.name}" for result in results if _floating(_value(result))
            for node in forward.nodes if node is not result and _value(node) is _value(result)]


def _value(node: fx.Node | None) -> Any:
    return None if node is None else node.meta.get("example_value")


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
