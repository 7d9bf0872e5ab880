"""The problem of choosing which activations to keep, recompute or swap under a memory limit
(KARMA).

Source: Wahib et al., "Scaling Distributed Deep Learning Workloads beyond the Memory Capacity with
KARMA", SC 2020.

The forward pass computes the blocks in order. After the forward pass of a swapped block, its
activations are copied from the device to slower memory. The backward pass computes the blocks in
reverse order. The activations of a swapped block are copied back to the device before the block's
backward pass, while other blocks are being computed or recomputed. A copy to the device starts once
enough memory is free, not counting memory that other blocks need before the copied activations are
used. All points at which the step waits for free memory are determined before it starts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from moe_plugin.planner.offload.schedule import ModelProfile, OffloadSchedule, OffloadStep
from moe_plugin.utils.messages import short

KEEP, RECOMPUTE, SWAP = DECISIONS = ("keep", "recompute", "swap")
Decisions = tuple[str, ...]  # one decision per block


@dataclass(frozen=True, kw_only=True)
class SwapBlock:
    """A block of a model, with its sizes and with its times in seconds.

    Attributes:
        name: name of the block.
        forward_s, backward_s: times of the block's forward pass and backward pass.
        activation_bytes: number of bytes that the forward pass stores for the backward pass,
            including the block's input.
        kept_bytes: number of bytes that remain stored if the block is recomputed.
        workspace_bytes: number of additional bytes that the device needs while the forward or
            backward pass of the block runs.
        swap_out_s, swap_in_s: times to copy the block's activations from the device and to the
            device. Infinity means that the block cannot be swapped.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    kept_bytes: int = 0
    workspace_bytes: int = 0
    swap_out_s: float = math.inf
    swap_in_s: float = math.inf

    def __post_init__(self) -> None:
        for f in fields(self)[1:]:
            value, swap = getattr(self, f.name), f.name.startswith("swap")
            if not value >= 0 or (value == math.inf and not swap):
                raise ValueError(f"block {short(self.name)}: {f.name}={value} must be a number >= 0"
                                 + (" or inf" if swap else ""))
        if self.kept_bytes > self.activation_bytes:
            raise ValueError(f"block {short(self.name)}: kept_bytes={self.kept_bytes} must be at "
                             f"most activation_bytes={self.activation_bytes}")

    @property
    def choices(self) -> tuple[str, ...]:
        """Decisions (keep, recompute or swap) that are possible for this block."""
        return DECISIONS if self.swap_out_s + self.swap_in_s < math.inf else (KEEP, RECOMPUTE)


def blocks_of(profile: ModelProfile) -> list[SwapBlock]:
    """Convert the blocks of a profile to `SwapBlock` objects. Copy times are computed from the
    bandwidths in the profile.
    """
    return [SwapBlock(name=b.name, forward_s=b.forward_s, backward_s=b.backward_s,
                      activation_bytes=b.activation_bytes, kept_bytes=b.kept_bytes,
                      workspace_bytes=b.workspace_bytes,
                      swap_out_s=_copy_s(b.activation_bytes, profile.out_bytes_s),
                      swap_in_s=_copy_s(b.activation_bytes, profile.in_bytes_s))
            for b in profile.blocks]


def _copy_s(size: int, bytes_s: float) -> float:
    return size / bytes_s if bytes_s else math.inf


@dataclass(frozen=True)
class Waits:
    """The points at which a training step waits for copies, so that it stays within the memory
    limit. Each list has one entry per block. The entry -1 means that the block does not wait.

    Attributes:
        forward: for each block, the block whose copy from the device must end before the forward
            pass starts.
        backward: for each block, the block whose copy from the device must end before the backward
            pass starts.
        start: for each swapped block, the block that the backward pass must have reached before the
            copy to the device may start.
        started: for each block, the last copy from the device that must have ended when the
            backward pass reaches this block.
    """

    forward: list[int]
    backward: list[int]
    start: list[int]
    started: list[int]


