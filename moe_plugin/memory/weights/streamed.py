"""Training of a model whose weights do not fit in device memory. The weights are streamed to the
device in segments, which consist of consecutive blocks.

A step runs the forward pass through all segments, and then the backward pass. While a segment is
computed for all micro-batches, the weights of the next segment are copied to the device. Only the
blocks' inputs are stored. The backward pass recomputes each block with the same routing and the
same random numbers, and then runs the block's optimizer. Source: ATOM.
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
    """The losses, balance losses and gradient norm of a training step.

    Attributes:
        losses: scalar loss of each micro-batch, detached from the graph.
        balance: for each micro-batch, the sum of the losses returned by the blocks, in order.
        norm: norm of all gradients before clipping, or None if gradients are not clipped.
    """

    losses: tuple[Tensor, ...]
    balance: tuple[Tensor, ...]
    norm: Tensor | None = None


class Clip(Protocol):
    """An interface for clipping gradients that are never all in memory at the same time, like
    `PartedClip(1.0)` of `moe_plugin.training.gradients.sync`.
    """

    def add(self, place: int, parameters: Sequence[nn.Parameter]) -> None:
        """Add the gradients of the block with index `place` to the norm."""

    def norm(self) -> Tensor:
        """Return the norm of all gradients added since the last call."""

    def scale(self, gradients: Sequence[Tensor]) -> None:
        """Scale the given gradients in place, according to the norm of all gradients."""

    def forget(self) -> None:
        """Discard the gradients added during a failed step."""


@dataclass
class BlockMeasurement:
    """Measurements of one block in the last step. On a GPU, only kernel launches are timed.

    Attributes:
        input_bytes: number of bytes stored per micro-batch for the backward pass.
        forward_s, backward_s: time in seconds over all micro-batches, including recomputation.
        step_s: time in seconds of the optimizer step, including the wait for the optimizer state.
    """

    input_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0


class StreamedTrainer:
    """A trainer that streams the weights of a sequence of blocks to one device.

    With deterministic kernels, gradients, losses and weights are bitwise equal to those of a loop
    over the same micro-batches in which all weights are on the device.

    Args:
        blocks: modules, or functions that create them. Functions are called one at a time, so that
            the whole model is never in memory. Each module receives the output of the previous
            module, and returns a tensor, or a pair (tensor, scalar loss to add to the loss).
        loss: function `loss(output, target)` that returns a scalar. Gradients are summed over
            micro-batches. To average them instead, divide by the number of micro-batches.
        optimizer: function that creates an optimizer for the parameters of one block, for example
            `partial(torch.optim.AdamW, lr=1e-3, fused=True)`. The optimizer must update each
            parameter independently of all other parameters.
        tier: tier that stores the weights. With `HostTier`, the weights are stored and the
            optimizer runs in host memory. With `DiskTier` (CPU only), weights are in files.
        device: device that computes the blocks.
        segments: number of blocks in each segment. Defaults to one block per segment.
        resident: indices of the blocks that always stay on the device.
        limit: maximum number of bytes on the device for weights; see `device_bytes`.
        throttle: maximum bandwidth of the tier in bytes per second. Intended for tests.
        overlap: True to copy a segment while the previous segment is computed.
        seed: seed that determines a separate seed for each step, micro-batch and block.
        gradients: function that reduces the gradients of a module over ranks after the module's
            backward pass, for example `BlockGradients(world)` of `moe_plugin.hosts.plain.streamed`.
        clip: optional. Clips gradients using the norm of all gradients. The tier stores gradients
            until the norm is known, so optimizers run after the whole backward pass.
        skip_not_finite: True to skip a step if the norm computed by `clip` is not finite.
        main_weights: see `StreamedBlock`. With main weights, `clip` receives gradients in float32,
            whereas `gradients` receives only the 16-bit gradients.
        float32_sums: True to sum gradients over micro-batches in float32 for main weights.
    Raises:
        ValueError: If the tier, segments or limit are invalid, or if blocks share a parameter.
        TierError: If the tier has no space.

    Attributes:
        blocks: list of `StreamedBlock` objects, which contain the modules and the optimizers.
        profile: measurements of each block in the last step.
        copier: copier of the weights, which counts copies, bytes and stalls.
        steps: number of completed steps.
        micro_batch: index of the micro-batch that is currently computed.
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
            raise ValueError("skip_not_finite=True needs clip, because the norm that clip computes "
                             "shows whether all gradients are finite; pass clip")
        self.copier = Copier(self.device, throttle)
        self.overlap, self.seed, self.steps, self.micro_batch = overlap, seed, 0, 0
        self.gradients, self.clip = reduction(gradients), clip
        self.skip_not_finite, self.float32_sums = skip_not_finite, float32_sums
        self._room = OptimizerStateBuffer()
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
        """List with the number of blocks in each segment."""
        return tuple(len(segment) for segment in self._slots.segments)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers, for use by a learning rate schedule."""
        return [group for block in self.blocks if block.optimizer is not None
                for group in block.optimizer.param_groups]

    @property
    def device_bytes(self) -> int:
        """Bytes on the device for weights and, on a CPU, gradients and state of one block."""
        return self._slots.nbytes + self.bytes_beside_segments

    def on_device(self) -> OnDevice:
        """Return the device memory in use, for reports."""
        return OnDevice(self.device_bytes)

    def use_segments(self, segments: Sequence[int]) -> None:
        """Divide the model into different segments. For errors, see the class docstring."""
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
        if hasattr(self, "_slots"):  # absent in the constructor
            self._slots.clear()
        self._slots: Slots = Slots(cut, self.device, self.copier)

    @property
    def bytes_beside_segments(self) -> int:
        """Number of bytes in `device_bytes` that are not used for segments."""
        resident = sum(b.layout.nbytes + b.main_bytes for b in self.blocks if not b.streams)
        # gradients of a block, and with clipping those of the previous block while they are being
        # stored
        largest = max(b.layout.nbytes + b.main_bytes // 2 for b in self.blocks) * (
            1 if self.clip is None else 2)
        if self.clip is not None:  # gradients of resident blocks remain until the step
            largest += resident
        return resident + largest + (self._room.nbytes if isinstance(self.tier, DiskTier) else 0)

    def step(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> StepResult:
        """Train on micro-batches (input of the first block, target), and run the optimizers.

        Raises:
            ValueError: If there are no micro-batches, or if a block returns an invalid object.
            TierError: If a copy fails, in which case the tier keeps the weights from before the
                failed copy, and all other ranks are stopped.
        """
        result = self.accumulate(micro_batches)
        if result.norm is not None:
            self.update(self.skip_not_finite and not bool(result.norm.isfinite()))
        return result

    @ends_all_ranks(TierError)
    def accumulate(self, micro_batches: Sequence[tuple[Tensor, Any]]) -> StepResult:
        """Run the forward and backward passes of a step and, if `clip` is None, also the
        optimizers. With `clip`, the tier stores the gradients until `update` is called.
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
        """Add gradients of a micro-batch to the float32 gradients (`float32_sums`). Resident blocks
        are included, because they may share weights with the block.
        """
        for summed_block in (block, *(b for b in self.blocks if not b.streams)):
            if self.float32_sums:
                summed_block.sum_gradients()

    @ends_all_ranks(TierError)
    def update(self, skip: bool = False) -> None:
        """Clip the gradients computed by `accumulate`, and run the optimizers. See `step` for the
        errors that this method raises.

        skip: if True, the weights and the states of optimizers and routers are not changed.
        """
        if skip:
            self.forget()
        else:
            assert self.clip is not None
            with self._forgetting():
                self._step_clipped(self.clip)
        self.steps += 1

    def forget(self) -> None:
        """Discard the gradients computed by `accumulate` and the counts of the routers."""
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
        """Compute the losses without training. Modules stay in their mode (train or eval)."""
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
        """Return a context that seeds a block's random numbers and restores the generators."""
        self.micro_batch = micro_batch
        return seeded(self.device, seed_of(self.seed, self.steps, micro_batch, block))

    @ends_all_ranks(TierError)
    def replace_weights(self, change: Callable[[Iterator[list[Tensor]]], bool]) -> bool:
        """Replace all weights between two steps. If an error occurs, no weight is replaced.

        Args:
            change: function of an iterator that yields copies of each block's parameters and
                floating-point buffers in host memory. The function modifies the copies in place
                before it requests the next block. If the function returns True, the model uses the
                modified copies.
        Returns: The return value of `change`.
        Raises:
            TierError: If the tier has no space for both versions of the weights.
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
        """Discard the weights on the device, because the stored weights have been replaced."""
        self._slots.clear()

    @ends_all_ranks(TierError)
    def settle(self) -> None:
        """Wait until all writes are complete. Raises `TierError` if a write failed."""
        for block in self.blocks:
            block.settle()

    def close(self) -> None:
        """Finish all copies, and free the space in the tier. The weights are lost afterwards."""
        self.copier.close()
        self._slots.clear()
        self.tier.close()
