"""Gradients in flat tensors that ranks sum behind backward: torch's DDP, and Megatron's buckets.

DDP's reducer is C++, but what it does to tensors of the fake device (a copy of each gradient into
its bucket, views, the copy back) goes through torch's dispatcher, where the device notes it. Its
own exchange would hand a tensor's address to a process group, and these have none: a communication
hook, DDP's seam for it, begins the sum on the group's stream. Not seen: how torch's process group
of NCCL orders its streams, which `TORCH_CUDA_SANITIZER=1` sees on two GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.fake_gpu.gpu import CUDA
from tests.fake_gpu.stream_ranks import StreamComm


def ddp(layer: nn.Module, comm: StreamComm, views: bool) -> DistributedDataParallel:
    """A layer in DDP with several buckets. views: gradients are views of them."""
    model = DistributedDataParallel(layer, process_group=comm.group.group, bucket_cap_mb=0.001,
                                    gradient_as_bucket_view=views, init_sync=False)
    model.register_comm_hook(comm, summed_behind)
    return model


def summed_behind(comm, bucket):  # DDP reads annotations as types, which here are words
    """The sum of a bucket, begun on the group's stream; as with NCCL the main stream waits for it
    where DDP takes the results, after all hooks.
    """
    wait, done = comm.start_all_reduce(bucket.buffer()), torch.futures.Future()
    torch.autograd.Variable._execution_engine.queue_callback(wait)
    done.set_result(bucket.buffer())
    return done


class BucketHooks:
    """One bucket of `parameter.main_grad`, as Megatron keeps gradients; hooks take what backward
    has not added there. The last hook of a backward pass begins the sum on the group's stream;
    `step` lets the current stream wait for it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], comm: StreamComm) -> None:
        self.comm = comm
        self.parameters = [p for p in parameters if p.requires_grad]
        self.flat_N = torch.zeros(sum(p.numel() for p in self.parameters), device=CUDA)
        self.missing, self.wait = len(self.parameters), lambda: self.flat_N
        parts = self.flat_N.split([p.numel() for p in self.parameters])
        for p, part_N in zip(self.parameters, parts, strict=True):
            p.main_grad, p.grad_added_to_main_grad = part_N.view_as(p), False
            p.register_post_accumulate_grad_hook(partial(self._added, part_N.view_as(p)))

    @torch.no_grad()
    def _added(self, view: Tensor, p: nn.Parameter) -> None:
        if not p.grad_added_to_main_grad:
            view.add_(p.grad)
        p.grad = None
        self.missing -= 1
        if not self.missing:
            self.wait: Callable[[], Tensor] = self.comm.start_all_reduce(self.flat_N)

    @torch.no_grad()
    def step(self) -> None:
        """Wait for the sums, and take a step with them."""
        assert not self.missing, "hooks that did not run"
        self.wait()
        for p in self.parameters:
            p.add_(p.main_grad, alpha=-0.01)
            p.grad_added_to_main_grad = False
        self.flat_N.zero_()
        self.missing = len(self.parameters)
