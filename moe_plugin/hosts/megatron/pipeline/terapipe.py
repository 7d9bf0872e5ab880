"""TeraPipe (arXiv 2102.07988): slices of sequences flow through the stages."""

from __future__ import annotations

from typing import Any

from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.pipeline.base import (
    ForwardBackward,
    PipelineSchedule,
    refuse,
    register,
)
from moe_plugin.hosts.megatron.pipeline.slice_step import NAME, SliceStep
from moe_plugin.hosts.megatron.pipeline.slice_trials import SliceTrials
from moe_plugin.planner.pipeline.schedules import equal_slices


@register
class SliceSchedule(PipelineSchedule):
    """Stage i of n begins with n - i + S - 1 forward passes of slices; see docs/pipeline.md.

    trials: what was learned of the best slices; None: they are given.
    """

    name = NAME
    unfit = ("p2p_communicator", "adjust_tensor_shapes_fn")

    def __init__(self, settings: PipelineConfig, native: ForwardBackward,
                 gradients: Any = None) -> None:
        super().__init__(settings, native, gradients)
        self.trials: SliceTrials | None = None

    def step(self, passes: dict[str, Any], config: Any) -> list[Any]:
        """See `PipelineSchedule`."""
        length = passes.get("decoder_seq_length") or passes["seq_length"]
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        slices, timed = self._next(length, multiple, config.deterministic_mode)
        step = SliceStep(passes, config, self.group, self.gradients, slices, timed)
        logged = step.run()
        if self.trials is not None:
            self.trials.after(step)
        return logged

    def _next(self, length: int, multiple: int,
              deterministic: bool) -> tuple[tuple[int, ...], bool]:
        """(slices of the next step, whether they are measured)."""
        slices = given_slices(self.settings.slices, length, multiple)
        if slices:
            return slices, False
        if deterministic:
            refuse(NAME, "deterministic_mode", True, "off without pipeline.slices",
                   "slices chosen by measured time add up in another order from run to run: give "
                   "their lengths")
        if self.trials is None or not self.trials.knows(length):
            self.trials = SliceTrials(length, multiple)
        return self.trials.next(length)


def given_slices(text: str | None, length: int, multiple: int) -> tuple[int, ...]:
    """Lengths of slices as `pipeline.slices` gives them; empty for `best` and none.

    Args:
        text: lengths such as `512,256,256`, or how many equal ones.
        length: of a sequence.
        multiple: of which every slice must be one.
    Raises: ValueError: they do not fit the sequence.
    """
    if text in (None, "best"):
        return ()
    remedy = (f"give lengths that are multiples of {multiple} and sum to seq_length={length}, or "
              "how many equal ones")
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and 1 <= numbers[0] <= length // multiple:
        numbers = list(equal_slices(length, multiple, numbers[0]))
    if not numbers or sum(numbers) != length or any(n < 1 or n % multiple for n in numbers):
        refuse(NAME, "pipeline.slices", text, f"lengths that sum to seq_length={length}", remedy)
    return tuple(numbers)
