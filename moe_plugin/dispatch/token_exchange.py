"""Dispatch by packages that send tokens: each once to every rank that has one of its experts.

A rank weights and sums its own experts' results before they leave, so that bytes do not grow with
the number of experts that a token has on one rank. The gradient of a dispatch is a combine, and the
other way round. A `TokenExchange` adapts one package; everything else is here.

Sizes arrive with the rows: the host waits for the package's counts in `dispatch`, once a piece, not
in `plan` (which agrees on the most tokens of any rank, where a package asks for that). Pieces are
consecutive parts of a rank's tokens. Forward, all of them start to travel at once, and the results
of each while the next one is computed, and one piece travels while the layer does other work; this
is so where a package's operations can be waited for later (`supports_pieces`). Backward waits.

Legend: T tokens here; R tokens that arrive; D width; K choices (of HybridEP: one a row).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.torch_comm import TorchComm
from moe_plugin.dispatch.base import DispatchContext, Dispatcher, Sent, expand
from moe_plugin.dispatch.rows import positions, sort_by_expert
from moe_plugin.kernels.activations import first_derivative_only
from moe_plugin.records import DispatchPlan, ExpertRows, KeptRouting, RowCounts, RowPlan

DEVICES, DTYPES = ("cuda",), (torch.bfloat16,)  # what all these packages' kernels take
STEP = 64  # buffers grow by so many tokens; HybridEP's kernels take multiples of it
Wait = Callable[[], object]


def done() -> None:
    """There is nothing to wait for."""


def package_why_not(package: str, file: str, name: str, install: str) -> str | None:
    """None where a package has a file, else the reason and the remedy. It is not imported: that
    loads its libraries and, for some, needs a GPU.

    Args:
        file: below the package's folder, which tells versions apart.
        name: of what is missing.
        install: how it gets there.
    """
    spec = find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if any((Path(folder) / file).is_file() for folder in folders):
        return None
    have = "not installed" if not folders else f"of another version or branch: no {file} in it"
    return (f"the package {package} is {have}; install {name} ({install}), or use "
            "dispatch.name='ragged'")


@dataclass(frozen=True)
class Size:
    """What an exchange is made for.

    Attributes:
        tokens: the most of any rank in one piece, a multiple of 64; 0: it need not be known.
        width: D.
        token_bytes: of a token.
        experts: over all ranks, shards counted.
        top_k: K.
    """

    tokens: int
    width: int
    token_bytes: int
    experts: int
    top_k: int


@dataclass
class Arrival:
    """Tokens on this rank.

    Attributes:
        x_RD: [R, D].
        ids_RK: int64 [R, K], this rank's experts from 0 on; -1: another rank's.
        weights_RK: float32 [R, K].
        counts: rows of each of this rank's experts.
        handle: of the package, for the way back.
        wait: lets the current stream wait for the tensors.
    """

    x_RD: Tensor
    ids_RK: Tensor
    weights_RK: Tensor
    counts: list[int]
    handle: Any
    wait: Wait = done


class TokenExchange(ABC):
    """A package's buffers for one group; making them is collective.

    Attributes:
        comm: the group.
        size: what it must take at most.
    """

    agrees: ClassVar[bool] = True  # whether `Size.tokens` must be known

    def __init__(self, comm: Comm, size: Size) -> None:
        self.comm, self.size = comm, size

    @classmethod
    def key(cls, size: Size) -> tuple[Any, ...]:
        """Sizes of another key need another exchange."""
        return ()

    @abstractmethod
    def send(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: int) -> Arrival:
        """Tokens to the ranks of their experts.

        Args:
            x_TD: contiguous.
            ids_TK: int64, -1: none.
            weights_TK: float32, contiguous.
            experts: over all ranks, shards counted.
        """

    @abstractmethod
    def send_again(self, x_TD: Tensor, handle: Any) -> Tensor:
        """Other values for the same tokens, [R, D]."""

    @abstractmethod
    def send_back(self, x_RD: Tensor, handle: Any, weights_RK: Tensor | None = None
                  ) -> tuple[Tensor, Tensor | None, Wait]:
        """The ranks' parts of each token, and of its weights, summed on its rank: ([T, D], [T, K]).
        """


@dataclass
class _Exchanges:
    """A group's exchanges by class and key."""

    made: dict[tuple[Any, ...], TokenExchange] = field(default_factory=dict)


def exchange_of(kind: type[TokenExchange], comm: Comm, size: Size) -> TokenExchange:
    """The exchange of a group, large enough; made once, and again for more. Collective when made:
    all ranks have the same sizes.
    """
    made = comm.state.get(_Exchanges).made
    key = (kind, *kind.key(size))
    known = made.get(key)
    if known is not None:
        old = known.size
        size = replace(size, **{name: max(getattr(size, name), getattr(old, name))
                                for name in ("tokens", "width", "token_bytes", "top_k")})
        if replace(size, experts=old.experts) == old:
            return known
    with comm.error_context(lambda: f"making buffers of {kind.__name__} for {size}"):
        made[key] = kind(comm, size)
    return made[key]


class TokenExchangePlan(DispatchPlan):
    """What travels. Unlike other plans' its sizes are known only when rows have arrived.

    Args:
        ids_TK: int64 [T, K*S], expert shards of this rank's tokens; -1: none.
        weights_TK: float32 [T, K*S] gate weights, differentiable.
        most: tokens of the rank with most; 0: not asked for.

    Attributes: `arrivals`: of the pieces, set by `dispatch`.
    """

    def __init__(self, ids_TK: Tensor, weights_TK: Tensor, most: int) -> None:
        self.ids_TK, self.weights_TK, self.most = ids_TK, weights_TK, most
        self.arrivals: list[Arrival] = []

    @property
    def rows(self) -> int:  # type: ignore[override]
        """See `DispatchPlan`; 0 before rows have arrived."""
        return sum(sum(arrival.counts) for arrival in self.arrivals)


