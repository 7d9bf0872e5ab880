"""Segments of a model whose weights stream, planned from what its blocks took."""

from __future__ import annotations

import logging

from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.planner.offload.weight_streaming import Layer, StreamPlan, plan


def measured_layers(trainer: StreamedTrainer, micro_batches: int) -> list[Layer]:
    """The blocks as the planner sees them, one micro-batch each, as the last step took them.

    Gradients and optimizer state are of one block at a time and no part of a segment.

    Args:
        trainer: has done a step of this many micro-batches.
    Raises:
        ValueError: it has not, or nothing was copied.
    """
    moved = trainer.copier.counters
    if not trainer.steps or not moved.busy_s or not moved.bytes:
        raise ValueError(f"{trainer.steps} steps and {moved.bytes} copied bytes tell nothing of "
                         "the blocks: do a step with one block a segment first")
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches}: must be >= 1, as in the last step")
    bytes_s, layers = moved.bytes / moved.busy_s, []
    for block, took in zip(trainer.blocks, trainer.profile, strict=True):
        loaded = block.layout.nbytes if block.streams else 0
        layers.append(Layer(
            name=f"block {block.number}", forward_s=took.forward_s / micro_batches,
            backward_s=(took.backward_s + took.step_s) / micro_batches, load_s=loaded / bytes_s,
            out_s=block.returned_bytes / bytes_s, weight_bytes=loaded,
            kept_bytes=took.input_bytes))
    return layers


def plan_segments(trainer: StreamedTrainer, limit: int, micro_batches: int) -> StreamPlan:
    """Cut the model so that its steps are shortest within a limit, and use these segments.

    Args:
        limit: bytes of the device for weights, kept inputs, and gradients and state of a block.
        micro_batches: of a step, as in the last one.
    Returns: the plan; `hides` says whether all copies hide behind computation.
    Raises: ValueError: nothing fits, with what is needed; see `measured_layers`.
    """
    found = plan(measured_layers(trainer, micro_batches), micro_batches, limit,
                 trainer.bytes_beside_segments)
    trainer.use_segments(found.counts)
    return found


class SegmentsOnce:
    """Cuts a host's model into segments for its limit, once, after its first step.

    Args:
        trainer: one without a limit keeps its segments.
        logger: is told of the weights and the cut.
    """

    def __init__(self, trainer: StreamedTrainer, logger: logging.Logger) -> None:
        self.trainer, self.logger, self._done = trainer, logger, trainer.limit is None
        held = sum(block.layout.nbytes for block in trainer.blocks)
        logger.info("weights: %.1f MiB in %s, stream in %d parts through %.1f MiB", held / 2**20,
                    "files" if trainer.device.type == "cpu" else "host memory",
                    len(trainer.blocks), trainer.device_bytes / 2**20)

    def __call__(self, micro_batches: int) -> None:
        """After a step of this many micro-batches. `ValueError`: see `plan_segments`."""
        limit = self.trainer.limit
        if self._done or limit is None:
            return
        self._done, found = True, plan_segments(self.trainer, limit, micro_batches)
        self.logger.info("segments of %s parts, planned for %.1f MiB: copies %s",
                         ", ".join(map(str, found.counts)), limit / 2**20,
                         "hide" if found.hides else "do not hide behind computation")
