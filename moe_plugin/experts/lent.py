"""Experts whose weights their owners lend to other ranks for one call (`planner.spill`).

The weights travel in all-to-alls, so autograd returns the gradients to the owner by the reverse
ones. An owner sends each of an expert's h borrowers one of h parts of its weights, and borrowers
exchange the parts; in backward borrowers sum the parts' gradients, and the owner gets each part of
the sum once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.comm.base import FunctionExchange
from moe_plugin.comm.functional import all_to_all
from moe_plugin.experts.base import Experts
from moe_plugin.kernels.expert_ffn import FFNParameters
from moe_plugin.planner.spill import Loan, SpillPlan
from moe_plugin.records import ExpertRows, Placement, RowCounts

# as it is in memory, whatever format rows travel in
_EXACT = FunctionExchange(lambda comm, x, send, recv: comm.all_to_all(x, send, recv))


@dataclass(frozen=True)
class LentExperts:
    """What a rank borrows in one call.

    Attributes:
        stored: L, experts that this rank stores. guests: experts that it borrows.
        parameters: of the borrowed experts; None: this rank borrows none.
        arrived: what the exchanges of weights end in; it ties them into the graph.
    """

    stored: int
    guests: int
    parameters: FFNParameters | None
    arrived: Tensor

    @classmethod
    def fetch(cls, experts: Experts, place: Placement, spill: SpillPlan) -> LentExperts:
        """Borrow and lend. Collective, in forward and backward."""
        local = experts.local_parameters()
        # stored parameters that are trained: then the exchanges are in every rank's graph
        anchor = next((p for p in experts.parameters() if p.requires_grad), None)
        arrived = _lend(local, place, spill, anchor)
        numbers, parameters = spill.guests(place.comm.rank), None
        if numbers:
            guests = _as_parameters(arrived, local, numbers, place)
            parameters = experts.compute_parameters(guests, 0)
        return cls(place.local, len(numbers), parameters, arrived)

    def tied(self, x_TD: Tensor) -> Tensor:
        """x_TD itself; where nothing is borrowed, backward runs the exchanges of weights for it."""
        return x_TD if self.guests else _Tie.apply(x_TD, self.arrived)

    def split(self, work: ExpertRows) -> Iterator[ExpertRows]:
        """Rows of the stored experts; then, where there are guests, theirs."""
        assert isinstance(work.rows, RowCounts)
        stored = RowCounts(work.rows.host[:self.stored])
        guests = RowCounts(work.rows.host[self.stored:self.stored + self.guests])
        if self.parameters is None:
            yield ExpertRows(work.x, stored, work.parameters, work.strategy)
            return
        own_RD, guest_RD = work.x.split([stored.total, guests.total])
        yield ExpertRows(own_RD, stored, work.parameters, work.strategy)
        yield ExpertRows(guest_RD, guests, self.parameters, work.strategy)


def joined(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Results of what `LentExperts.split` gave on a rank with guests, piece by piece."""
    outputs = iter(outputs)
    for own_RD in outputs:
        yield torch.cat([own_RD, next(outputs)])


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, arrived: Tensor) -> Tensor:
        ctx.like = arrived
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.zeros_like(ctx.like)


def _lend(local: Mapping[str, Tensor], place: Placement, spill: SpillPlan,
          anchor: Tensor | None) -> Tensor:
    """[G * P] weights of this rank's guests, one expert after another; P elements of an expert."""
    size = sum(value[0].numel() for value in local.values())
    parts = _from_owners(local, place, spill, anchor, size)
    if all(len(loan.helpers) == 1 for loan in spill.loans):
        return parts
    mine = [loan for loan in spill.loans if place.comm.rank in loan.helpers]
    return _among_borrowers(parts, mine, place, anchor, size)


def _from_owners(local: Mapping[str, Tensor], place: Placement, spill: SpillPlan,
                 anchor: Tensor | None, size: int) -> Tensor:
    """This rank's part of each of its guests, one after another."""
    rank, ranks = place.comm.rank, range(place.comm.size)
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
    rows_N = torch.cat(pieces) if pieces else like.new_empty(0)
    # loans are ascending by expert, so by owner: what arrives is in their order
    return all_to_all(rows_N, place.comm, _EXACT, send, recv, anchor)


def _among_borrowers(parts_N: Tensor, loans: list[Loan], place: Placement,
                     anchor: Tensor | None, size: int) -> Tensor:
    """All parts of this rank's guests, from its own ones.

    Also where there are none, what is given depends on parts_N and on this exchange: both are then
    reversed in backward on every rank.
    """
    rank, ranks = place.comm.rank, range(place.comm.size)
    split = _cut(parts_N, [_length(loan, rank, size) for loan in loans])
    own = {loan.expert: part for loan, part in zip(loans, split, strict=True)}
    shared = [[loan for loan in loans if peer in loan.helpers and peer != rank] for peer in ranks]
    pieces = [own[loan.expert] for peer in ranks for loan in shared[peer]]
    send = [sum(own[loan.expert].numel() for loan in shared[peer]) for peer in ranks]
    lengths = [[_length(loan, peer, size) for loan in shared[peer]] for peer in ranks]
    arrived_N = all_to_all(torch.cat(pieces) if pieces else parts_N[:0], place.comm, _EXACT, send,
                           [sum(n) for n in lengths], anchor)
    others = iter(_cut(arrived_N, [n for of_peer in lengths for n in of_peer]))
    by_peer = {(loan.expert, peer): next(others) for peer in ranks for loan in shared[peer]}
    if not by_peer:
        return torch.cat([parts_N, arrived_N])
    return torch.cat([own[loan.expert] if peer == rank else by_peer[loan.expert, peer]
                      for loan in loans for peer in loan.helpers])


def _bounds(loan: Loan, helper: int, size: int) -> tuple[int, int]:
    """First element and end of the part of an expert's weights that a borrower gets first."""
    index, parts = loan.helpers.index(helper), len(loan.helpers)
    return size * index // parts, size * (index + 1) // parts


def _length(loan: Loan, helper: int, size: int) -> int:
    start, end = _bounds(loan, helper, size)
    return end - start


def _cut(x_N: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    return x_N.split(lengths) if lengths else ()


def _as_parameters(flat_N: Tensor, local: Mapping[str, Tensor], numbers: list[int],
                   place: Placement) -> dict[str, Tensor]:
    """Parameters by name, [G, ...], of experts (or shards) `numbers`, from [G * P] elements.

    Output biases of a shard are padded to the whole width, each at its own place.
    """
    sizes = [value[0].numel() for value in local.values()]
    parts = flat_N.view(len(numbers), -1).split(sizes, dim=1)
    made = {name: part.reshape(-1, *local[name].shape[1:])
            for name, part in zip(local, parts, strict=True)}
    if place.shards > 1 and "b_out_LD" in made:
        own = made["b_out_LD"].shape[1]
        before = [own * (number // place.local % place.shards) for number in numbers]
        made["b_out_LD"] = torch.stack([
            F.pad(bias_D, (n, own * (place.shards - 1) - n))
            for bias_D, n in zip(made["b_out_LD"], before, strict=True)])
    return made
