"""Training of a model larger than its device: weights stream through the device in segments.

A step runs the segments forward, then backward. While one segment computes all accumulated
micro-batches, the next segment's weights are copied in. Only the inputs of blocks are stored.
Backward computes each block again, with the same routing and random numbers, and steps its
optimizer at once. Source: ATOM (decentralized training systems where each peer has a whole model).
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
    """The result of a step.

    Attributes:
        losses: detached scalar losses of the micro-batches.
        balance: the sum of the blocks' own losses for each micro-batch, in the blocks' order.
        norm: norm of all gradients before clipping, or None without clipping.
    """

    losses: tuple[Tensor, ...]
    balance: tuple[Tensor, ...]
    norm: Tensor | None = None


class Clip(Protocol):
    """An interface for clipping gradients that are not in memory together, such as
    `PartedClip(1.0)` of `moe_plugin.training.gradients.sync`.
    """

    def add(self, place: int, parameters: Sequence[nn.Parameter]) -> None:
        """Add the gradients of a block to the norm; place: number of the block."""

    def norm(self) -> Tensor:
        """Return the norm of all gradients added since the last call."""

    def scale(self, gradients: Sequence[Tensor]) -> None:
        """Scale some of the gradients in place, according to their total norm."""

    def forget(self) -> None:
        """Discard the gradients added in a failed step."""


@dataclass
class BlockMeasurement:
    """Measurements of one block in the last step. On a GPU, times are launch times.

    Attributes:
        input_bytes: bytes stored for the backward pass of one micro-batch.
        forward_s, backward_s: seconds for all micro-batches; backward includes recomputation.
        step_s: seconds for the optimizer, including the wait for its state.
    """

    input_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0


class StreamedTrainer:
    """A trainer for a sequence of blocks whose weights stream through one device.

    Gradients, losses and weights are bitwise equal to those of a loop over the same micro-batches
    with all weights on the device, if the device's kernels are deterministic.

    Args:
        blocks: modules, or functions that create modules one at a time, so that the whole model is
            never in memory. Each module accepts the previous module's output tensor. A module
            returns a tensor, or (tensor, loss) with a scalar loss to add to the model's.
        loss: `loss(output, target)`, a scalar whose gradient is accumulated. To train on the mean
            over micro-batches, divide by their number in this function.
        optimizer: creates an optimizer for a block's parameters, such as
            `partial(torch.optim.AdamW, lr=1e-3, fused=True)`. Parameters must not affect each
            other.
        tier: storage of the weights: `HostTier` for host memory, where the optimizer runs, or
            `DiskTier` for files, if the device is the CPU.
        device: device that computes.
        segments: number of blocks in each segment. Defaults to one block per segment.
        resident: indices of blocks that always stay on the device.
        limit: bytes of the device for weights and, on a CPU, gradients and state of a block.
        throttle: maximal bytes/s of the tier, for tests and benchmarks.
        overlap: copy the next segment while a segment computes. Use False only for comparisons.
        seed: seed of the random numbers of a block, micro-batch and step (`randomness`).
        gradients: called with each block's module after its backward pass, to reduce gradients over
            ranks, such as `BlockGradients(world)` of `moe_plugin.hosts.plain.streamed`.
        clip: clips gradients by the norm of all gradients. Gradients are stored in the tier until
            the norm is known, so no optimizer steps during backward. Optional.
        skip_not_finite: with `clip`, a step whose norm is not finite changes neither weights nor
            optimizer state.
        main_weights: see `StreamedBlock`. `clip` then receives float32 gradients, but `gradients`
            sees only 16-bit gradients.
        float32_sums: with main weights, sum gradients of micro-batches in float32.
    Raises:
        ValueError: tier and device, segments or limit do not fit; two blocks share a parameter.
        TierError: the tier has no space.

    Attributes:
        blocks: the blocks, each with module and optimizer.
        profile: measurements of each block in the last step.
        copier: the copier, with counters of copies, bytes and stalls.
        steps: number of completed steps.
        micro_batch: index of the current micro-batch.
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
            raise ValueError("the model has 0 blocks; use at least 1 block")
        if skip_not_finite and clip is None:
            raise ValueError("skip_not_finite=True needs clip, because the norm of clip shows "
                             "whether a step is finite; set clip")
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
        """Number of blocks in each segment."""
        return tuple(len(segment) for segment in self._slots.segments)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all blocks' optimizers; a schedule sets `lr` in them."""
        return [group for block in self.blocks if block.optimizer is not None
                for group in block.optimizer.param_groups]

    @property
    def device_bytes(self) -> int:
        """Memory for weights, and on a CPU for gradients and state of one block."""
        return self._slots.nbytes + self.bytes_beside_segments

    def on_device(self) -> OnDevice:
        """Return the memory on the device, for reports."""
        return OnDevice(self.device_bytes)

    def use_segments(self, segments: Sequence[int]) -> None:
        """Cut the model into new segments between two steps; for errors see the class."""
        if sum(segments) != len(self.blocks) or min(segments, default=0) < 1:
            raise ValueError(f"segments of {list(segments)} blocks are not valid: each must have "
                             f">= 1 blocks, and their sum must be the model's {len(self.blocks)} "
                             "blocks")
        ends = [0]
        for count in segments:
            ends.append(ends[-1] + count)
        cut = [self.blocks[begin:end] for begin, end in pairwise(ends)]
        needed = sum(place_sizes(cut)) + self.bytes_beside_segments
        if self.limit is not None and needed > self.limit:
            raise ValueError(
                f"limit={self.limit} bytes is smaller than two segments of {list(segments)} blocks "
                f"with gradients and state of one block, {needed} bytes; use more segments or "
                "smaller blocks, or raise the limit")
        self.settle()
        if self._slots is not None:
            self._slots.clear()
        self._slots = Slots(cut, self.device, self.copier)

    @property
    def bytes_beside_segments(self) -> int:
        """The part of `device_bytes` outside of segments."""
        resident = sum(b.layout.nbytes + b.main_bytes for b in self.blocks if not b.streams)
        # gradients of a block, and with clipping those of the previous block while they are being
        # stored
        largest = max(b.layout.nbytes + b.main_bytes // 2 for b in self.blocks) * (
            1 if self.clip is None else 2)
        if self.clip is not None:  # gradients of resident blocks remain until the step
            largest += resident
        return resident + largest + (self._room.nbytes if isinstance(self.tier, DiskTier) else 0)

    def step(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> StepResult:
        """Train on micro-batches (input of the first block, target) and step the optimizers.

        Raises:
            ValueError: there are no micro-batches, or a block returns an invalid value.
            TierError: a copy failed. The tier has the weights from before the copy, and the other
                ranks end, too.
        """
        result = self.accumulate(micro_batches)
        if self.clip is not None:
            self.update(self.skip_not_finite and not bool(result.norm.isfinite()))
        return result

    @ends_all_ranks(TierError)
    def accumulate(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> StepResult:
        """Run the passes of a step. Without `clip`, the optimizers step, too.

        With `clip`, the tier stores the gradients for `update`. For errors see `step`.
        """
        if not micro_batches:
            raise ValueError("the step has 0 micro-batches; use at least 1 micro-batch")
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
        """Sum gradients of the block and of the resident blocks that may share weights with it."""
        for summed_block in (block, *(b for b in self.blocks if not b.streams)):
            if self.float32_sums:
                summed_block.sum_gradients()

    @ends_all_ranks(TierError)
    def update(self, skip: bool = False) -> None:
        """Step the optimizers with the clipped gradients of `accumulate`; for errors see `step`.

        skip: change neither weights nor states of optimizers and routers.
        """
        if skip:
            self.forget()
        else:
            with self._forgetting():
                self._step_clipped(self.clip)
        self.steps += 1

    def forget(self) -> None:
        """Drop the gradients of `accumulate` and the counts of routers."""
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
        if isinstance(self.tier, HostTier):  # the optimizers run in host memory
            turns: Iterator[StreamedBlock] = iter(self.blocks)
        else:
            turns = self._slots.blocks(range(len(self.segments)), False, self.overlap,
                                       self._fetch_state)
        for block in turns:
            self._step_block(block, clip.scale)

    @ends_all_ranks(TierError)
    def evaluate(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> StepResult:
        """Compute losses of micro-batches without training; modules keep their mode."""
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
        """Return a context with the random numbers of a block and micro-batch in the current step.

        Afterwards torch's own generators continue as if no numbers had been drawn.
        """
        self.micro_batch = micro_batch
        return seeded(self.device, seed_of(self.seed, self.steps, micro_batch, block))

    @ends_all_ranks(TierError)
    def replace_weights(self, change: Callable[[Iterator[list[Tensor]]], bool]) -> bool:
        """Change all weights outside of steps, or none of them.

        Args:
            change: receives an iterator over the blocks' weights, each a list of copies in host
                memory (parameters, then floating-point buffers). The function changes the copies in
                place before it requests the next block. True means that the model must use the
                changed weights.
        Returns: the result of `change`.
        Raises: TierError: the tier has no space for both versions; the weights are unchanged.
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
        """Discard weights on the device, because the stored weights were replaced."""
        self._slots.clear()

    @ends_all_ranks(TierError)
    def settle(self) -> None:
        """Wait for all writes. Raises `TierError` if a write failed."""
        for block in self.blocks:
            block.settle()

    def close(self) -> None:
        """Finish copies and free the tier's space; the weights are lost."""
        self.copier.close()
        self._slots.clear()
        self.tier.close()
