"""A step that measures its passes, its transfers, and what backward needs of a micro-batch."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_plugin.comm.host_collectives import gather_objects
from moe_plugin.hosts.megatron.pipeline.executor import Step, transfer_s
from moe_plugin.planner.pipeline.choice import StageProfile
from moe_plugin.utils.machine import wait_for_device

HEADROOM = 0.9  # of the free memory


class MeasuredStep(Step):
    """See `Step`.

    Attributes:
        forward_s, backward_s: seconds of each pass without waiting for transfers; the first forward
            pass counts where it is the only one.
        activation_bytes: what it saved for its backward pass.
        transfer_s: of a micro-batch's activations to the next stage (on the last one: from the
            stage before).
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []
        self.activation_bytes = 0
        self._waited_s = 0.0
        for receiver in (self.links.inputs, self.links.output_grads):
            if receiver:
                receiver.next = self._timed(receiver.next)  # type: ignore[method-assign]

    def _timed(self, receive: Any) -> Any:

        def call() -> Tensor:
            start = time.perf_counter()
            tensor = receive()
            wait_for_device(self.device)
            self._waited_s += time.perf_counter() - start
            return tensor

        return call

    def _now(self) -> float:
        # the clock without the time spent waiting for tensors
        wait_for_device(self.device)
        return time.perf_counter() - self._waited_s

    def forward(self, batch: int, number: int) -> None:
        """See `Step`."""
        start = self._now()
        if batch == 0:
            saved = _SavedBytes()
            with saved:
                super().forward(batch, number)
            self.activation_bytes = saved.total
            if self.batches > 1:
                return  # counting takes time
        else:
            super().forward(batch, number)
        self.forward_s.append(self._now() - start)

    def backward(self, batch: int, number: int) -> None:
        """See `Step`."""
        start = self._now()
        super().backward(batch, number)
        self.backward_s.append(self._now() - start)


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of storages that autograd saves, each once, without those of parameters."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    @property
    def total(self) -> int:
        """Bytes so far."""
        return sum(self._storages.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor  # some of Megatron's functions read its attributes in backward
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would keep its own graph alive


def agreed(step: MeasuredStep, group: Any, limit: int | None) -> StageProfile:
    """The same profile on all ranks: of each stage the slowest and largest rank's numbers.

    limit: bytes for activations; None: on a GPU what is free, on a CPU any. Collective over all
    ranks.
    """
    own = {
        "stage": group.rank(), "forward_s": statistics.median(step.forward_s),
        "backward_s": statistics.median(step.backward_s),
        "transfer_s": transfer_s(step, step.shapes()[1]),
        "activation_bytes": step.activation_bytes, "memory_bytes": _free(step, limit),
    }
    every = gather_objects(own, "what a step of auto measured")
    stages = [[row for row in every if row["stage"] == stage] for stage in range(group.size())]

    def worst(name: str) -> list[Any]:
        return [max(row[name] for row in rows) for rows in stages]

    known = [row["memory_bytes"] for row in every if row["memory_bytes"] is not None]
    return StageProfile(
        name="measured", micro_batches=step.batches, forward_s=worst("forward_s"),
        backward_s=worst("backward_s"), transfer_s=max(worst("transfer_s")),
        activation_bytes=worst("activation_bytes"), memory_bytes=min(known, default=0),
        transport="nccl" if dist.get_backend(group) == "nccl" else "gloo")


def _free(step: MeasuredStep, limit: int | None) -> int | None:
    if limit is not None or step.device.type != "cuda":
        return limit
    free, _ = torch.cuda.mem_get_info(step.device)
    cached = torch.cuda.memory_reserved(step.device) - torch.cuda.memory_allocated(step.device)
    # 1F1B has just fitted
    return max(int(HEADROOM * (free + cached)), step.activation_bytes * step.most_alive)
