"""Experts that their owner ranks lend to other ranks for one forward call (`planner.spill`).

The weights are sent by asynchronous all-to-alls. Autograd reverses these all-to-alls to send the
gradients back to the owners. If h ranks borrow an expert, the owner divides the weights into h
parts and sends a different part to each borrower. The borrowers then exchange their parts. In
backward, the borrowers sum the gradients of each part, so the owner receives each sum only once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.comm import algorithms
from moe_plugin.comm.placement import Placement
from moe_plugin.dispatch.base import Dispatcher, Overlap, Sent, WrappedDispatcher
from moe_plugin.dispatch.exchange import PipelinedExchange
from moe_plugin.dispatch.once import OncePlan
from moe_plugin.dispatch.pieces import Piece
from moe_plugin.dispatch.spill import SpillingPlan
from moe_plugin.experts.base import Experts
from moe_plugin.experts.frozen import by_dtype
from moe_plugin.kernels.expert_ffn import FFNParameters
from moe_plugin.planner.spill import Loan, SpillPlan
from moe_plugin.records import ExpertRows, RowCounts


class BorrowedExperts:
    """The experts that a rank borrows for one forward call.

    The weights are transferred while rows are sent and while the rank's own experts are computed.
    All ranks must start these transfers and wait for them, both in forward and in backward.

    Args:
        experts: experts of the layer.
        place: placement that states which ranks store which experts.
        spill: plan that states which ranks compute the rows of each expert.

    Attributes:
        stored: number of experts that this rank stores, L.
        numbers: indices of the borrowed experts, in ascending order.
        travel: transfers of the weights, or None after the weights have arrived. Frozen weights
            are bytes, which have a transfer of their own.
    """

    def __init__(self, experts: Experts, place: Placement, spill: SpillPlan) -> None:
        self.experts, self.place = experts, place
        self.stored, self.numbers = place.local, spill.guests(place.comm.rank)
        self.local = experts.local_parameters()
        # With sharded adapters this runs a collective. It must run once on every rank, because
        # otherwise borrowing and other ranks would reverse collectives in different orders.
        self.own = experts.compute_parameters(self.local) if experts.adapters else None
        # The anchor must be trained, so that the exchanges are part of every rank's graph. If a
        # host stores parameters, or an adapter changes them, the computed parameters are used.
        stored = *experts.parameters(), *self.local.values()
        anchor = next((value for value in stored if value.requires_grad), None)
        self.travel: list[_WeightTransfer] | None = [
            _WeightTransfer(group, place, spill, anchor) for group in by_dtype(self.local)]
        self._parameters: FFNParameters | None = None

    def split(self, work: ExpertRows) -> Iterator[ExpertRows]:
        """Yield the rows of the rank's own experts, followed by the rows of the borrowed experts,
        if any.

        If this rank borrows nothing, the rows of its own experts are linked to the weight exchanges
        in the autograd graph, so that backward still runs these exchanges.
        """
        assert isinstance(work.rows, RowCounts)
        for transfer in self.travel or ():
            transfer.pass_on()
        parameters = work.parameters or self.own
        stored = RowCounts(work.rows.host[:self.stored])
        if not self.numbers:
            x_RD = work.x
            for transfer in self.travel or ():
                x_RD = _Tie.apply(x_RD, transfer.arrived())
            self.travel = None
            yield ExpertRows(x_RD, stored, parameters, work.strategy)
            return
        guests = RowCounts(work.rows.host[self.stored:self.stored + len(self.numbers)])
        own_RD, guest_RD = work.x.split([stored.total, guests.total])
        yield ExpertRows(own_RD, stored, parameters, work.strategy)
        yield ExpertRows(guest_RD, guests, self.parameters(), work.strategy)

    def parameters(self) -> FFNParameters:
        """Wait until the parameters of the borrowed experts have arrived, and return them."""
        if self._parameters is None:
            assert self.travel is not None
            guests = dict[str, Tensor]()
            for transfer in self.travel:
                guests |= _as_parameters(transfer.arrived(), transfer.local, self.numbers,
                                         self.place)
            self._parameters = self.experts.compute_parameters(guests, 0)
            self.travel = None
        return self._parameters


class _SentWithGuests(Sent):
    """Rows that were sent to this rank, some of which are computed by borrowed experts.

    sent: rows of all experts that this rank computes, divided into pieces.
    """

    def __init__(self, sent: Sent, borrowed: BorrowedExperts) -> None:
        super().__init__((part for work in sent for part in borrowed.split(work)), sent.anchor)
        self.sent, self.parts_of_a_piece = sent, 2 if borrowed.numbers else 1

    def put_back(self, result: Tensor) -> None:
        self.results.append(result)
        if len(self.results) == self.parts_of_a_piece:
            whole_RD = torch.cat(self.results) if len(self.results) > 1 else result
            self.results.clear()
            self.sent.put_back(whole_RD)


class BorrowingDispatcher(WrappedDispatcher):
    """A dispatcher that sends rows with an inner dispatcher and lends weights if the plan contains
    loans.

    Args:
        inner: dispatcher that creates a `SpillingPlan` or an `OncePlan`.
        experts: experts of the layer.
    """

    def __init__(self, inner: Dispatcher, experts: Experts) -> None:
        super().__init__(inner)
        self.experts = experts

    def dispatch(self, x_TD: Tensor, plan: SpillingPlan | OncePlan, anchor: Tensor | None) -> Sent:
        """See `Dispatcher`. The transfer of weights starts before any rows are sent."""
        if plan.spill is None:
            return self.inner.dispatch(x_TD, plan, anchor)
        borrowed = BorrowedExperts(self.experts, self.placement, plan.spill)
        return _SentWithGuests(self.inner.dispatch(x_TD, plan, anchor), borrowed)

    def combine(self, sent: Sent, plan: SpillingPlan | OncePlan) -> Tensor:
        return self.inner.combine(sent.sent if isinstance(sent, _SentWithGuests) else sent, plan)


class _Tie(torch.autograd.Function):
    """An identity function whose backward reverses the weight exchanges on this rank.

    A rank that borrows nothing does not use any of the weights that have arrived. Without this
    function, backward on this rank would skip the exchanges, and the owners would wait for this
    rank forever.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrived: Tensor) -> Tensor:
        ctx.like = arrived
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.zeros_like(ctx.like)


