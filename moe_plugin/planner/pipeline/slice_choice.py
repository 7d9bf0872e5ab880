"""Which slices: candidates of the dynamic program, compared in the simulator with transfers."""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.planner.pipeline.schedules import Pipeline
from moe_plugin.planner.pipeline.slice_times import SliceTimes
from moe_plugin.planner.pipeline.terapipe import cut, slice_seconds

MOST_PIECES = 128  # a sequence's; with more the dynamic program takes seconds
GAPS = 200  # bounds that are tried, about


@dataclass(frozen=True, kw_only=True)
class SliceProfile:
    """What was measured of slices on the slowest stage, and of transfers.

    Attributes:
        length: of a sequence, in tokens. multiple: of which every slice must be one.
        stages, micro_batches: of a step.
        forward, backward: seconds of a slice by length and context.
        send_s, token_s: seconds of a transfer: fixed, and of each token.
    """

    length: int
    multiple: int
    stages: int
    micro_batches: int
    forward: SliceTimes
    backward: SliceTimes
    send_s: float = 0.0
    token_s: float = 0.0

    @property
    def granularity(self) -> int:
        """Tokens that are not cut apart."""
        pieces = self.length // self.multiple
        return self.multiple * min(n for n in range(1, pieces + 1)
                                   if pieces % n == 0 and pieces // n <= MOST_PIECES)

    def pipeline(self, slices: tuple[int, ...]) -> Pipeline:
        """For the simulator."""
        return Pipeline(stages=self.stages, micro_batches=self.micro_batches, slices=len(slices),
                        forward_s=slice_seconds(self.forward, slices),
                        backward_s=slice_seconds(self.backward, slices),
                        send_s=tuple(self.send_s + n * self.token_s for n in slices))

    def best(self) -> tuple[tuple[int, ...], float]:
        """(slices, seconds of a step): the fastest simulated one of the whole sequence and of what
        the dynamic program finds for the stages alone, and with links that count as stages.
        """
        candidates = {(self.length,)}
        for parts in (self.stages, 2 * self.stages - 1):
            share = 1 + (parts - 1) / self.micro_batches
            gap = self._seconds(self.length, 0) / GAPS
            candidates.add(cut(self._seconds, self.length, share, granularity=self.granularity,
                               gap_s=gap).slices)
        return min(((slices, self.pipeline(slices).simulate().seconds) for slices in candidates),
                   key=lambda one: (one[1], len(one[0])))

    def _seconds(self, length: int, context: int) -> float:
        # a slice's transfers go on while others compute: the slower of both counts
        compute = self.forward(length, context) + self.backward(length, context)
        return max(compute, 2 * (self.send_s + length * self.token_s))
