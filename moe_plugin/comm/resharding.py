"""Redistribution of a tensor from one layout over ranks to another, as planned by
`planner.resharding`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.planner.resharding import Hop, Slice, TensorLayout, relays, unique_slices

DEPTHS = 64  # tags of one resharding; a job has fewer nodes in a relay chain


class Resharding:
    """A plan that redistributes tensors from one layout over a group's ranks to another layout.

    All ranks of the group must create their plans in the same order. On gloo, only ranks that store
    a part of the tensor in either layout need to participate in a move. Several moves may be in
    progress at the same time. Moves complete in the order they were started. On other backends, all
    ranks must call `TensorMove.end`.

    Args:
        comm: the group. The devices of the two layouts are the ranks of the group.
        source: layout of the tensors before the move.
        target: layout of the tensors after the move.
        nodes: optional. The node index of each rank. Defaults to the nodes of the group's topology.
        searched: False to send the largest slices first, without searching for a faster order.
    Raises:
        ValueError: If the layouts are incompatible; see `planner.resharding.unique_slices`.
    """

    def __init__(self, comm: Comm, source: TensorLayout, target: TensorLayout,
                 nodes: Sequence[int] | None = None, searched: bool = True) -> None:
        self.comm = comm.with_tag(comm.state.next_tag(DEPTHS))
        self.source, self.target = source.boxes.get(comm.rank), target.boxes.get(comm.rank)
        self.slices = unique_slices(source, target)
        hops = relays(self.slices, comm.prepare().node_of if nodes is None else nodes,
                      searched=searched)
        self.rounds = 1 + max((hop.depth for hop in hops), default=0)
        self.sent = [hop for hop in hops if hop.sender == comm.rank]
        self.received = [hop for hop in hops if hop.receiver == comm.rank]
        self.kept = [piece for piece in self.slices if comm.rank in piece.keepers]

    def start(self, x: Tensor | None, dtype: torch.dtype) -> TensorMove:
        """Start a move. This rank sends the parts that it stores, and posts receives for those that
        it needs.

        Args:
            x: this rank's part of the tensor in the source layout, or None if it stores no part.
                The tensor must not change until the move ends.
            dtype: dtype of the tensor to move.
        Raises:
            ValueError: If `x` has an unexpected shape or dtype.
        """
        shape = None if self.source is None else tuple(stop - first for first, stop in self.source)
        given = None if x is None else tuple(x.shape)
        if given != shape or (x is not None and x.dtype != dtype):
            raise ValueError(f"rank {self.comm.rank} must pass its part of the source layout, a "
                             f"tensor of shape {shape} and {dtype}, but passed a tensor of shape "
                             f"{given}{'' if x is None else f' and {x.dtype}'}")
        return (_Posted if self.comm.receive_first else _InRounds)(
            self, None if x is None else x.detach(), dtype)

    def __call__(self, x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Move a tensor and wait until the move is complete; see `start` and `TensorMove.end`."""
        return self.start(x, dtype).end()


class TensorMove(ABC):
    """A move of one tensor that is in progress; see `Resharding`."""

    def __init__(self, plan: Resharding, x: Tensor | None, dtype: torch.dtype) -> None:
        self.plan, self.x = plan, x
        self.buffers = {_key(hop): torch.empty(hop.part[1] - hop.part[0], dtype=dtype,
                                               device=plan.comm.device) for hop in plan.received}
        self.dtype = dtype
        self._flat: dict[int, Tensor] = {}
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Start the messages that can be sent immediately."""

    @abstractmethod
    def arrive(self) -> None:
        """Wait for the remaining messages, and forward received parts to other ranks."""

    def end(self) -> Tensor | None:
        """Complete the move. This rank waits for the parts that it receives and sends, and relays
        parts that other ranks need.

        Returns:
            This rank's part of the tensor in the target layout, or None if the rank stores no part
            in that layout.
        """
        self.arrive()
        plan = self.plan
        if plan.target is None:
            return None
        made = torch.empty([stop - first for first, stop in plan.target], dtype=self.dtype,
                           device=plan.comm.device)
        parts: dict[int, list[tuple[int, int]]] = {}
        for hop in plan.received:
            parts.setdefault(hop.slice, []).append(hop.part)
        for index, spans in parts.items():
            piece = plan.slices[index]
            whole = torch.cat([self.buffers[index, part] for part in sorted(spans)])
            made[piece.within(plan.target)] = whole.view([b - a for a, b in piece.box])
        for piece in plan.kept:
            made[piece.within(plan.target)] = self._stored(piece)
        return made

    def part(self, hop: Hop) -> Tensor:
        """Return the contiguous part that this rank sends in a hop. The part is either the rank's
        own data or data received in an earlier hop.
        """
        if hop.depth:
            return self.buffers[_key(hop)]
        if hop.slice not in self._flat:
            stored = self._stored(self.plan.slices[hop.slice])
            self._flat[hop.slice] = stored.contiguous().view(-1)
        return self._flat[hop.slice][hop.part[0]:hop.part[1]]

    def _stored(self, each: Slice) -> Tensor:
        assert self.x is not None and self.plan.source is not None
        return self.x[each.within(self.plan.source)]


class _Posted(TensorMove):
    """A move on gloo. All receives are posted at once, and parts are relayed on arrival."""

    def begin(self) -> None:
        self._arrivals = [self._at(hop).post([], [(hop.sender, self.buffers[_key(hop)])])
                          for hop in self.plan.received]
        self._sends: list[Callable[[], None]] = []
        self._post(hop for hop in self.plan.sent if not hop.depth)

    def arrive(self) -> None:
        onward: dict[tuple[int, tuple[int, int]], list[Hop]] = {}
        for hop in self.plan.sent:
            if hop.depth:
                onward.setdefault(_key(hop), []).append(hop)
        for hop, arrived in zip(self.plan.received, self._arrivals, strict=True):
            arrived()
            self._post(onward.get(_key(hop), ()))
        for sent in self._sends:
            sent()

    def _post(self, hops: Iterable[Hop]) -> None:
        self._sends += [self._at(hop).post([(hop.receiver, self.part(hop))], []) for hop in hops]

    def _at(self, hop: Hop) -> Comm:
        # Messages between two ranks with the same tag are matched in the order in which they are
        # posted. Both ranks post the hops of one depth in the same order, but not hops of different
        # depths, so each depth has a separate tag.
        return self.plan.comm.with_tag(self.plan.comm.tag + hop.depth)


class _InRounds(TensorMove):
    """A move on backends other than gloo. For each depth of the relay trees, all ranks of the group
    exchange one round of messages.
    """

    def begin(self) -> None:
        pass

    def arrive(self) -> None:
        for depth in range(self.plan.rounds):
            self.plan.comm.send_receive(
                [(hop.receiver, self.part(hop)) for hop in self.plan.sent if hop.depth == depth],
                [(hop.sender, self.buffers[_key(hop)]) for hop in self.plan.received
                 if hop.depth == depth])


def _key(hop: Hop) -> tuple[int, tuple[int, int]]:
    return hop.slice, hop.part