class _WeightTransfer:
    """The transfer of weights from owners to borrowers, and between borrowers.

    Args:
        local: parameters of the experts that this rank stores, all of the same dtype.
        place: placement that states which ranks store which experts.
        spill: plan that states which ranks compute the rows of each expert.
        anchor: tensor that links the exchanges to the autograd graph; see `comm.functional`.
    """

    def __init__(self, local: Mapping[str, Tensor], place: Placement, spill: SpillPlan,
                 anchor: Tensor | None) -> None:
        self.local, self.place, self.anchor = local, place, anchor
        self.size = sum(value[0].numel() for value in local.values())
        self.shared = any(len(loan.helpers) > 1 for loan in spill.loans)
        self.mine = [loan for loan in spill.loans if place.comm.rank in loan.helpers]
        self._parts = _post(place, anchor, *_from_owner(local, place, spill, self.size))
        self._others: Callable[[], Tensor] | None = None

    def pass_on(self) -> None:
        """Send the parts that this rank has received from the owners to the other borrowers. Only
        the first call sends anything.
        """
        if not self.shared or self._others is not None:
            return
        rank, ranks = self.place.comm.rank, range(self.place.comm.size)
        self.parts_N = self._parts()
        split = _cut(self.parts_N, [_length(loan, rank, self.size) for loan in self.mine])
        self.own = {loan.expert: part for loan, part in zip(self.mine, split, strict=True)}
        self.by_peer = [[loan for loan in self.mine if peer in loan.helpers and peer != rank]
                        for peer in ranks]
        pieces = [self.own[loan.expert] for peer in ranks for loan in self.by_peer[peer]]
        send = [sum(self.own[loan.expert].numel() for loan in self.by_peer[peer])
                for peer in ranks]
        self.lengths = [[_length(loan, peer, self.size) for loan in self.by_peer[peer]]
                        for peer in ranks]
        rows_N = torch.cat(pieces) if pieces else self.parts_N[:0]
        self._others = _post(self.place, self.anchor, rows_N, send,
                               [sum(n) for n in self.lengths])

    def arrived(self) -> Tensor:
        """Wait until the weights of the borrowed experts have arrived, and return them.

        The returned tensor has the shape [G * P] and contains the P elements of each of the G
        borrowed experts, one expert after another. Even if this rank borrows nothing, the result
        depends on all exchanges in the autograd graph, so that backward reverses the exchanges on
        every rank.
        """
        self.pass_on()
        if self._others is None:
            return self._parts()
        arrived_N = self._others()
        others = iter(_cut(arrived_N, [n for of_peer in self.lengths for n in of_peer]))
        by_peer = {(loan.expert, peer): next(others)
                   for peer, loans in enumerate(self.by_peer) for loan in loans}
        # `arrived_N` is empty here; it is included so that backward reverses its exchange
        if not by_peer:
            return torch.cat([self.parts_N, arrived_N])
        return torch.cat([self.own[loan.expert] if peer == self.place.comm.rank
                          else by_peer[loan.expert, peer]
                          for loan in self.mine for peer in loan.helpers])


