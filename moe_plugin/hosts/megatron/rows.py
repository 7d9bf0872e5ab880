"""Steps of Megatron in which rows did not fit (`--moe-dispatch bounded`), see `plain.overflow`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from moe_plugin.comm.named_errors import comm_of
from moe_plugin.resilience.overflow import RowsCheck, StepStart


class FittingSteps(RowsCheck):
    """Runs the passes of a step or of an evaluation until all rows fit. Made by all ranks;
    collective.

    Args:
        chunks: this rank's parts of the model. A pipeline stage may have no MoE layer.
    """

    def __init__(self, chunks: Iterable[Any]) -> None:
        self.chunks = list(chunks)
        super().__init__(self.chunks, comm_of())

    def __call__(self, passes: Callable[[list[Any]], torch.Tensor], batches: list[Iterator[Any]],
                 microbatches: int, undo: Callable[[], None]) -> torch.Tensor:
        """What `passes(batches)` returns, repeated where rows did not fit.

        Args:
            passes: all forward and backward passes of a step, which clear the gradients first; or
                all forward passes of an evaluation.
            batches: by chunk; a step takes `microbatches` of each.
            undo: called before a repetition.
        Raises:
            RowsOverflow: on all ranks, where `--moe-on-overflow` is error.
        """
        self.forget()
        if not self.repeats:
            done = passes(batches)
            self.overflowed()
            return done
        taken = [list(itertools.islice(each, microbatches)) for each in batches]
        start = Start(self.chunks)
        while True:
            done = passes([iter(each) for each in taken])
            if not self.overflowed():
                return done
            undo()
            start.rewind()


class Start(StepStart):
    """And the random generators that Megatron keeps for its parallel regions."""

    def __init__(self, chunks: list[Any]) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        super().__init__(chunks)
        self._tracker = get_cuda_rng_tracker()
        self._states = {name: state.clone() for name, state in self._tracker.get_states().items()}

    def restore(self) -> None:
        """Set them as they were."""
        super().restore()
        self._tracker.set_states({name: state.clone() for name, state in self._states.items()})
