"""`parallel: predicted`: the layout of a layer, predicted once from the tokens of its first call.

Nothing is timed, so that a run repeats bit by bit; and nothing is agreed or computed later.

`parallel.prefill`: pieces of an evaluation's calls by their load (EPS-MoE).

Source: Qian et al., "EPS-MoE: Expert Pipeline Scheduler for Cost-Efficient MoE Inference", 2024.
The forward pass of a call is predicted with its rows in one piece, and cut along rows or along
experts into several, with the host's work for each piece; the fastest is taken, or one piece if it
saves less than 5 %. Which kernel computes a piece follows from the piece's own load, as ever
(`experts.compute: auto`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_plugin.config import MoEConfig
from moe_plugin.dispatch.base import Dispatcher, WrappedDispatcher
from moe_plugin.dispatch.layout import LayerLayout
from moe_plugin.dispatch.ragged import SentSizes
from moe_plugin.planner.choice import LayoutChoice, combinations
from moe_plugin.planner.layer_cost import LayerCost, layer_cost, rank_choices
from moe_plugin.planner.once import Visits, rows_of_token
from moe_plugin.planner.prefill import CUTS, PIECE_OPERATIONS, PIECES
from moe_plugin.planner.units import show_time
from moe_plugin.records import KeptRouting, Routing
from moe_plugin.tuning.decisions import TunerDecision
from moe_plugin.tuning.default_hardware import (
    as_visits,
    count_visits,
    default_cluster,
    default_device,
    layer_shape,
)
from moe_plugin.tuning.layouts import Layouts
from moe_plugin.tuning.prepare_group import log_once

log = logging.getLogger(__name__)
GAIN = 0.02  # of the configured layout's predicted time that another layout must save
PREFILL_GAIN = 0.05  # the same of pieces by load: about the model's error
SKEW = 1.1  # rows of the fullest rank over the mean: usual while training, with a balance loss
# of a device's memory that a layout may take beyond the configured one. Layers keep gathered
# parameters for backward, and a model has many layers
MEMORY_SHARE = 0.02


class PredictedLayout:
    """The layout of one layer: configured, from its first call in training on the best predicted.

    All ranks alike: the first call in training is collective, by one all-reduce of a number.

    Args:
        config: the layer's. layouts: what may be chosen. probe: one of the layer's parameters.

    Attributes:
        current: the layout of the next call. settled: whether it was predicted, or taken from a
            checkpoint; then no call is asked.
        decisions: that were not read yet.
    """

    exploring = False

    def __init__(self, config: MoEConfig, layouts: Layouts, probe: Tensor) -> None:
        self.config, self.layouts, self.probe = config, layouts, probe
        self.comm = layouts.place.comm
        self.current, self.settled = layouts.fixed, self.comm.size == 1
        self.decisions: tuple[TunerDecision, ...] = ()

    def layout(self, routing: Routing, training: bool) -> tuple[LayerLayout, None]:
        """(layout of this call, no timer). Evaluation takes the current one.

        A graph that is being compiled cannot branch on a number of other ranks: until a call that
        is not compiled, the configured layout stays.
        """
        if training and not self.settled and not torch.compiler.is_compiling():
            self._settle(routing)
        return self.layouts.at(self.current), None

    def pop_decisions(self) -> tuple[TunerDecision, ...]:
        """The decision, once."""
        fresh, self.decisions = self.decisions, ()
        return fresh

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint: a resumed run keeps its layout, whatever its first batch.
        """
        return {"ranks": self.comm.size,
                "predicted": self.current.as_dict() if self.settled else None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over the layout of an earlier run, if it was predicted on as many ranks and fits
        these settings; else it is predicted again.
        """
        chosen = state.get("predicted")
        if chosen is None or state.get("ranks") != self.comm.size:
            return
        choice = dataclasses.replace(LayoutChoice.from_dict(chosen),
                                     algorithm=self.current.algorithm, kernel=self.current.kernel)
        try:
            if choice.exchanges and choice.send not in self.layouts.sends():
                raise ValueError(f"dispatch.send={self.config.dispatch.send!r} leaves no "
                                 f"send={choice.send!r}")
            if "send" not in chosen and len(self.layouts.sends()) > 1:
                raise ValueError("it was saved before rows could be sent once (dispatch.send)")
            self.layouts.at(choice)
        except ValueError as error:
            if self.comm.rank == 0:
                log.info("the checkpoint's layout (%s) is predicted again: %s", choice.words,
                         error)
            return
        self.current, self.settled = choice, True

    def _settle(self, routing: Routing) -> None:
        copies = self.layouts.visited_copies()
        most = torch.tensor([routing.ids_TK.size(0),
                             *count_visits(routing, self.layouts.place, copies)],
                            dtype=torch.float64)
        tokens, *visited = self.comm.hosts.all_reduce(most, "max").tolist()
        if tokens == 0:  # no rank has seen a token: decide on a later call
            return
        self.settled, tokens = True, int(tokens)
        visits = as_visits(visited, copies, self.config.router.experts_per_token)
        best, seconds, configured = self._best(tokens, visits)
        why = (f"predicted {show_time(seconds)} for {tokens} tokens on each rank, "
               f"{show_time(configured)} as configured")
        self.current = best
        self.decisions = (TunerDecision(0, f"{tokens} tokens", best, "predict", why, seconds),)
        text = f"layout: {best.words}; predicted {show_time(seconds)}"
        fixed = self.layouts.fixed
        if best != fixed:
            keeps = f"r={fixed.r}" if best.r != fixed.r else "the all-to-all"
            text += f" instead of {show_time(configured)} (`--moe-parallel fixed` keeps {keeps})"
        text += self._sent(best, visits)
        log_once(self.comm, text, text)  # layers of one shape have one line

    def _sent(self, choice: LayoutChoice, visits: Visits | None) -> str:
        """How often a token's row travels, in words; nothing where each choice is a row."""
        if choice.send == "rows":
            return ""
        cluster = default_cluster(self.comm, self.probe.device)
        shape = layer_shape(self.config, self.layouts.place, self.probe, 1)
        rows = rows_of_token(cluster, shape.top_k, choice.r, shape.limits, visits)
        sent = rows.nodes if choice.send == "nodes" else rows.ranks
        between = sent * cluster.between
        return (f"; rows sent, per token: {sent:.2f}, between nodes {between:.2f}; "
                f"saved by sending once: {100 * (1 - sent / rows.pairs):.0f} %")

    def _best(self, tokens: int, visits: Visits | None) -> tuple[LayoutChoice, float, float]:
        """(choice, its predicted seconds, those of the configured choice)."""
        fixed, layouts = self.layouts.fixed, self.layouts
        values = {"r": layouts.legal(), "algorithm": [fixed.algorithm], "kernel": [fixed.kernel],
                  "d": [fixed.d], "d_backward": [fixed.d_backward],
                  "piece_axis": [fixed.piece_axis],
                  "spill": [fixed.spill], "send": layouts.sends(),
                  "gather_tokens": [False, True] if layouts.gathers_tokens else [False]}
        device = default_device(self.config, self.probe.device)
        shape = layer_shape(self.config, layouts.place, self.probe, tokens, SKEW, visits)
        costs = rank_choices(shape,
                             default_cluster(self.comm, self.probe.device), device,
                             [fixed, *combinations(values, self.comm.size)],
                             collectives=partial(self.comm.collectives.seconds, self.comm))
        mine, best = worth_taking(costs, fixed, device.memory_bytes)
        return best.choice, best.seconds, mine.seconds


def worth_taking(costs: Sequence[LayerCost], fixed: LayoutChoice,
                 memory_bytes: float) -> tuple[LayerCost, LayerCost]:
    """(the configured layout, the one to take: the fastest that saves enough time and fits).

    Args:
        costs: of all layouts, fastest first.
        fixed: the configured one.
        memory_bytes: of the device.
    """
    mine = next(cost for cost in costs if cost.choice == fixed)
    for cost in costs:
        more = cost.memory_bytes - mine.memory_bytes
        if more <= MEMORY_SHARE * memory_bytes and cost.seconds <= (1 - GAIN) * mine.seconds:
            return mine, cost
    return mine, mine


def _with_sizes(kept: KeptRouting, sizes: SentSizes, dispatcher: Dispatcher) -> KeptRouting:
    """The routing with numbers of rows that this dispatcher has no need to exchange again."""
    while isinstance(dispatcher, WrappedDispatcher):
        dispatcher = dispatcher.inner
    routing = dataclasses.replace(kept.routing,
                                  sizes=dataclasses.replace(sizes, owner=dispatcher))
    before = routing if kept.before is kept.routing else kept.before
    return dataclasses.replace(kept, routing=routing, before=before)


class PrefillPieces:
    """The pieces of each call of a layer in evaluation. Nothing is timed, so that runs repeat.

    Args:
        config: the layer's. layouts: what may be chosen. probe: one of the layer's parameters.
    Raises:
        ValueError: rows of this dispatcher cannot be cut, or other ranks may compute them.
    """

    def __init__(self, config: MoEConfig, layouts: Layouts, probe: Tensor) -> None:
        self.config, self.layouts, self.probe = config, layouts, probe
        self.comm = layouts.place.comm
        spill = config.parallel.spill
        for name, value, bad, remedy in (
                ("dispatch.name", config.dispatch.name, not layouts.traits.supports_pieces,
                 "'ragged' or 'padded'"),
                ("parallel.spill", spill, spill not in (None, "never"), "'never'")):
            if bad:
                raise ValueError(f"parallel.prefill=True does not fit {name}={value!r}, whose rows "
                                 f"cannot be cut by load: use {remedy}, or parallel.prefill=False")
        self._chosen: dict[tuple[LayoutChoice, int], LayoutChoice] = {}

    def cut(self, layout: LayerLayout, kept: KeptRouting) -> tuple[LayerLayout, KeptRouting]:
        """The layout of a call in as many pieces as suit its load, the same on all ranks; the
        routing, with the numbers of rows where ranks exchanged them.

        The number of tokens of the rank with most travels with the numbers of rows, which ranks
        exchange in any case. Fixed slots say it, and so does `dispatch.equal_tokens`. Otherwise
        (`dispatch.send`, a capacity of exact rows) it costs an all-reduce.
        """
        if not layout.choice.exchanges or self.comm.size == 1 or layout.choice.spill != "never":
            return layout, kept
        (tokens, top_k), sizes = kept.routing.ids_TK.shape, None
        if self.layouts.traits.fixed_slots and kept.capacity is not None:
            tokens = -(-kept.capacity * self.config.num_experts // top_k)
        elif not self.config.dispatch.equal_tokens:
            if kept.capacity is None:
                sizes = layout.dispatcher.start_sizes(kept.routing, tokens=True)
            if sizes is None:
                most = torch.tensor([tokens], dtype=torch.float64)
                tokens = int(self.comm.hosts.all_reduce(most, "max").item())
            else:
                sizes.rows()
                tokens = sizes.most_tokens
        chosen = self.layouts.at(self.choice(layout.choice, tokens))
        return chosen, kept if sizes is None else _with_sizes(kept, sizes, chosen.dispatcher)

    def choice(self, layout: LayoutChoice, tokens: int) -> LayoutChoice:
        """The layout in as many pieces as suit so many tokens on the rank with most."""
        if not layout.exchanges or self.comm.size == 1 or layout.spill != "never":
            return layout
        load = max(1, tokens).bit_length()  # calls of one power of two share a choice
        if (layout, load) not in self._chosen:
            self._chosen[layout, load] = self._best(layout, 3 << load >> 2)
        return self._chosen[layout, load]

    def _best(self, layout: LayoutChoice, tokens: int) -> LayoutChoice:
        place = self.layouts.place
        shape = layer_shape(self.config, place, self.probe, tokens)
        cluster = default_cluster(self.comm, self.probe.device)
        device = default_device(self.config, self.probe.device)
        whole = dataclasses.replace(layout, d=1, d_backward=0, piece_axis="rows")
        host_s = PIECE_OPERATIONS * device.launch_s
        found = {whole: layer_cost(shape, cluster, device, whole).forward.seconds}
        for axis in CUTS:
            most = place.local if axis == "experts" else tokens
            for pieces in PIECES[1:] if axis in self.layouts.piece_axes(layout.send) else ():
                if pieces <= most:
                    choice = dataclasses.replace(whole, d=pieces, piece_axis=axis)
                    seconds = layer_cost(shape, cluster, device, choice).forward.seconds
                    # a processor computes nothing meanwhile; a GPU waits for what is not started
                    found[choice] = (seconds + (pieces - 1) * host_s
                                     if self.probe.device.type == "cpu"
                                     else max(seconds, pieces * host_s))
        # of equals the fewest pieces; along rows, which stay even under any load
        best = min(found, key=lambda choice: (float(f"{found[choice]:.6g}"), choice.d,
                                              choice.piece_axis != "rows"))
        if found[best] > (1 - PREFILL_GAIN) * found[whole]:
            best = whole
        if self.comm.rank == 0:
            log.info("evaluation of about %d tokens on each rank: %s; predicted %s instead of %s "
                     "in one piece", tokens, best.words, show_time(found[best]),
                     show_time(found[whole]))
        return best
