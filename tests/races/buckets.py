"""Gradients in one flat tensor that ranks sum behind backward, as hooks of DDP and Megatron do it.

Real DDP does not run on the fake device: its reducer is C++, which takes a tensor's address and
hands it to a process group of the device, while tensors here are wrappers whose streams only Python
knows. A test of it needs two GPUs and torch's own detector (`TORCH_CUDA_SANITIZER=1`), which sees
what C++ launches, and no fault that depends on the order of hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from tests.races.ranks import StreamComm
from tests.streams.gpu import CUDA


class BucketHooks:
    """One bucket: the last hook of a backward pass begins the sum on the group's stream; `finish`
    lets the current stream wait for it.

    main_grad: gradients are in `parameter.main_grad`, as Megatron keeps them, and hooks take what
    backward has not added there; else in `parameter.grad`, as DDP has them with
    `gradient_as_bucket_view`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], comm: StreamComm,
                 main_grad: bool) -> None:
        self.comm, self.main_grad = comm, main_grad
        self.parameters = [p for p in parameters if p.requires_grad]
        self.flat_N = torch.zeros(sum(p.numel() for p in self.parameters), device=CUDA)
        self.missing, self.wait = len(self.parameters), lambda: self.flat_N
        parts = self.flat_N.split([p.numel() for p in self.parameters])
        for p, part_N in zip(self.parameters, parts, strict=True):
            if main_grad:
                p.main_grad, p.grad_added_to_main_grad = part_N.view_as(p), False
            p.register_post_accumulate_grad_hook(partial(self._added, part_N.view_as(p)))

    @torch.no_grad()
    def _added(self, view: Tensor, p: nn.Parameter) -> None:
        if not self.main_grad:
            view.copy_(p.grad)
        elif not p.grad_added_to_main_grad:
            view.add_(p.grad)
        p.grad = None if self.main_grad else view
        self.missing -= 1
        if not self.missing:
            self.wait: Callable[[], Tensor] = self.comm.start_all_reduce(self.flat_N)

    @torch.no_grad()
    def step(self) -> None:
        """Wait for the sums, and take a step with them."""
        assert not self.missing, "hooks that did not run"
        self.wait()
        for p in self.parameters:
            p.add_(p.main_grad if self.main_grad else p.grad, alpha=-0.01)
            p.grad = None
        self.flat_N.zero_()
        self.missing = len(self.parameters)
        for p in self.parameters if self.main_grad else ():
            p.grad_added_to_main_grad = False
