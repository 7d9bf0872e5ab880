"""Predicted layouts (`parallel: predicted`), and predicted numbers of pieces for evaluation calls
(`parallel.prefill`).

The layout is predicted once, for the number of tokens in the layer's first training call. Nothing
is measured, so runs are bitwise reproducible. After the prediction, the ranks do not communicate
again to agree on a layout.

With `parallel.prefill`, each evaluation call is divided into a number of pieces that depends on its
load. Source: Qian et al., "EPS-MoE: Expert Pipeline Scheduler for Cost-Efficient MoE Inference",
2024. The time of the forward pass is predicted for a single piece, and for several pieces that
divide the rows or the experts. The prediction includes the host's work for each piece. The fastest
number of pieces is used. If dividing would save less than 5 %, a single piece is used. For each
piece, the kernel is chosen according to the load of this piece (`experts.compute: auto`).
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
GAIN = 0.02  # share of the configured layout's predicted time that another layout must save
PREFILL_GAIN = 0.05  # share that several pieces must save, about the error of the model
SKEW = 1.1  # rows of the fullest rank over the mean, typical of training with a balance loss
# Share of a device's memory that a layout may use in addition to the configured layout. The share
# is small because layers keep gathered parameters for backward, and a model has many layers.
MEMORY_SHARE = 0.02


class PredictedLayout:
    """The layout of one layer. The layout is the configured layout until the first training call,
    and the predicted layout from then on.

    All ranks must call this object in the same order. The first training call runs an all-reduce,
    so all ranks must take part in it.

    Args:
        config: settings of the layer.
        layouts: the layouts of the layer from which one is selected.
        probe: a parameter of the layer, whose device and dtype are used.

    Attributes:
        current: layout that the next call will use.
        settled: whether the layout was predicted or loaded from a checkpoint, so that no more
            decisions are made.
        decisions: decisions that `pop_decisions` has not returned yet.
    """

    exploring = False

    def __init__(self, config: MoEConfig, layouts: Layouts, probe: Tensor) -> None:
        self.config, self.layouts, self.probe = config, layouts, probe
        self.comm = layouts.place.comm
        self.current, self.settled = layouts.fixed, self.comm.size == 1
        self.decisions: tuple[TunerDecision, ...] = ()

    def layout(self, routing: Routing, training: bool) -> tuple[LayerLayout, None]:
        """Return the layout for this call, and None instead of a timer. Evaluation calls use the
        current layout.

        During compilation, the graph cannot depend on a number that other ranks send. The
        configured layout is therefore used until the first call that is not compiled.
        """
        if training and not self.settled and not torch.compiler.is_compiling():
            self._settle(routing)
        return self.layouts.at(self.current), None

    def pop_decisions(self) -> tuple[TunerDecision, ...]:
        """Return the decision if it has not been returned before."""
        fresh, self.decisions = self.decisions, ()
        return fresh

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint.

        A resumed run uses the same layout, regardless of the number of tokens in its first batch.
        """
        return {"ranks": self.comm.size,
                "predicted": self.current.as_dict() if self.settled else None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the layout of an earlier run.

        If the earlier run had a different number of ranks, or if the current settings do not allow
        its layout, the layout is predicted again.
        """
        chosen = state.get("predicted")
        if chosen is None or state.get("ranks") != self.comm.size:
            return
        choice = dataclasses.replace(LayoutChoice.from_dict(chosen),
                                     algorithm=self.current.algorithm, kernel=self.current.kernel)
        try:
            if choice.exchanges and choice.send not in self.layouts.sends():
                raise ValueError(f"dispatch.send={self.config.dispatch.send!r} does not allow "
                                 f"send={choice.send!r}")
            if "send" not in chosen and len(self.layouts.sends()) > 1:
                raise ValueError("the checkpoint predates the setting dispatch.send")
            self.layouts.at(choice)
        except ValueError as error:
            if self.comm.rank == 0:
                log.info("the checkpoint's layout (%s) is replaced by a new prediction: %s",
                         choice.words, error)
            return
        self.current, self.settled = choice, True

    def _settle(self, routing: Routing) -> None:
        copies = self.layouts.visited_copies()
        most = torch.tensor([routing.ids_TK.size(0),
                             *count_visits(routing, self.layouts.place, copies)],
                            dtype=torch.float64)
        tokens, *visited = self.comm.hosts.all_reduce(most, "max").tolist()
        if tokens == 0:  # no rank has a token, so a later call decides
            return
        self.settled, tokens = True, int(tokens)
        visits = as_visits(visited, copies, self.config.router.experts_per_token)
        best, seconds, configured = self._best(tokens, visits)
        why = (f"predicted {show_time(seconds)} for {tokens} tokens on each rank, compared with "
               f"{show_time(configured)} as configured")
        self.current = best
        self.decisions = (TunerDecision(0, f"{tokens} tokens", best, "predict", why, seconds),)
        text = f"layout: {best.words}; predicted {show_time(seconds)}"
        fixed = self.layouts.fixed
        if best != fixed:
            keeps = f"parallel.r={fixed.r}" if best.r != fixed.r else "the all-to-all"
            text += f" instead of {show_time(configured)} (`--moe-parallel fixed` keeps {keeps})"
        text += self._sent(best, visits)
        log_once(self.comm, text, text)  # layers of the same shape share one line

    def _sent(self, choice: LayoutChoice, visits: Visits | None) -> str:
        """Describe how often a token's row is sent, or return "" if it is sent once per expert."""
        if choice.send == "rows":
            return ""
        cluster = default_cluster(self.comm, self.probe.device)
        shape = layer_shape(self.config, self.layouts.place, self.probe, 1)
        rows = rows_of_token(cluster, shape.top_k, choice.r, shape.limits, visits)
        sent = rows.nodes if choice.send == "nodes" else rows.ranks
        between = sent * cluster.between
        return (f"; rows sent per token: {sent:.2f}, between nodes: {between:.2f}; "
                f"saved by sending once: {100 * (1 - sent / rows.pairs):.0f} %")

    def _best(self, tokens: int, visits: Visits | None) -> tuple[LayoutChoice, float, float]:
        """Return the best layout, its predicted time, and the predicted time of the configured
        layout, both in seconds.
        """
        fixed, layouts = self.layouts.fixed, self.layouts
        values: dict[str, Sequence[Any]] = {
                  "r": layouts.legal(), "algorithm": [fixed.algorithm], "kernel": [fixed.kernel],
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
        configured, best = worth_taking(costs, fixed, device.memory_bytes)
        return best.choice, best.seconds, configured.seconds


def worth_taking(costs: Sequence[LayerCost], fixed: LayoutChoice,
                 memory_bytes: float) -> tuple[LayerCost, LayerCost]:
    """Return the costs of the configured layout and of the recommended layout.

    The recommended layout is the fastest layout that saves enough time and fits into memory.

    Args:
        costs: costs of all layouts, sorted by time, with the fastest layout first.
        fixed: layout that the settings specify.
        memory_bytes: size of the device's memory in bytes.
    """
    configured = next(cost for cost in costs if cost.choice == fixed)
    for cost in costs:
        more = cost.memory_bytes - configured.memory_bytes
        if more <= MEMORY_SHARE * memory_bytes and cost.seconds <= (1 - GAIN) * configured.seconds:
            return configured, cost
    return configured, configured


def _with_sizes(kept: KeptRouting, sizes: SentSizes, dispatcher: Dispatcher) -> KeptRouting:
    """Add to the routing the row counts that are already known, so that the dispatcher does not
    exchange them again.
    """
    while isinstance(dispatcher, WrappedDispatcher):
        dispatcher = dispatcher.inner
    routing = dataclasses.replace(kept.routing,
                                  sizes=dataclasses.replace(sizes, owner=dispatcher))
    before = routing if kept.before is kept.routing else kept.before
    return dataclasses.replace(kept, routing=routing, before=before)


class PrefillPieces:
    """Chooses the number of pieces for each evaluation call of a layer.

    Nothing is timed, so runs are bitwise reproducible.

    Args:
        config: settings of the layer.
        layouts: the layouts of the layer from which a layout is selected.
        probe: a parameter of the layer, whose device and dtype are used.

    Raises:
        ValueError: If the rows of the dispatcher cannot be divided, or if ranks other than the
            owner may compute rows of an expert.
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
                raise ValueError(f"parallel.prefill=True cannot be combined with {name}={value!r}, "
                                 f"whose rows cannot be divided by load. Use {remedy}, or "
                                 "parallel.prefill=False")
        self._chosen: dict[tuple[LayoutChoice, int], LayoutChoice] = {}

    def cut(self, layout: LayerLayout, kept: KeptRouting) -> tuple[LayerLayout, KeptRouting]:
        """Return the layout with the best number of pieces for this load, and the routing.

        All ranks return the same layout. If the ranks have exchanged row counts, the returned
        routing contains them. The maximum number of tokens on any rank is sent together with the
        row counts, which the ranks must exchange anyway. With fixed slots or
        `dispatch.equal_tokens`, this maximum is known without communication. In all other cases
        (with `dispatch.send`, or with a capacity and exact rows), an all-reduce is needed.
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
        """Return the layout with the best number of pieces for at most `tokens` tokens per rank."""
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
        predicted = {whole: layer_cost(shape, cluster, device, whole).forward.seconds}
        for axis in CUTS:
            most = place.local if axis == "experts" else tokens
            for pieces in PIECES[1:] if axis in self.layouts.piece_axes(layout.send) else ():
                if pieces <= most:
                    choice = dataclasses.replace(whole, d=pieces, piece_axis=axis)
                    seconds = layer_cost(shape, cluster, device, choice).forward.seconds
                    # a CPU does this work instead of computing; a GPU only waits for late launches
                    predicted[choice] = (seconds + (pieces - 1) * host_s
                                         if self.probe.device.type == "cpu"
                                         else max(seconds, pieces * host_s))
        # of equal times prefer fewer pieces, then rows, which divide evenly under any load
        best = min(predicted, key=lambda choice: (float(f"{predicted[choice]:.6g}"), choice.d,
                                                  choice.piece_axis != "rows"))
        if predicted[best] > (1 - PREFILL_GAIN) * predicted[whole]:
            best = whole
        if self.comm.rank == 0:
            log.info("evaluation of about %d tokens on each rank: %s; predicted %s instead of %s "
                     "in one piece", tokens, best.words, show_time(predicted[best]),
                     show_time(predicted[whole]))
        return best
