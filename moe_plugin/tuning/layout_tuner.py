"""`parallel: auto`: load of the moment to bucket, bucket to tuner, tuner to layout; all of it
agreed by all ranks.

Ranks agree by one small all-reduce (maximum) of load, imbalance and the latest measured time: at
every call while a choice is being looked for; once it is settled as often as it costs no more than
`SHARE` of the layer's time, and at least at every `EVERY`-th call. In between the last choice
stays; nothing is sent and nothing measured.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm import algorithms
from moe_plugin.comm.base import Comm
from moe_plugin.config import MoEConfig
from moe_plugin.kernels import expert_load
from moe_plugin.planner.choice import LayoutChoice, legal_choices
from moe_plugin.planner.layer_cost import LayerShape
from moe_plugin.planner.layer_search import rank_choices
from moe_plugin.records import Routing
from moe_plugin.routing.replay import Replaying, ReplayLog
from moe_plugin.tuning.default_hardware import default_cluster, default_device
from moe_plugin.tuning.engine import Bucket, Decision, Tuner, TunerSettings
from moe_plugin.tuning.layouts import Layout, Layouts
from moe_plugin.tuning.timer import CallTimer

log = logging.getLogger(__name__)
EVERY = 8
LOOKS = 16
SHARE = 0.01  # of the layer's time that may go into looking at its load
IN_FLIGHT = 64  # timed calls whose backward pass may be outstanding (micro-batches of a pipeline)
STICKY = 0.75  # of a bucket's width; 0.5 is its border
MEMORY_SHARE = 0.25  # of a device's memory that a layout may take beyond the stored parameters


class LayoutTuner(Replaying):
    """Chooses the layout of one layer's calls. Make one a layer; all ranks alike.

    Args:
        config: the layer's. layouts: what may be chosen. probe: one of its parameters, which tells
            device and dtype.
        measure: what times a call (for tests); None: `CallTimer`.
        replay: see `HostContext`.
    """

    def __init__(self, config: MoEConfig, layouts: Layouts, probe: Tensor,
                 measure: Callable[[torch.device], CallTimer] = CallTimer, *,
                 replay: bool = False) -> None:
        if layouts.traits.single_layout:
            raise ValueError(
                f"parallel.mode='auto' does not fit dispatch.name={config.dispatch.name!r}, which "
                "has one layout; use 'fixed', or dispatch.name='ragged'"
            )
        self.config, self.layouts, self.probe, self.measure = config, layouts, probe, measure
        self.comm: Comm = layouts.place.comm
        rules = config.parallel
        self.tuner = Tuner(
            self.candidates,
            TunerSettings(tries=rules.tries, samples=rules.samples, drift=rules.drift, watch=1))
        self.current, self.bucket = layouts.fixed, (0, 0)
        self.runs: deque[tuple[Bucket, LayoutChoice, CallTimer]] = deque()
        self.since = self.reported = 0
        self.every = EVERY  # calls from one look to the next
        # seconds of this rank's latest looks; the quickest of them waited for nobody
        self.costs: deque[float] = deque(maxlen=LOOKS)
        self.untimed: dict[Bucket, int] = {}  # calls since a bucket was timed
        self.due = False  # whether the next call looks at its load, however short ago that was
        self.watch: CallTimer | None = None
        self.recordings = ReplayLog(replay)

    def layout(self, routing: Routing, training: bool) -> tuple[Layout, CallTimer | None]:
        """(layout of this call, stopwatch where its time is wanted). In training a collective call
        now and then; otherwise the latest choice. A recomputation repeats the choice of its first
        pass.
        """
        self.watch, choice = None, self.current
        if training:
            choice = self.recordings.replayed(lambda: self._choose(routing), training)
        return self.layouts.at(choice), self.watch

    def forget_recordings(self) -> None:
        """See `moe_plugin.routing.replay.forget`."""
        self.recordings.forget()

    def _choose(self, routing: Routing) -> LayoutChoice:
        self.since += 1
        if self.since < self.every and not self.due and self.tuner.calls and not self.tuner.exploring(
                self.bucket):
            return self.current
        self.bucket, self.due = self._agree(routing), False
        untimed = self.untimed.get(self.bucket, 0) + self.since
        self.current, self.since = self.tuner.choose(self.bucket, self.since), 0
        timed = self.tuner.exploring(self.bucket) or (untimed >= EVERY
                                                      and self.tuner.wants_time(self.bucket))
        self.untimed[self.bucket] = 0 if timed else untimed
        if timed:
            self.watch = self.measure(self.probe.device)
            self.runs.append((self.bucket, self.current, self.watch))
        return self.current

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint: the tuner's state, and of how many ranks it speaks."""
        return {"ranks": self.comm.size, **self.tuner.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what the tuner of an earlier run has learned, unless on another number of
        ranks; the next call looks at its load at once. All ranks alike.
        """
        if state.get("ranks", self.comm.size) != self.comm.size:
            log.info(
                "layouts learned on %s expert-parallel ranks are not used on %s: they are found "
                "anew",
                state["ranks"], self.comm.size)
            return
        self.tuner.load_state(state)
        self.due = True

    def pop_decisions(self) -> tuple[Decision, ...]:
        """Decisions since the last time this was called; rank 0 logs them."""
        count = min(self.tuner.decided - self.reported, len(self.tuner.log))
        fresh = tuple(self.tuner.log)[len(self.tuner.log) - count :]
        self.reported = self.tuner.decided
        for d in fresh if self.comm.rank == 0 else ():
            log.info("layout at call %d, load %s: %s, %s (%s)", d.call, d.bucket, d.event,
                     d.choice.label, d.why)
        return fresh

    def _agree(self, routing: Routing) -> Bucket:
        """The bucket of the largest load of any rank; on the way the latest time goes to the tuner.
        """
        begun = time.perf_counter()
        load_E = expert_load(routing.ids_TK, self.config.num_experts)
        rows, hottest = (int(n) for n in torch.stack([load_E.sum(), load_E.max()]).tolist())
        skew = hottest * self.config.num_experts / rows if rows else 1.0
        while len(self.runs) > IN_FLIGHT:
            self.runs.popleft()  # its backward pass never came
        over = bool(self.runs) and self.runs[0][2].over
        mine = [
            float(rows), skew, self.runs[0][2].seconds() if over else 0.0,
            float(not over),
            min(self.costs, default=math.inf)
        ]
        values = torch.tensor(mine, dtype=torch.float64, device=self.comm.device)
        rows, skew, seconds, missing, cost = self.comm.all_reduce(values, "max").tolist()
        self.costs.append(time.perf_counter() - begun)
        if not missing:  # over on every rank: all of them take it off, or none does
            bucket, choice, _ = self.runs.popleft()
            self.tuner.record(bucket, choice, seconds)
            self.every = _pace(cost, seconds)
        size = math.log(max(rows, 1.0)) / math.log(self.config.parallel.bucket)
        return _nearest(size, self.bucket[0]), _nearest(max(0.0,
                                                            math.log2(max(skew, 1.0)) - 1),
                                                        self.bucket[1])

    def candidates(self, bucket: Bucket) -> list[tuple[LayoutChoice, float]]:
        """Choices that fit the memory, with predicted seconds."""
        rules, comm = self.config.parallel, self.config.comm
        degrees = [2**i for i in range(rules.max_d.bit_length()) if 2**i <= rules.max_d]
        names = [comm.all_to_all]
        if comm.all_to_all != "auto" and self.comm.size > 1 and not self.comm.topology.why_flat():
            names += [
                n for n in ("linear", "2dh", "leader") if n != comm.all_to_all and n in algorithms
            ]
        choices = [
            c for c in legal_choices(self.config.num_experts, self.comm.size, degrees=degrees,
                                     algorithms=names, kernels=(self.config.experts.compute,
                                                                ), shards=self.layouts.place.shards)
            if c.r in self.layouts.legal()
        ]
        if not self.layouts.traits.cuts:
            choices = [c for c in choices if c.d == 1]
        device = default_device(self.config, self.probe.device)
        costs = rank_choices(self.shape(bucket), default_cluster(self.comm, self.probe.device),
                             device, choices, None)
        fitting = [c for c in costs if c.memory_bytes <= MEMORY_SHARE * device.memory_bytes
                   ] or costs[:1]
        return [(c.choice, c.seconds) for c in fitting]

    def shape(self, bucket: Bucket) -> LayerShape:
        """The layer under the load of a bucket."""
        c = self.config
        tokens = max(1, round(c.parallel.bucket ** bucket[0] / c.router.top_k))
        place = self.layouts.place
        local = place.local
        hot = 2.0 ** (bucket[1] + 1) if bucket[1] else 1.0
        return LayerShape(tokens=tokens, model_dim=c.model_dim, hidden_dim=c.hidden_dim,
                          experts=c.num_experts, top_k=c.router.top_k,
                          gated=c.experts.kind == "gated_ffn",
                          element_bytes=self.probe.element_size(), skew=max(
                              1.0, (hot + local - 1) / local), shards=place.shards)


def _pace(cost: float, seconds: float) -> int:
    """Calls from one look at the load to the next, where a look takes `cost` and a call `seconds`,
    both agreed.
    """
    return EVERY if seconds <= 0 or cost > EVERY * SHARE * seconds else max(
        1, math.ceil(cost / (SHARE * seconds)))


def _nearest(value: float, last: int) -> int:
    """The nearest whole number, but the last one while that is not much farther: a load on a border
    must not jump to and fro.
    """
    return last if abs(value - last) < STICKY else round(value)
