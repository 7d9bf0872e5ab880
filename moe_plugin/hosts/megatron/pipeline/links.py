"""Transfers between neighbouring stages that go on while a stage computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.comm.host_collectives import comm_of, named

AHEAD = 2  # receives that wait for a neighbour's next tensors; gloo moves bytes only into these


class Receiver:
    """The tensors that a neighbour sends in one direction, in order.

    Receives are posted ahead, so that a tensor arrives while others are computed.
    """

    def __init__(self, source: int, shapes: list[tuple[int, ...]], empty: Callable[..., Tensor],
                 group: Any, tag: int, what: str) -> None:
        self.source, self.group, self.tag, self.what = source, group, tag, what
        self._shapes, self._empty = deque(shapes), empty
        self._posted: deque[tuple[Tensor, Any]] = deque()
        self._post()

    def _post(self) -> None:
        while self._shapes and len(self._posted) < AHEAD:
            tensor = self._empty(self._shapes.popleft())
            work = dist.irecv(tensor, self.source, group=self.group, tag=self.tag)
            self._posted.append((tensor, work))

    def next(self) -> Tensor:
        """The next tensor, once it is there."""
        tensor, work = self._posted.popleft()
        with named(f"receive of {self.what}", self.group):
            work.wait()
        self._post()
        return tensor


class Sender:
    """Tensors to a neighbour in one direction. They are kept until they have left."""

    def __init__(self, target: int, group: Any, tag: int, what: str) -> None:
        self.target, self.group, self.tag, self.what = target, group, tag, what
        self._leaving: deque[tuple[Tensor, Any]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Start to send it; its storage must not change until `finish`."""
        kept = tensor.detach().contiguous()
        work = dist.isend(kept, self.target, group=self.group, tag=self.tag)
        self._leaving.append((kept, work))
        while self._leaving and self._leaving[0][1].is_completed():
            self._wait()

    def finish(self) -> None:
        """Wait until all have left."""
        while self._leaving:
            self._wait()

    def _wait(self) -> None:
        with named(f"send of {self.what}", self.group):
            self._leaving.popleft()[1].wait()


class Links:
    """A stage's transfers in one step: activations to the next stage, gradients back.

    Args:
        group: the stages, in order.
        backward_group: the same ranks, for gradients: NCCL runs the transfers of a group one after
            another, so that both directions in one could wait for each other without end.
        received, sent: shapes of the activations from the stage before, and of the gradients of
            those sent to the next one, each in the order in which they come.
        dtype, device: of what travels.
    """

    def __init__(self, group: Any, backward_group: Any, received: list[tuple[int, ...]],
                 sent: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self.group = group
        stage, stages = group.rank(), group.size()

        def empty(shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        before = dist.get_global_rank(group, stage - 1) if stage else None
        after = dist.get_global_rank(group, stage + 1) if stage < stages - 1 else None
        activations, gradients = "a stage's activations", "a stage's gradients"
        # of this step alone: what a step that failed has left over is not taken for another's
        forth = comm_of(group).state.next_tag(2)
        back = forth + 1
        self.inputs = before is not None and Receiver(before, received, empty, group, forth,
                                                      activations)
        self.input_grads = before is not None and Sender(before, backward_group, back, gradients)
        self.outputs = after is not None and Sender(after, group, forth, activations)
        self.output_grads = after is not None and Receiver(after, sent, empty, backward_group, back,
                                                           gradients)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for sender in (self.outputs, self.input_grads):
            if sender:
                sender.finish()
