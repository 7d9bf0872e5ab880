"""Run in a process of its own with TRITON_INTERPRET=1: the launches of one layer step on a GPU,
counted without one.

    TRITON_INTERPRET=1 python -m tests.kernels.launches [--list]

The layer runs on the counting device, where every operation of torch counts as one launch unless it
makes a view or uninitialised memory; the Triton kernels run in the interpreter and count as
themselves. So a sort, which is several launches, counts as one.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton.runtime.interpreter as interpreter

import tests.waits.device as counting
from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict
from moe_plugin.kernels.gpu import descriptors, expert_ffn, expert_matmul, tilings
from moe_plugin.layer import MoELayer

# memory, and what is the same tensor
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach",
        "alias", "_reshape_alias", "lift_fresh", "set_", "_unsafe_view"}


class Launches:
    """By name, in forward and in backward."""

    def __init__(self) -> None:
        self.seen: collections.Counter[str] = collections.Counter()
        self.on = False

    def note(self, name: str) -> None:
        """One launch."""
        if self.on:
            self.seen[name] += 1

    @contextmanager
    def noted(self) -> Iterator[collections.Counter[str]]:
        """Those inside."""
        self.seen, self.on = collections.Counter(), True
        try:
            yield self.seen
        finally:
            self.on = False


LAUNCHES = Launches()


def install() -> None:
    """Count from now on; kernels get the tensors on the CPU that the device's wrap."""
    call, launch = counting._call, interpreter.GridExecutor.__call__

    def counted(func: Any, args: Any, kwargs: Any) -> Any:
        out = call(func, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        views = any(r.alias_info is not None and not r.alias_info.is_write
                    for r in func._schema.returns)
        tensors = [x for x in counting.tensors_of((args, kwargs, out))
                   if isinstance(x, counting.OnDevice)]
        if tensors and name not in FREE and not views and any(x.numel() for x in tensors):
            LAUNCHES.note(name)
        return out

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        LAUNCHES.note(self.fn.__name__)
        return launch(self, *counting.inner(list(args)), **counting.inner(kwargs))

    counting._call, interpreter.GridExecutor.__call__ = counted, launched
    descriptors.TensorDescriptor = None  # it asks for addresses
    expert_ffn._traced = lambda x: False  # a tensor of the device is no fake one
    expert_matmul._LEAST_PART = tilings.LEAST_PART  # no sum of so few rows is in parts


def step(dispatch: str, gated: bool,
         tokens: int = 32) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """(forward, backward) of one layer without biases; forward includes its balance loss."""
    device = counting.register()
    config = from_dict({
        "model_dim": 32, "num_experts": 4, "router": {"top_k": 2}, "dispatch": {"name": dispatch},
        "experts": {"hidden_dim": 24, "kind": "gated_ffn" if gated else "ffn", "bias": False,
                    "compute": "kernels"}})
    with counting.CountingDevice():
        layer = MoELayer(config, LocalComm(), dtype=torch.bfloat16, device=device)
        x = torch.randn(tokens, 32).to(device, torch.bfloat16).requires_grad_()
        for _ in range(2):  # the first call makes what others keep
            layer.zero_grad()
            x.grad = None
            with LAUNCHES.noted() as forward:
                y = layer(x).output
            grad = torch.randn(tokens, 32).to(device, torch.bfloat16)
            with LAUNCHES.noted() as backward:
                y.backward(grad)
    return forward, backward


def main() -> None:
    """Totals of each problem; with --list by name."""
    install()
    for dispatch, gated in (("ragged", True), ("bounded", False)):
        forward, backward = step(dispatch, gated)
        print(dispatch, "gated" if gated else "plain", forward.total(), backward.total())
        if "--list" in sys.argv:
            print("  forward", dict(forward))
            print("  backward", dict(backward))


if __name__ == "__main__":
    main()
