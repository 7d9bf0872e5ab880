"""Tunes the layout of one layer for the current load (`parallel: auto`). The ranks agree on the
current load.

One small all-reduce computes the maximum of the load, of the imbalance and of the latest measured
time over all ranks. While trials are pending, this all-reduce runs in every call. After the trials,
it runs at least in every `EVERY`-th call. The all-reduce runs more often if this takes at most the
fraction `SHARE` of the layer's time. All other calls use the latest choice and neither send nor
measure anything.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm import algorithms
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch.layout import LayerLayout
from moe_plugin.kernels.choices import expert_load
from moe_plugin.planner.all_to_all_cost import COSTS
from moe_plugin.planner.choice import LayoutChoice, combinations
from moe_plugin.planner.layer_cost import LayerShape, rank_choices
from moe_plugin.planner.once import Visits
from moe_plugin.planner.trials import ContestRules
from moe_plugin.records import Routing
from moe_plugin.routing.replay import replayed
from moe_plugin.tuning import compute_tuner  # registers strategy `auto`  # noqa: F401
from moe_plugin.tuning.decisions import TunerDecision, TunerSettings
from moe_plugin.tuning.default_hardware import (
    Calibration,
    as_visits,
    count_visits,
    default_cluster,
    default_device,
    layer_shape,
)
from moe_plugin.tuning.engine import Tuner
from moe_plugin.tuning.exchange_tuner import ExchangeTuner
from moe_plugin.tuning.layouts import Layouts
from moe_plugin.tuning.timer import CallTimer

log = logging.getLogger(__name__)
EVERY = 8
LOOKS = 16
WITHIN = 2.0  # layouts slower than this factor times the best prediction are not tried
FEW_RANKS = 4  # gathering tokens is considered up to this number of ranks per choice of a token
SHARE = 0.01  # share of the layer's time that agreeing on its load may take
IN_FLIGHT = 64  # timed calls whose backward pass may be pending (micro-batches of a pipeline)
MEMORY_SHARE = 0.25  # share of a device's memory that layouts may use beyond stored parameters
STICKY = 0.75  # distance, in bucket widths, up to which a bucket is kept; borders are at 0.5
Bucket = tuple[int, int]  # logarithms of rows and of imbalance


@dataclass(frozen=True)
class Dimension:
    """A field of `LayoutChoice` that is tuned. values: function that returns the possible values of
    this field.
    """

    name: str
    values: Callable[[LayoutTuner], Sequence[Any]]


@dataclass(frozen=True)
class _Run:
    """A timed call. disturbances: number of trials of all-to-all algorithms before the call."""

    bucket: Bucket
    choice: LayoutChoice
    timer: CallTimer
    disturbances: int


class LayoutTuner:
    """Selects the layout for each call of one layer. All ranks must create one tuner for each
    layer.

    Args:
        config: settings of the layer.
        layouts: the layouts of the layer from which the tuner selects.
        probe: a parameter of the layer, whose device and dtype are used.
        measure: function that creates a timer for a call. Tests replace it.

    Attributes:
        settled: whether no more decisions will be made. `settled` is always False, because any call
            may need a decision.
    """

    settled = False
    decisions: tuple[TunerDecision, ...] = ()

    def __init__(self, config: MoEConfig, layouts: Layouts, probe: Tensor,
                 measure: Callable[[torch.device], CallTimer] = CallTimer) -> None:
        if layouts.traits.single_layout:
            raise ValueError(
                f"parallel.mode='auto' cannot be combined with dispatch.name="
                f"{config.dispatch.name!r}, which has only one layout. Use parallel.mode='fixed', "
                "or dispatch.name='ragged'"
            )
        self.config, self.layouts, self.probe, self.measure = config, layouts, probe, measure
        self.comm, rules = layouts.place.comm, config.tuner
        # without a cluster file the links are assumed, so predictions must not exclude layouts
        within = WITHIN if self.comm.state.get(Calibration).cluster else math.inf
        self.tuner: Tuner[Bucket, LayoutChoice] = Tuner(
            self.candidates,
            TunerSettings(tries=rules.tries, contest=ContestRules(least=rules.samples),
                          drift=rules.drift, watch=EVERY, within=within,
                          allowance=max(TunerSettings.allowance,
                                        rules.tries * (rules.samples + 1))),
            always=self.always_timed)
        self.current, self.bucket = layouts.fixed, (0, 0)
        self.visits: Visits | None = None  # latest agreed visits, if rows may be sent once
        self.runs: deque[_Run] = deque()
        self.since = 0  # number of calls since ranks agreed on the load
        self.every = EVERY  # number of calls from one agreement to the next
        # seconds of this rank's latest agreements; their minimum excludes waiting time
        self.costs: deque[float] = deque(maxlen=LOOKS)
        self.due = True  # whether the next call must agree on its load
        self.timer: CallTimer | None = None

    def layout(self, routing: Routing, training: bool) -> tuple[LayerLayout, CallTimer | None]:
        """Return the layout for this call, and a timer if the call must be timed.

        In training, some calls communicate, and all ranks must take part in them. All other calls
        return the latest choice without communication. If a forward pass is recomputed, it uses the
        layout of the original forward pass.
        """
        self.timer, choice = None, self.current
        if training:
            choice = replayed(self, lambda: self._choose(routing), training, what="layout")
        return self.layouts.at(choice), self.timer

    @property
    def exploring(self) -> bool:
        """True if trials of the current load are pending."""
        return self.tuner.exploring(self.bucket)

    def _choose(self, routing: Routing) -> LayoutChoice:
        self.since += 1
        if self.since >= self.every or self.due or self.tuner.exploring(self.bucket):
            self.bucket, self.due = self.agree(routing), False
            self.current, self.since = self.tuner.choose(self.bucket, self.since), 0
            if self.tuner.wants_time(self.bucket):
                self.timer = self.measure(self.probe.device)
                self.runs.append(_Run(self.bucket, self.current, self.timer, self._disturbances()))
        return self.current

    def state(self) -> dict[str, Any]:
        """Return the state of the tuner and the number of ranks as JSON values for a checkpoint."""
        return {"ranks": self.comm.size, **self.tuner.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the tuner state of an earlier run. All ranks must load the same state.

        If the state belongs to a different number of ranks, the state is ignored. The ranks agree
        on their load in the next call.
        """
        if "predicted" in state:  # a state of `parallel: predicted`, which contains no measurement
            return
        if state.get("ranks", self.comm.size) != self.comm.size:
            log.info(
                "layouts learned on %s expert-parallel ranks are not used on %s ranks; they are "
                "measured again",
                state["ranks"], self.comm.size)
            return
        again = self.tuner.load_state(state)
        if again and self.comm.rank == 0:
            log.info("%d of %d loads of the saved tuner are measured again: %s", len(again),
                     len(state["buckets"]), again[0])
        self.due = True

    def pop_decisions(self) -> tuple[TunerDecision, ...]:
        """Return the decisions made since the last call. Rank 0 also logs these decisions."""
        fresh = self.tuner.pop_decisions()
        for d in fresh if self.comm.rank == 0 else ():
            log.info("layout at call %d, load %s: %s %s (%s)", d.call, d.bucket, d.event,
                     d.choice.words, d.why)
        return fresh

    def agree(self, routing: Routing) -> Bucket:
        """Return the bucket of the largest load on any rank, and give the tuner the latest time."""
        begun = time.perf_counter()
        load_E = expert_load(routing.ids_TK, self.config.num_experts)
        rows, hottest = (int(n) for n in torch.stack([load_E.sum(), load_E.max()]).tolist())
        skew = hottest * self.config.num_experts / rows if rows else 1.0
        while len(self.runs) > IN_FLIGHT:
            self.runs.popleft()  # the backward pass of this call never ran
        over = bool(self.runs) and self.runs[0].timer.over
        seconds = self.runs[0].timer.seconds() if over else 0.0
        copies = self.layouts.visited_copies()
        values = torch.tensor([rows, skew, seconds, not over, min(self.costs, default=math.inf),
                               *count_visits(routing, self.layouts.place, copies)],
                              dtype=torch.float64, device=self.comm.device)
        rows, skew, seconds, missing, cost, *visited = self.comm.all_reduce(values, "max").tolist()
        self.visits = as_visits(visited, copies, self.config.router.experts_per_token)
        self.costs.append(time.perf_counter() - begun)
        if not missing:  # the call has ended on every rank, so all ranks record its time
            run = self.runs.popleft()
            if run.choice.exchanges and run.disturbances != self._disturbances():
                self.tuner.repeat(run.bucket, run.choice)
            else:
                self.tuner.record(run.bucket, run.choice, seconds)
                self.every = calls_between(cost, seconds)
        size = math.log(max(rows, 1.0)) / math.log(self.config.tuner.bucket)
        imbalance = max(0.0, math.log2(max(skew, 1.0)) - 1)
        return _nearest(size, self.bucket[0]), _nearest(imbalance, self.bucket[1])

    def _disturbances(self) -> int:
        """Return the number of all-to-all trials so far, which disturb the times of layouts."""
        tuned = self.comm.size > 1 and self.config.comm.all_to_all == "auto"
        return ExchangeTuner.of(self.comm).trials if tuned else 0

    def candidates(self, bucket: Bucket) -> dict[LayoutChoice, float]:
        """Return the layouts that fit into memory, with their predicted times in seconds. The
        layouts are sorted by time, with the fastest layout first.
        """
        values = {d.name: d.values(self) for d in DIMENSIONS}
        if not bucket[1]:  # nothing spills, so the spill policies are the same layout
            values["spill"] = values["spill"][:1]
        device = default_device(self.config, self.probe.device)
        costs = rank_choices(self.shape(bucket), default_cluster(self.comm, self.probe.device),
                             device, combinations(values, self.comm.size),
                             collectives=partial(self.comm.collectives.seconds, self.comm))
        fitting = [c for c in costs if c.memory_bytes <= MEMORY_SHARE * device.memory_bytes]
        return {c.choice: c.seconds for c in fitting or costs[:1]}

    def always_timed(self) -> list[LayoutChoice]:
        """Return the layouts that are timed regardless of their predicted times."""
        return [*self.plain(), *self.gathered()]

    def plain(self) -> list[LayoutChoice]:
        """Return the configured layout with each possible value of `send`.

        The predictions may wrongly rule out these layouts if processors rather than links are the
        bottleneck. Timing these layouts ensures that the chosen layout is not slower than the
        configured layout.
        """
        return [replace(self.layouts.fixed, send=send) for send in self.layouts.sends()]

    def gathered(self) -> list[LayoutChoice]:
        """If there are few ranks, return the layouts that gather tokens.

        With few ranks, gathering tokens sends only slightly more data than an all-to-all. Gathering
        needs a single collective in each direction. The predicted time of this collective is less
        reliable than all other predictions.
        """
        few = self.comm.size <= FEW_RANKS * self.config.router.experts_per_token
        if not few or not self.layouts.gathers_tokens:
            return []
        values = {d.name: d.values(self) for d in DIMENSIONS}
        first = {name: list(options)[:1] for name, options in values.items()}
        return list(combinations({**first, "r": values["r"], "gather_tokens": [True]},
                                 self.comm.size))

    def shape(self, bucket: Bucket) -> LayerShape:
        """Describe the layer under the load of a bucket for the planner."""
        c, place = self.config, self.layouts.place
        hot = 2.0 ** (bucket[1] + 1) if bucket[1] else 1.0
        tokens = round(c.tuner.bucket ** bucket[0] / c.router.experts_per_token)
        skew = max(1.0, (hot + place.local - 1) / place.local)
        return layer_shape(c, place, self.probe, tokens, skew, self.visits)

    def algorithms(self) -> list[str]:
        """Return the candidate all-to-all algorithms, starting with the configured algorithm."""
        name = self.config.comm.all_to_all
        assert name is not None  # set with the placement
        if name == "auto" or self.comm.size == 1 or algorithms.get(name).lacks(self.comm):
            return [name]
        predicted = (other for other in algorithms.candidates(self.comm) if other in COSTS)
        return list(dict.fromkeys([name, *predicted]))

    def token_gathering(self) -> list[bool]:
        """Return the values of `gather_tokens` that are candidates."""
        return [False, True] if self.layouts.gathers_tokens else [False]

    def spills(self) -> list[str]:
        """Return those policies for the rows of overloaded experts that are candidates."""
        named = self.config.parallel.spill
        open_ = ["never", "least_loaded"] if self.layouts.spills else ["never"]
        return open_ if named is None else [named]

    def degrees(self) -> list[int]:
        """Return the overlap degrees that are candidates. All of them are powers of two."""
        most = self.config.tuner.max_d if self.layouts.traits.supports_pieces else 1
        return [2**i for i in range(most.bit_length())]

    def piece_axes(self) -> list[str]:
        """Return the axes that are candidates for dividing rows into pieces. With one expert per
        rank, the axes `experts` and `rows` are equivalent, so only `rows` is returned.
        """
        names = self.layouts.traits.piece_axes
        return [name for name in names if name != "experts" or self.layouts.place.local > 1]


DIMENSIONS = [
    Dimension("kernel", lambda tuner: [tuner.config.experts.compute]),
    Dimension("r", lambda tuner: tuner.layouts.legal()),
    Dimension("algorithm", LayoutTuner.algorithms),
    Dimension("d", LayoutTuner.degrees),
    Dimension("d_backward", lambda tuner: [0, *tuner.degrees()]),
    Dimension("piece_axis", LayoutTuner.piece_axes),
    Dimension("gather_tokens", LayoutTuner.token_gathering),
    Dimension("spill", LayoutTuner.spills),
    Dimension("send", lambda tuner: tuner.layouts.sends()),
]


def calls_between(cost: float, seconds: float) -> int:
    """Return the number of calls from one agreement of the ranks to the next.

    Args:
        cost: time of one agreement in seconds.
        seconds: time of one call in seconds.
    """
    if seconds <= 0 or cost > EVERY * SHARE * seconds:
        return EVERY
    return max(1, math.ceil(cost / (SHARE * seconds)))


def _nearest(value: float, last: int) -> int:
    """Round `value` to the nearest integer, but return `last` if `value` is still close to `last`.

    This hysteresis prevents oscillation between two buckets.
    """
    return last if abs(value - last) < STICKY else round(value)
