"""What passes of Megatron change, to begin them again."""

from __future__ import annotations

from typing import Any

from moe_plugin.resilience.overflow import StepStart


class MegatronStart(StepStart):
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
