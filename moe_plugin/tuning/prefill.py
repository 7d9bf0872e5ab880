"""`parallel.prefill`: pieces of an evaluation's calls by their load (EPS-MoE).

Source: Qian et al., "EPS-MoE: Expert Pipeline Scheduler for Cost-Efficient MoE Inference", 2024.
The forward pass of a call is predicted with its rows in one piece, and cut along rows or along
experts into several; the fastest is taken. Which kernel computes a piece follows from the piece's
own load, as ever (`experts.compute: auto`).
"""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import Tensor

from moe_plugin.config import MoEConfig
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.layer_cost import layer_cost
from moe_plugin.planner.prefill import CUTS, PIECES
from moe_plugin.planner.units import show_time
from moe_plugin.tuning.default_hardware import default_cluster, default_device, layer_shape
from moe_plugin.tuning.layouts import Layouts

log = logging.getLogger(__name__)
GAIN = 0.02  # of the time in one piece that several must save


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

    def choice(self, layout: LayoutChoice, tokens: int) -> LayoutChoice:
        """The layout in as many pieces as suit a call; the same on all ranks.

        Collective, by one all-reduce of a number, unless `dispatch.equal_tokens` promises that all
        ranks have as many tokens.

        Args:
            layout: that the call would have. tokens: of this rank.
        """
        if not layout.exchanges or self.comm.size == 1 or layout.spill != "never":
            return layout
        if not self.config.dispatch.equal_tokens:
            most = torch.tensor([tokens], dtype=torch.float64)
            tokens = int(self.comm.hosts.all_reduce(most, "max").item())
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
        found = {whole: layer_cost(shape, cluster, device, whole).forward.seconds}
        for axis in CUTS:
            most = place.local if axis == "experts" else tokens
            for pieces in PIECES[1:] if axis in self.layouts.traits.piece_axes else ():
                if pieces <= most:
                    choice = dataclasses.replace(whole, d=pieces, piece_axis=axis)
                    found[choice] = layer_cost(shape, cluster, device, choice).forward.seconds
        # of equals the fewest pieces; along rows, which stay even under any load
        best = min(found, key=lambda choice: (float(f"{found[choice]:.6g}"), choice.d,
                                              choice.piece_axis != "rows"))
        if found[best] > (1 - GAIN) * found[whole]:
            best = whole
        if self.comm.rank == 0:
            log.info("evaluation of about %d tokens on each rank: %s; predicted %s instead of %s "
                     "in one piece", tokens, best.words, show_time(found[best]),
                     show_time(found[whole]))
        return best
