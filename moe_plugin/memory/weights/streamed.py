"""A model larger than its device: blocks of weights stream through it, segment by segment.

A step goes through the segments forward, then backward. While one segment computes all accumulated
micro-batches, the next one's weights are copied in. Only the inputs of blocks are kept; backward
computes each block again, with the same routing and the same random numbers, and steps its
optimizer at once. Source: ATOM (systems of decentralised training of whole models on peers).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_plugin.comm.watchdog import ends_all_ranks
from moe_plugin.memory.copier import Copier, OnDevice
from moe_plugin.memory.passes import BlockPasses, give_back_free_memory
from moe_plugin.memory.tiers import DiskTier, HostTier, Tier, TierError
from moe_plugin.memory.weights.blocks import MakeOptimizer, Scale, StreamedBlock
from moe_plugin.memory.weights.optimizer_state import OptimizerStateBuffer
from moe_plugin.memory.weights.refusal import check_shared, check_tier, reduction
from moe_plugin.memory.weights.slots import Slots, place_sizes
from moe_plugin.routing import finish_step_of_any, forget_step
from moe_plugin.utils.determinism import seed_of, seeded

Loss = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class StepResult:
    """What a step computed.

    Attributes:
        losses: of each micro-batch, scalars, detached.
        balance: the sum of the blocks' own losses for each micro-batch, in the blocks' order.
        norm: of all gradients before clipping; None: they were not clipped.
    """

    losses: tuple[Tensor, ...]
    balance: tuple[Tensor, ...]
    norm: Tensor | None = None


class Clip(Protocol):
    """Clips gradients that are not in memory together, e.g. `moe_plugin.training.gradients.sync`'s
    `PartedClip(1.0)`.
    """

    def add(self, place: int, parameters: Sequence[nn.Parameter]) -> None:
        """Take the gradients of a block; place: its number."""

    def norm(self) -> Tensor:
        """The norm of all that was taken since the last call."""

    def scale(self, gradients: Sequence[Tensor]) -> None:
        """Scale some of the gradients in place, as their norm says."""

    def forget(self) -> None:
        """Drop what was taken, of a step that failed."""


@dataclass
class BlockMeasurement:
    """What one block took, in the last step.

    Attributes:
        input_bytes: kept of one micro-batch for backward.
        forward_s, backward_s: of all micro-batches; backward with the recomputation.
        step_s: of its optimizer, with waiting for its state. On a GPU times are those of launches.
    """

    input_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0


class StreamedTrainer:
    """Trains a sequence of blocks whose weights stream through one device.

    Gradients, losses and weights equal those of a loop over the same micro-batches with all
    weights on the device, bit for bit, where the device's kernels repeat their results.

    Args:
        blocks: modules, or functions that make them one after another, so that the whole model
            never lies in memory. Each takes the tensor that the one before it returned and returns
            a tensor, or (tensor, loss) with a scalar loss that is added to the model's.
        loss: `loss(output, target)`, a scalar whose gradient is accumulated; divide by the number
            of micro-batches there, where their mean is wanted.
        optimizer: makes one for a block's parameters, e.g. `partial(torch.optim.AdamW, lr=1e-3,
            fused=True)`; one that treats each parameter by itself.
        tier: where the weights are. `HostTier`: in host memory, where the optimizer steps;
            `DiskTier`: in files, for a device that is the CPU.
        device: that computes.
        segments: numbers of blocks that are on the device together; None: one block each.
        resident: numbers of blocks that always stay on the device.
        limit: bytes of the device for weights and, on a CPU, gradients and state of a block.
        throttle: bytes/s of the tier, at most, for tests and benchmarks.
        overlap: copy the next segment while one computes; False only to show what that brings.
        seed: of the random numbers of a block in a micro-batch of a step (`randomness`).
        gradients: called with each block's module after its backward pass, to reduce gradients
            over ranks, the same on all of them, e.g. `BlockGradients(world)` of
            `moe_plugin.hosts.plain.streamed`.
        clip: of the gradients by the norm of all of them; they wait in the tier until it is known,
            so that nothing is stepped inside backward. None: no clipping.
        skip_not_finite: with `clip`, a step whose norm is not finite changes no weight and no
            state of an optimizer.
        main_weights: see `StreamedBlock`. `clip` then gets float32 gradients, but `gradients` sees
            those of 16 bits alone.
        float32_sums: with main weights, gradients of micro-batches are summed in float32, not in
            the 16 bits of their parameter.
    Raises:
        ValueError: tier and device, segments or limit do not fit; two blocks share a parameter.
        TierError: the tier has no room.

    Attributes:
        blocks: with module and optimizer of each.
        profile: what each took in the last step.
        copier: with counters of copies, bytes and stalls.
        steps: steps done.
        micro_batch: number of the one whose turn it is.
    """

    def __init__(self, blocks: Sequence[nn.Module | Callable[[], nn.Module]], loss: Loss,
                 optimizer: MakeOptimizer, tier: Tier, *, device: torch.device | str = "cpu",
                 segments: Sequence[int] | None = None, resident: Sequence[int] = (),
                 limit: int | None = None, throttle: float | None = None, overlap: bool = True,
                 seed: int = 0, gradients: Callable[[nn.Module], object] | None = None,
                 clip: Clip | None = None, skip_not_finite: bool = False,
                 main_weights: bool = False, float32_sums: bool = False) -> None:
        self.device, self.tier, self.limit = torch.device(device), tier, limit
        check_tier(tier, self.device)
        if not blocks:
            raise ValueError("a model of 0 blocks: give at least 1")
        if skip_not_finite and clip is None:
            raise ValueError("skip_not_finite=True without clip, whose norm says what is finite: "
                             "give one")
        self.copier = Copier(self.device, throttle)
        self.overlap, self.seed, self.steps, self.micro_batch = overlap, seed, 0, 0
        self.gradients, self.clip = reduction(gradients), clip
        self.skip_not_finite, self.float32_sums = skip_not_finite, float32_sums
        self._room = OptimizerStateBuffer()
        self._slots: Slots | None = None
        self.blocks: list[StreamedBlock] = []
        for number, block in enumerate(blocks):
            module = (block if isinstance(block, nn.Module) else block()).to(self.device)
            check_shared(self.blocks, number, module)
            self.blocks.append(StreamedBlock(number, module, optimizer,
                                             None if number in resident else tier, main_weights))
            give_back_free_memory()
        self._passes = BlockPasses([block.module for block in self.blocks], loss, self.randomness)
        self.profile = [BlockMeasurement() for _ in self.blocks]
        self.use_segments([1] * len(blocks) if segments is None else segments)

    @property
    def segments(self) -> tuple[int, ...]:
        """Numbers of blocks of the segments."""
        return tuple(len(segment) for segment in self._slots.segments)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all blocks' optimizers: a schedule sets `lr` there."""
        return [group for block in self.blocks if block.optimizer is not None
                for group in block.optimizer.param_groups]

    @property
    def device_bytes(self) -> int:
        """Memory for weights, and on a CPU for gradients and state of one block."""
        return self._slots.nbytes + self.bytes_beside_segments

    def on_device(self) -> OnDevice:
        """For reports."""
        return OnDevice(self.device_bytes)

    def use_segments(self, segments: Sequence[int]) -> None:
        """Cut the model again, between two steps; arguments and errors as of the class."""
        if sum(segments) != len(self.blocks) or min(segments, default=0) < 1:
            raise ValueError(f"segments of {list(segments)} blocks: must be >= 1 each and sum up "
                             f"to the model's {len(self.blocks)}")
        ends = [0]
        for count in segments:
            ends.append(ends[-1] + count)
        cut = [self.blocks[begin:end] for begin, end in pairwise(ends)]
        needed = sum(place_sizes(cut)) + self.bytes_beside_segments
        if self.limit is not None and needed > self.limit:
            raise ValueError(
                f"limit={self.limit} bytes is smaller than two segments of {list(segments)} blocks "
                f"with gradients and state of one block, {needed} bytes; cut the model into more "
                "segments or smaller blocks, or raise the limit")
        self.settle()
        if self._slots is not None:
            self._slots.clear()
        self._slots = Slots(cut, self.device, self.copier)

    @property
    def bytes_beside_segments(self) -> int:
        """Of `device_bytes`, what no segment holds."""
        resident = sum(b.layout.nbytes + b.main_bytes for b in self.blocks if not b.streams)
        # gradients, and those of the block before while they are put aside
        largest = max(b.layout.nbytes + b.main_bytes // 2 for b in self.blocks) * (
            1 if self.clip is None else 2)
        if self.clip is not None:  # theirs stay until the step
            largest += resident
        return resident + largest + (self._room.nbytes if isinstance(self.tier, DiskTier) else 0)

    def step(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> StepResult:
        """Train on micro-batches (input of the first block, target) and step the optimizer.

        Raises:
            ValueError: there is no micro-batch, or a block returns something else than it may.
            TierError: a copy failed; weights are held as they were before it, and the other ranks
                end, too.
        """
        result = self.accumulate(micro_batches)
        if self.clip is not None:
            self.update(self.skip_not_finite and not bool(result.norm.isfinite()))
        return result

    @ends_all_ranks(TierError)
    def accumulate(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> StepResult:
        """The passes of a step: with `clip` its gradients wait in the tier for `update`; without
        it, this is the whole step. Arguments and errors as of `step`.
        """
        if not micro_batches:
            raise ValueError("a step of 0 micro-batches: give at least 1")
        self._passes.begin(micro_batches)
        self._forward(range(len(self.blocks) - 1))
        for number, size in enumerate(self._passes.kept_bytes):
            self.profile[number].input_bytes = size
        with self._forgetting():
            self._backward()
            norm = None if self.clip is None else self.clip.norm()
        self.steps += self.clip is None
        return StepResult(*self._passes.end(), norm)

    def _backward(self) -> None:
        order = range(len(self.segments))[::-1]
        before = self._fetch_state if self.clip is None else lambda block: None
        last: StreamedBlock | None = None
        for block in self._slots.blocks(order, True, self.overlap, before):
            with self._timed(block, "backward_s"):
                self._passes.backward(block.number,
                                      functools.partial(self._sum_gradients, block))
                block.sum_gradients()
                self.gradients(block.module)
            if self.clip is None:
                self._step_block(block)
                continue
            self.clip.add(block.number, block.graded)
            if last is not None:
                last.wait_kept()
            block.keep_gradients(self.copier)
            block.forget_memory()
            last = block

    def _sum_gradients(self, block: StreamedBlock) -> None:
        """After a micro-batch, of the block and of those that it may share a weight with."""
        for each in (block, *(b for b in self.blocks if not b.streams)):
            if self.float32_sums:
                each.sum_gradients()

    @ends_all_ranks(TierError)
    def update(self, skip: bool = False) -> None:
        """Step the optimizers with the clipped gradients of `accumulate`.

        skip: no weight and no state of an optimizer or a router changes. Errors as of `step`.
        """
        if skip:
            self.forget()
        else:
            with self._forgetting():
                self._step_clipped(self.clip)
        self.steps += 1

    def forget(self) -> None:
        """Drop the gradients of `accumulate`, and what routers counted."""
        for block in self.blocks:
            block.forget_gradients()
            forget_step(block.module)
        if self.clip is not None:
            self.clip.forget()

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def _step_clipped(self, clip: Clip) -> None:
        if isinstance(self.tier, HostTier):  # where the optimizers step
            turns: Iterator[StreamedBlock] = iter(self.blocks)
        else:
            turns = self._slots.blocks(range(len(self.segments)), False, self.overlap,
                                       self._fetch_state)
        for block in turns:
            self._step_block(block, clip.scale)

    @ends_all_ranks(TierError)
    def evaluate(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> StepResult:
        """Losses of micro-batches without training; modules stay in the mode that they are in."""
        self._passes.begin(micro_batches)
        self._forward(range(len(self.blocks)), keep=False)
        self._passes.losses()
        return StepResult(*self._passes.end())

    def _forward(self, numbers: range, keep: bool = True) -> None:
        for block in self._slots.blocks(range(len(self.segments)), overlap=self.overlap):
            if block.number in numbers:
                with self._timed(block, "forward_s"):
                    self._passes.forward(block.number, keep)
                block.forget_memory()

    def _fetch_state(self, block: StreamedBlock) -> None:
        if self.overlap:
            block.fetch_state(self.copier, self._room)

    def _step_block(self, block: StreamedBlock, scale: Scale | None = None) -> None:
        with self._timed(block, "step_s"):
            new = block.step(self.copier, self._room, scale)
        finish_step_of_any(block.module)
        block.forget_memory()
        if isinstance(self.tier, DiskTier):
            give_back_free_memory()
        if not new:
            self._slots.stale(block)
        if not self.overlap:
            block.settle()

    @contextmanager
    def _timed(self, block: StreamedBlock, field: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        setattr(self.profile[block.number], field, time.perf_counter() - started)

    def randomness(self, micro_batch: int, block: int) -> AbstractContextManager[None]:
        """The random numbers of a block in a micro-batch of the present step; torch's own generator
        goes on afterwards as if nothing had been drawn.
        """
        self.micro_batch = micro_batch
        return seeded(self.device, seed_of(self.seed, self.steps, micro_batch, block))

    @ends_all_ranks(TierError)
    def replace_weights(self, change: Callable[[Iterator[list[Tensor]]], bool]) -> bool:
        """Change all weights outside of steps, or none.

        Args:
            change: takes the blocks' weights one block after another, each a list of copies in host
                memory (parameters, then buffers of floating-point numbers), which it changes in
                place before it takes the next; True: the changed ones are the model's.
        Returns: what `change` returned.
        Raises: TierError: the tier has no room for both; weights are as they were.
        """
        self.settle()
        staged: list[Callable[[bool], None]] = []

        def copies() -> Iterator[list[Tensor]]:
            for block in self.blocks:
                weights, buffers = block.read(), block.float_buffers()
                copied = [x.cpu().clone() for x in buffers]
                yield [*weights, *copied]
                staged.append(block.stage(weights, copied))

        taken = False
        try:
            taken = change(copies())
        finally:
            for finish in staged:
                finish(taken)
        if taken:
            self.forget_places()
        return taken

    def forget_places(self) -> None:
        """Weights were replaced: what is on the device is old."""
        self._slots.clear()

    @ends_all_ranks(TierError)
    def settle(self) -> None:
        """Wait until all that is being written is written. `TierError`: it was not."""
        for block in self.blocks:
            block.settle()

    def close(self) -> None:
        """Finish copies and give the tier's room back; the weights are gone."""
        self.copier.close()
        self._slots.clear()
        self.tier.close()
