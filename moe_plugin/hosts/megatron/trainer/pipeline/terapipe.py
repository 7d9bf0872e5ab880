"""TeraPipe (arXiv 2102.07988): slices of sequences flow through the stages."""

from __future__ import annotations

from typing import Any

from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.trainer.pipeline.base import ForwardBackward, refuse, schedules
from moe_plugin.planner.pipeline.schedules import equal_slices, order

NAME = "terapipe"


@schedules.register(NAME)
def terapipe(settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
    """Stage i of n begins with n - i + S - 1 forward passes of slices; see docs/pipeline.md."""
    from megatron.core import parallel_state as ps

    # imported here: it imports Megatron, which may lie next to a script that is not known yet
    from moe_plugin.hosts.megatron.trainer.pipeline.executor import backward_group

    if ps.get_pipeline_model_parallel_world_size() == 1:
        return native
    group = ps.get_pipeline_model_parallel_group()
    return SlicedSteps(settings, native, group, backward_group(group))


class SlicedSteps:
    """Steps of a training run, with what they learn of the best slices.

    Args:
        settings: `slices`. native: Megatron's function, for evaluation.
        group: the stages. gradients: see `executor.backward_group`.
    """

    def __init__(self, settings: PipelineConfig, native: ForwardBackward, group: Any,
                 gradients: Any) -> None:
        self.settings, self.native = settings, native
        self.group, self.gradients = group, gradients
        self.trials: Any = None

    def __call__(self, **passes: Any) -> list[Any]:
        """One step, as Megatron's own functions take and return it."""
        from moe_plugin.hosts.megatron.compat.names import get_model_config
        from moe_plugin.hosts.megatron.trainer.pipeline.executor import check_config
        from moe_plugin.hosts.megatron.trainer.pipeline.slice_step import SliceStep

        model = passes["model"]
        config = get_model_config(model[0] if isinstance(model, list) else model)
        check_config(NAME, config)
        check_passes(passes)
        if passes.get("forward_only"):
            return self.native(**passes)
        length = passes.get("decoder_seq_length") or passes["seq_length"]
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        slices, timed = self._next(length, multiple, config.deterministic_mode)
        timers = config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        step = SliceStep(passes, config, self.group, self.gradients, slices, timed)
        logged = step.run_slices(order(self.group.size(), self.group.rank(), step.batches,
                                       slices=len(slices)))
        step.finish_gradients()
        if timers is not None:
            timers("forward-backward").stop()
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
            from moe_plugin.hosts.megatron.trainer.pipeline.slice_trials import SliceTrials

            self.trials = SliceTrials(length, multiple)
        return self.trials.next(length)


def check_passes(passes: dict[str, Any]) -> None:
    """`ValueError`: arguments of Megatron's function that do not fit slices."""
    for name in ("p2p_communicator", "adjust_tensor_shapes_fn"):
        if passes.get(name) is not None:
            refuse(NAME, name, "given", "left out",
                   "models of several modules have Megatron's own schedules alone")


def given_slices(text: str | None, length: int, multiple: int) -> tuple[int, ...]:
    """Lengths of slices as `pipeline.slices` gives them; empty for `best` and none.

    Args:
        text: lengths such as `512,256,256`, or how many equal ones.
        length: of a sequence. multiple: of which every slice must be one.
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