class _SentTokens(Sent):
    """Pieces of tokens; see `Sent`."""

    def __init__(self, arriving: Iterator[ExpertRows], anchor: Tensor | None,
                 plan: TokenExchangePlan, exchange: TokenExchange) -> None:
        super().__init__(arriving, anchor)
        self.plan, self.exchange = plan, exchange
        self.waits: list[Wait] = []

    def put_back(self, result: Tensor) -> None:
        arrival = self.plan.arrivals[len(self.results)]
        self.results.append(_Return.apply(result, self.anchor, self.exchange, arrival.handle,
                                          self.waits))


class TokenDispatcher(Dispatcher):
    """Tokens by one package's exchange. Subclasses name it: `exchange`, `name`."""

    exchange: ClassVar[type[TokenExchange]]
    name: ClassVar[str]

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        if not isinstance(self.placement.comm, TorchComm):
            raise ValueError(
                f"dispatch.name={self.name!r} does not fit the group {self.placement.comm.name!r}: "
                "must be a torch.distributed group; use 'ragged'")

    def plan(self, kept: KeptRouting) -> TokenExchangePlan:
        """See `Dispatcher`. One all-reduce of a number, which the host reads, where the package
        asks for the most tokens of any rank.
        """
        ids_TK, weights_TK = expand(self.placement, kept.routing, kept.slots_TK)
        most = 0
        if self.exchange.agrees:
            tokens = torch.tensor([ids_TK.shape[0]]).to(ids_TK.device)
            most = int(self.placement.comm.all_reduce(tokens, "max"))
        return TokenExchangePlan(ids_TK.contiguous(), weights_TK.float(), most)

    def dispatch(self, x_TD: Tensor, plan: TokenExchangePlan, anchor: Tensor | None) -> Sent:
        """See `Dispatcher`. Raises: ValueError: not bf16 on a GPU."""
        if x_TD.dtype not in DTYPES or x_TD.device.type not in DEVICES:
            raise ValueError(
                f"dispatch.name={self.name!r} does not fit {x_TD.dtype} on {x_TD.device.type}: "
                f"must be {DTYPES[0]} on {DEVICES[0]}; use 'ragged'")
        pieces, width = self.overlap.pieces, x_TD.shape[1]
        tokens = max(1, -(-plan.most // (pieces * STEP))) * STEP if self.exchange.agrees else 0
        size = Size(tokens, width, width * max(x_TD.element_size(), 2),
                    self.placement.virtual, plan.ids_TK.shape[1])
        exchange = exchange_of(self.exchange, self.placement.comm, size)
        experts = self.placement.virtual
        parts = zip(*(t.tensor_split(pieces) for t in (x_TD, plan.ids_TK, plan.weights_TK)),
                    strict=True)
        sent = [_Send.apply(x, weights, anchor, ids, plan, exchange, experts)
                for x, ids, weights in parts]
        return _SentTokens(self._arriving(sent, plan), anchor, plan, exchange)

    def _arriving(self, sent: list[tuple[Tensor, ...]],
                  plan: TokenExchangePlan) -> Iterator[ExpertRows]:
        for (x_RD, weights_RK, ids_RK), arrival in zip(sent, plan.arrivals, strict=True):
            arrival.wait()
            order_N, _ = sort_by_expert(ids_RK, self.placement.local)
            counts = RowCounts(arrival.counts)
            source_R = order_N[:counts.total]
            yield ExpertRows(x_RD, RowPlan(source_R, positions(source_R, ids_RK), weights_RK,
                                           counts))

    def combine(self, sent: Sent, plan: TokenExchangePlan) -> Tensor:
        for wait in sent.waits:  # type: ignore[attr-defined]
            wait()
        return torch.cat(sent.results) if len(sent.results) > 1 else sent.results[0]


class _Send(torch.autograd.Function):
    """Tokens and gate weights out; their gradients come back summed."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, anchor: Tensor | None,
                ids_TK: Tensor, plan: TokenExchangePlan, exchange: TokenExchange,
                experts: int) -> tuple[Tensor, ...]:
        arrival = exchange.send(x_TD.contiguous(), ids_TK, weights_TK.contiguous(), experts)
        plan.arrivals.append(arrival)
        ctx.exchange, ctx.handle = exchange, arrival.handle
        ctx.mark_non_differentiable(arrival.ids_RK)
        return arrival.x_RD, arrival.weights_RK, arrival.ids_RK

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_RD: Tensor, grad_RK: Tensor, _: Any) -> tuple[Any, ...]:
        x_TD, weights_TK, wait = ctx.exchange.send_back(grad_RD.contiguous(), ctx.handle,
                                                        grad_RK.float().contiguous())
        wait()
        return x_TD, weights_TK, None, None, None, None, None


class _Return(torch.autograd.Function):
    """The ranks' parts of each token, summed on the token's rank; their gradient is sent out."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, anchor: Tensor | None, exchange: TokenExchange,
                handle: Any, waits: list[Wait]) -> Tensor:
        ctx.exchange, ctx.handle = exchange, handle
        y_TD, _, wait = exchange.send_back(y_RD.contiguous(), handle)
        waits.append(wait)
        return y_TD

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        rows_RD = ctx.exchange.send_again(grad_TD.contiguous(), ctx.handle)
        return rows_RD, None, None, None, None