def _post(place: Placement, anchor: Tensor | None, rows_N: Tensor, send: list[int],
          recv: list[int]) -> Callable[[], Tensor]:
    """Start an exchange in the background, and return a function that waits for the received
    elements and returns them.

    Weights are sent exactly as they are in memory, regardless of the format in which rows are sent.
    """
    exact = dataclasses.replace(place, algorithm=algorithms.get("linear"))
    piece = Piece(send, recv, RowCounts([sum(recv)]))
    exchange = PipelinedExchange(exact, [piece], False, Overlap())
    token = exchange.post(0, rows_N, anchor)
    return lambda: exchange.take(0, token)


def _from_owner(local: Mapping[str, Tensor], place: Placement, spill: SpillPlan,
                size: int) -> tuple[Tensor, list[int], list[int]]:
    """Return the elements that this rank lends, the number of elements sent to each rank, and the
    number of elements received from each rank.

    A borrower receives one part of each expert that it borrows. The received parts are in the order
    of the experts.
    """
    rank, ranks = place.comm.rank, range(place.comm.size)
    # one vector per expert, so that parts have nearly equal lengths and may span parameters
    flat = {loan.expert: torch.cat([value[loan.expert % place.local].reshape(-1)
                                    for value in local.values()])
            for loan in spill.loans if loan.owner == rank}
    send: list[int] = []
    pieces = []
    for to in ranks:
        parts = [flat[loan.expert][slice(*_bounds(loan, to, size))] for loan in spill.loans
                 if loan.owner == rank and to in loan.helpers]
        send.append(sum(part.numel() for part in parts))
        pieces += parts
    recv = [sum(_length(loan, rank, size) for loan in spill.loans
                if loan.owner == owner and rank in loan.helpers) for owner in ranks]
    like = next(iter(local.values())).detach()
    # loans are sorted by expert and thus by owner, so arriving parts are in the order of the loans
    return torch.cat(pieces) if pieces else like.new_empty(0), send, recv


def _bounds(loan: Loan, helper: int, size: int) -> tuple[int, int]:
    """Return the range of an expert's elements that a borrower receives from the owner."""
    index, parts = loan.helpers.index(helper), len(loan.helpers)
    return size * index // parts, size * (index + 1) // parts


def _length(loan: Loan, helper: int, size: int) -> int:
    start, end = _bounds(loan, helper, size)
    return end - start


def _cut(x_N: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    return x_N.split(lengths) if lengths else ()


def _as_parameters(flat_N: Tensor, local: Mapping[str, Tensor], numbers: list[int],
                   place: Placement) -> dict[str, Tensor]:
    """Convert [G * P] elements to the parameters [G, ...] of the given experts or expert shards, by
    name.

    The output bias of a shard is padded to the whole width, and each shard has its own position
    within this width.
    """
    sizes = [value[0].numel() for value in local.values()]
    parts = flat_N.view(len(numbers), -1).split(sizes, dim=1)
    parameters = {name: part.reshape(-1, *local[name].shape[1:])
                  for name, part in zip(local, parts, strict=True)}
    if place.shards > 1 and "bias_out_LD" in parameters:
        width = parameters["bias_out_LD"].shape[1]
        before = [width * (number // place.local % place.shards) for number in numbers]
        parameters["bias_out_LD"] = torch.stack([
            F.pad(bias_D, (n, width * (place.shards - 1) - n))
            for bias_D, n in zip(parameters["bias_out_LD"], before, strict=True)])
    return parameters
