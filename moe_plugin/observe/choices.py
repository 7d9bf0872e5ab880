"""Which experts tokens choose together, counted in training for `planner.expert_order`.

A hook on each layer's router adds one matrix product of [E, T] and [T, E] to a call, and keeps some
of its tokens' choices; nothing is copied to the host and nothing sent until the record is written.
Layers without `observe.choices` have no hook. Graphs of torch.compile are not recorded.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.layer import MoELayer, layers_in
from moe_plugin.messages import short
from moe_plugin.observe.recorder import marked_here
from moe_plugin.planner.expert_order import CoChoices
from moe_plugin.planner.order_files import dump_choices
from moe_plugin.records import Routing
from moe_plugin.regular_files import check_output, make_folder
from moe_plugin.routing.contract import expert_groups_of
from moe_plugin.routing.replay import counts

logger = logging.getLogger(__name__)

CALLS, TOKENS = 128, 64  # whose choices are kept: of so many calls, tokens of each


class ChoiceLog:
    """Counts the choices of layers, and writes those since the last record to a file.

    A record that cannot be written is lost with a warning: training goes on. Made by all ranks;
    collective.

    Args:
        path: the file, which rank 0 writes; its folder is made.
        layers: with a `MoELayer` each, by the names that records have; none: nothing is written.
        comm: ranks whose tokens belong together.
    Raises:
        ValueError: on all ranks: a file that cannot be written; a router whose experts have fixed
            places.
    """

    def __init__(self, path: str, layers: Mapping[str, nn.Module], comm: Comm) -> None:
        self.path, self.comm = path, comm
        self.layers = {
            name: _LayerChoices(name, layers_in(layer)[0])
            for name, layer in sorted(layers.items())}
        _check_path(path, comm)
        for each in self.layers.values():
            each.listen()
        self._warned: set[str] = set()
        marked_here(self)

    def mark(self) -> Callable[[], None]:
        """What undoes all later counting, as `StatsRecorder.mark`."""
        undone = [each.mark() for each in self.layers.values()]

        def undo() -> None:
            for one in undone:
                one()

        return undo

    def write(self) -> None:
        """Write what was counted since the last time, if anything was. Collective."""
        if not self.layers:
            return
        sums = self.comm.all_reduce(torch.cat([each.taken() for each in self.layers.values()]))
        parts = sums.cpu().split([each.experts**2 + 1 for each in self.layers.values()])
        found = {name: each.record(part)
                 for (name, each), part in zip(self.layers.items(), parts, strict=True)}
        kept = {name: one for name, one in found.items() if one is not None}
        if self.comm.rank != 0:
            return
        if not kept:
            self._warn("nothing", "no layer has recorded a choice: graphs of torch.compile are not "
                       "recorded; train some steps without it")
            return
        try:
            dump_choices(self.path, kept)
        except (OSError, ValueError) as error:
            self._warn("lost", f"a record is lost, and others until it can be written: {error}")

    def _warn(self, what: str, words: str) -> None:
        """Once of each `what`."""
        if what not in self._warned:
            logger.warning("observe.choices=%s: %s", short(self.path), words)
        self._warned.add(what)


def _check_path(path: str, comm: Comm) -> None:
    """`ValueError` on all ranks where rank 0 cannot write the file. Collective."""
    error: Exception | None = None
    try:
        if comm.rank == 0:
            make_folder(Path(path).parent)
            check_output(path)
    except (OSError, ValueError) as found:
        error = found
    [failed] = comm.agree_max([float(error is not None)])
    if failed:
        said = "rank 0 cannot write it and says why" if error is None else str(error)
        raise ValueError(f"observe.choices={short(path)}: {said}") from error


class _LayerChoices:
    """Choices of one layer since the last record.

    Attributes:
        counts: int64 [E * E + 1]: tokens by pair of experts, and all that chose any; None: no call.
        recent: of this rank, the last calls' choices, int64 [n, K].
    """

    def __init__(self, name: str, layer: MoELayer) -> None:
        self.layer, self.reordered = layer, layer.reordered
        self.groups, self.experts = expert_groups_of(layer.router), layer.config.num_experts
        if not self.groups:
            raise ValueError(
                f"observe.choices with router {type(layer.router).__name__} of layer {name!r}: its "
                "choices depend on where experts are, or it does not say that they do not "
                "(expert_groups); must be none; leave it out, or use another router")
        self.counts: Tensor | None = None
        self.recent: deque[Tensor] = deque(maxlen=CALLS)

    def listen(self) -> None:
        """From now on calls of the router are counted."""
        self.layer.router.register_forward_hook(self._add)

    def mark(self) -> Callable[[], None]:
        """See `ChoiceLog.mark`."""
        counts, recent, reordered = self.counts, list(self.recent), self.reordered

        def undo() -> None:
            self.counts, self.recent = counts, deque(recent, maxlen=CALLS)
            self.reordered = reordered

        return undo

    def _follow(self) -> None:
        """What was counted before experts changed places is of other experts."""
        if self.reordered != self.layer.reordered:
            self.counts, self.reordered = None, self.layer.reordered
            self.recent.clear()

    def _add(self, router: nn.Module, args: Any, routing: Routing) -> None:
        if torch.compiler.is_compiling() or not counts(router.training):
            return
        self._follow()
        ids_TK, experts = routing.ids_TK.detach(), self.experts
        chosen_TE = torch.zeros(ids_TK.shape[0], experts + 1, dtype=torch.float32,
                                device=ids_TK.device)
        chosen_TE = chosen_TE.scatter_(1, ids_TK + 1, 1.0)[:, 1:]  # -1: none
        some = chosen_TE.amax(1).sum()
        with torch.autocast(ids_TK.device.type, enabled=False):
            pairs_EE = chosen_TE.T @ chosen_TE  # whole numbers, exact below 2^24 tokens
        new = torch.cat([pairs_EE.flatten(), some[None]]).to(torch.int64)
        self.counts = new if self.counts is None else self.counts + new
        self.recent.append(ids_TK[::max(1, ids_TK.shape[0] // TOKENS)][:TOKENS].clone())

    def taken(self) -> Tensor:
        """The counts, which start again at zero."""
        self._follow()
        counts, self.counts = self.counts, None
        if counts is None:
            return torch.zeros(self.experts**2 + 1, dtype=torch.int64,
                               device=self.layer.comm.device)
        return counts

    def record(self, counts: Tensor) -> CoChoices | None:
        """Of all ranks' counts, on the host, with this rank's recent choices."""
        recent, experts = [ids_TK.tolist() for ids_TK in self.recent], self.experts
        self.recent.clear()
        *pairs, tokens = counts.tolist()
        sets = [tuple(e for e in chosen if e >= 0) for call in recent for chosen in call]
        if not tokens:
            return None
        return CoChoices(tokens, [pairs[e * experts:(e + 1) * experts] for e in range(experts)],
                         [chosen for chosen in sets if chosen], self.groups)