@dataclass(frozen=True)
class SwapProblem:
    """The blocks of a model, in the order of the forward pass, and the memory for their
    activations.

    Attributes:
        blocks: the blocks.
        room: number of bytes that are available for activations and workspace.
        duplex: whether copies to and from the device can run at the same time.
    """

    blocks: tuple[SwapBlock, ...]
    room: int
    duplex: bool = True

    @cached_property
    def compute_s(self) -> float:
        """Time in seconds of a training step that keeps all activations."""
        return sum(b.forward_s + b.backward_s for b in self.blocks)

    def waits(self, decisions: Decisions) -> Waits | None:
        """Return where a step with the given decisions must wait, or None if the decisions do not
        fit in memory even with waiting.
        """
        size = len(self.blocks)
        slack, forward, backward = [0] * size, [-1] * size, [-1] * size
        start, started = [-1] * size, [-1] * size
        held, queued = 0, 0  # bytes that stay on the device, and bytes waiting to be copied out
        pending: deque[int] = deque()
        for j, (block, decision) in enumerate(zip(self.blocks, decisions, strict=True)):
            slack[j] = self.room - held - block.activation_bytes - block.workspace_bytes
            if slack[j] < 0:
                return None
            while queued > slack[j]:
                forward[j] = pending.popleft()
                queued -= self.blocks[forward[j]].activation_bytes
            if decision == SWAP:
                pending.append(j)
                queued += block.activation_bytes
            else:
                held += block.activation_bytes if decision == KEEP else block.kept_bytes
        for i in reversed(range(size)):
            if decisions[i] == SWAP:
                start[i] = self._earliest(i, slack)
        last = -1
        for j in reversed(range(size)):
            while queued > slack[j]:
                last = backward[j] = pending.popleft()
                queued -= self.blocks[last].activation_bytes
            started[j] = last
        return Waits(forward, backward, start, started)

    def _earliest(self, i: int, slack: list[int]) -> int:
        """Return the earliest point in the backward pass from which the activations of block i fit
        in memory.

        The size of these activations is subtracted from `slack`.
        """
        turn, size = i, self.blocks[i].activation_bytes
        while turn + 1 < len(slack) and slack[turn + 1] >= size:
            turn += 1
            slack[turn] -= size
        return turn

    def seconds(self, decisions: Decisions) -> float:
        """Return the time in seconds of the training step with the given decisions, or inf if the
        step does not fit in memory.
        """
        waits = self.waits(decisions)
        if waits is None:
            return math.inf
        now = out = 0.0
        size = len(self.blocks)
        ended = [0.0] * (size + 1)  # ends of copies out; index -1, "no wait", reads the last entry
        for j, block in enumerate(self.blocks):
            now = max(now, ended[waits.forward[j]]) + block.forward_s
            if decisions[j] == SWAP:
                ended[j] = out = max(out, now) + block.swap_out_s
        arrived = 0.0 if self.duplex else out
        reached = [0.0] * size  # start of each block's turn in backward
        for j in reversed(range(size)):
            block, reached[j] = self.blocks[j], now
            now = max(now, ended[waits.backward[j]])
            if decisions[j] == SWAP:
                turn = waits.start[j]
                begin = max(arrived, ended[j], reached[turn], ended[waits.started[turn]])
                arrived = begin + block.swap_in_s
                now = max(now, arrived)
            elif decisions[j] == RECOMPUTE:
                now += block.forward_s
            now += block.backward_s
        return now

    def schedule(self, decisions: Decisions, base: int = 0) -> OffloadSchedule:
        """Return the schedule of a training step with the given decisions.

        Args:
            decisions: for each block, one of keep, recompute or swap.
            base: number of bytes in use on the device in addition to `room`. Defaults to 0.

        Raises:
            ValueError: If the decisions do not fit in memory.
        """
        waits = self.waits(decisions)
        if waits is None:
            raise ValueError(f"the decisions {short(decisions)} do not fit into {self.room} bytes. "
                             "Recompute or swap more blocks")
        steps: list[OffloadStep] = []
        for j, decision in enumerate(decisions):
            steps += self._forward(j, decision, waits)
        for j in reversed(range(len(decisions))):
            steps += self._backward(j, decision=decisions[j], waits=waits)
        return OffloadSchedule(tuple(steps), self.room + base, base, self.duplex)

    def _out(self, block: int) -> tuple[str, ...]:
        return (f"swap out {self.blocks[block].name}",) if block >= 0 else ()

    def _forward(self, j: int, decision: str, waits: Waits) -> list[OffloadStep]:
        block = self.blocks[j]
        left = block.activation_bytes - block.kept_bytes if decision == RECOMPUTE else 0
        name = f"forward {block.name}"
        steps = [OffloadStep(name, "compute", block.forward_s, self._out(waits.forward[j]),
                             block.activation_bytes + block.workspace_bytes,
                             left + block.workspace_bytes,
                             block.name)]
        if decision == SWAP:
            steps.append(OffloadStep(self._out(j)[0], "out", block.swap_out_s, (name,),
                                     frees=block.activation_bytes, block=block.name))
        return steps

    def _backward(self, j: int, decision: str, waits: Waits) -> list[OffloadStep]:
        block, after = self.blocks[j], self._out(waits.backward[j])
        steps, space = [], block.workspace_bytes
        if decision == SWAP:
            name, turn = f"swap in {block.name}", waits.start[j]
            last = turn == len(self.blocks) - 1
            before = (f"forward {self.blocks[turn].name}" if last
                      else f"backward {self.blocks[turn + 1].name}")
            begin = (*self._out(j), before, *self._out(waits.started[turn]))
            steps.append(OffloadStep(name, "in", block.swap_in_s, begin,
                                     takes=block.activation_bytes,
                                     block=block.name))
            after = (*after, name)
        elif decision == RECOMPUTE:
            again = block.activation_bytes - block.kept_bytes
            steps.append(OffloadStep(f"recompute {block.name}", "compute", block.forward_s, after,
                                     again + space, space, block.name))
        steps.append(OffloadStep(f"backward {block.name}", "compute", block.backward_s, after,
                                 space,
                                 block.activation_bytes + space, block.name))
        return steps


def least_bytes(blocks: Sequence[SwapBlock]) -> int:
    """Return the smallest number of bytes for which some combination of decisions fits in memory.
    """
    held = most = 0
    for block in blocks:
        most = max(most, held + block.activation_bytes + block.workspace_bytes)
        held += 0 if SWAP in block.choices else block.kept_bytes
    return most
