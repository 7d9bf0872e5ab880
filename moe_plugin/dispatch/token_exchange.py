"""Dispatchers that use external packages to send each token once to each rank with its experts.

A rank weights and sums the results of its own experts before it returns them. The number of bytes
therefore does not depend on how many experts of a token are on one rank. The backward pass of a
dispatch is a combine operation, and vice versa. A subclass of `TokenExchange` adapts one package.
This module contains the code that all adapters share.

The sizes arrive together with the rows: the host waits for the package's counts in `dispatch`, once
per piece. `plan` determines only the largest number of tokens of any rank, and only if the package
needs this number. Pieces are consecutive parts of a rank's tokens. With `supports_pieces`, the
operations of the package can run in the background. The forward pass then sends all pieces at once,
and returns the results of a piece while the next one is computed. The exchange of a single piece
overlaps with other work of the layer. The backward pass waits for each operation.

In tensor names, T is the number of tokens of this rank, R of received tokens, K of choices (with
HybridEP, one per row), and D is the width.
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

DEVICES, DTYPES = ("cuda",), (torch.bfloat16,)  # supported by the kernels of all packages
STEP = 64  # sizes of buffers in tokens are multiples of 64, as HybridEP's kernels require
Wait = Callable[[], object]


def done() -> None:
    """Return immediately. This function is used for operations that need no waiting."""


def package_why_not(package: str, file: str, name: str, install: str) -> str | None:
    """Return None if an installed package contains a file, otherwise the reason and a remedy.

    The package is not imported, because that would load its libraries and may need a GPU.

    Args:
        package: the name of the package.
        file: a path inside the package that only the required version contains.
        name: the name of the required software, for the message.
        install: instructions to install the software, for the message.
    """
    spec = find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if any((Path(folder) / file).is_file() for folder in folders):
        return None
    have = "not installed" if not folders else f"of another version or branch: no {file} in it"
    return (f"the package {package} is {have}. Install {name} ({install}), or use "
            "dispatch.name='ragged'")


@dataclass(frozen=True)
class Size:
    """The sizes that an exchange must support.

    Attributes:
        tokens: the largest number of tokens of any rank in one piece, a multiple of 64, or 0 if the
            package does not need this number.
        width: the width D of a token.
        token_bytes: the number of bytes of a token.
        experts: the number of expert shards on all ranks.
        top_k: the number K of choices per token.
    """

    tokens: int
    width: int
    token_bytes: int
    experts: int
    top_k: int


@dataclass
class Arrival:
    """Tokens that this rank has received.

    Attributes:
        x_RD: [R, D], the tokens.
        ids_RK: int64 [R, K], the local index of each expert on this rank. The value is -1 for
            experts on other ranks.
        weights_RK: float32 [R, K], the gate weights.
        counts: the number of rows of each of this rank's experts.
        handle: an object of the package that is needed to return the results.
        wait: a function that makes the current stream wait for the tensors.
    """

    x_RD: Tensor
    ids_RK: Tensor
    weights_RK: Tensor
    counts: list[int]
    handle: Any
    wait: Wait = done


class TokenExchange(ABC):
    """The buffers of a package for one group. Creating them is collective.

    Attributes:
        comm: the group.
        size: the maximum sizes.
        agrees: whether the package needs `Size.tokens`.
    """

    agrees: ClassVar[bool] = True

    def __init__(self, comm: Comm, size: Size) -> None:
        self.comm, self.size = comm, size

    @classmethod
    def key(cls, size: Size) -> tuple[Any, ...]:
        """Return a key. A key of the sizes. Sizes with different keys need different exchanges."""
        return ()

    @abstractmethod
    def send(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: int) -> Arrival:
        """Send tokens to the ranks of their experts.

        Args:
            x_TD: [T, D], the tokens, contiguous.
            ids_TK: int64 [T, K], the expert shard of each choice. -1 means no expert.
            weights_TK: float32 [T, K], the gate weights, contiguous.
            experts: the number of expert shards on all ranks.
        """

    @abstractmethod
    def send_again(self, x_TD: Tensor, handle: Any) -> Tensor:
        """Send different values for the same tokens, and return the received values [R, D]."""

    @abstractmethod
    def send_back(self, x_RD: Tensor, handle: Any, weights_RK: Tensor | None = None
                  ) -> tuple[Tensor, Tensor | None, Wait]:
        """Return results to the ranks of the tokens and sum them there.

        Args:
            x_RD: [R, D], the results of this rank.
            handle: `Arrival.handle` of the tokens.
            weights_RK: [R, K], gradients of the gate weights that are also returned. Optional.
        Returns: the sums [T, D]; the returned gradients [T, K], or None; and a function that waits
            for both.
        """


@dataclass
class _Exchanges:
    """The exchanges of a group, by class and key."""

    made: dict[tuple[Any, ...], TokenExchange] = field(default_factory=dict)


def exchange_of(exchange_class: type[TokenExchange], comm: Comm, size: Size) -> TokenExchange:
    """Return the exchange of a group for at least these sizes.

    The exchange is created on first use, and is created again if a larger one is needed. Creating
    an exchange is collective, and all ranks must pass the same sizes.
    """
    made = comm.state.get(_Exchanges).made
    key = (exchange_class, *exchange_class.key(size))
    existing = made.get(key)
    if existing is not None:
        old = existing.size
        # grows in each dimension, so that calls of two sizes do not replace each other's exchange
        size = replace(size, **{name: max(getattr(size, name), getattr(old, name))
                                for name in ("tokens", "width", "token_bytes", "top_k")})
        if replace(size, experts=old.experts) == old:
            return existing
    with comm.error_context(lambda: f"making buffers of {exchange_class.__name__} for {size}"):
        made[key] = exchange_class(comm, size)
    return made[key]


class TokenExchangePlan(DispatchPlan):
    """The tokens to send. Unlike in other plans, the sizes are known only after `dispatch`.

    Args:
        ids_TK: int64 [T, K*S], the expert shards of this rank's tokens. -1 means no expert.
        weights_TK: float32 [T, K*S], the gate weights, differentiable.
        most: the largest number of tokens of any rank. It is 0 if the package does not need this
            number.

    Attributes:
        arrivals: the received tokens of each piece. Filled by `dispatch`.
    """

    def __init__(self, ids_TK: Tensor, weights_TK: Tensor, most: int) -> None:
        self.ids_TK, self.weights_TK, self.most = ids_TK, weights_TK, most
        self.arrivals: list[Arrival] = []

    @property
    def rows(self) -> int:  # type: ignore[override]
        """See `DispatchPlan`. The value is 0 before the rows have arrived."""
        return sum(sum(arrival.counts) for arrival in self.arrivals)


class _SentTokens(Sent):
    """Tokens that an exchange sends in pieces (`Sent`)."""

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
    """Base class of dispatchers that use the exchange of a package.

    Attributes:
        exchange: the class of the exchange.
        name: the registered name of the dispatcher.
    """

    exchange: ClassVar[type[TokenExchange]]
    name: ClassVar[str]

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        if not isinstance(self.placement.comm, TorchComm):
            raise ValueError(
                f"dispatch.name={self.name!r} does not fit the group {self.placement.comm.name!r}, "
                "which is not a torch.distributed group. Use dispatch.name='ragged'")

    def plan(self, kept: KeptRouting) -> TokenExchangePlan:
        """See `Dispatcher`.

        If the package needs the largest number of tokens of any rank, this requires one all-reduce,
        for which the host waits.
        """
        ids_TK, weights_TK = expand(self.placement, kept.routing, kept.slots_TK)
        most = 0
        if self.exchange.agrees:
            tokens = torch.tensor([ids_TK.shape[0]]).to(ids_TK.device)
            most = int(self.placement.comm.all_reduce(tokens, "max"))
        return TokenExchangePlan(ids_TK.contiguous(), weights_TK.float(), most)

    def dispatch(self, x_TD: Tensor, plan: TokenExchangePlan, anchor: Tensor | None) -> Sent:
        """See `Dispatcher`.

        Raises:
            ValueError: If the tokens are not bf16 on a GPU.
        """
        if x_TD.dtype not in DTYPES or x_TD.device.type not in DEVICES:
            raise ValueError(
                f"dispatch.name={self.name!r} does not support {x_TD.dtype} on "
                f"{x_TD.device.type}, only {DTYPES[0]} on {DEVICES[0]}. Use dispatch.name='ragged'")
        pieces, width = self.overlap.pieces, x_TD.shape[1]
        tokens = max(1, -(-plan.most // (pieces * STEP))) * STEP if self.exchange.agrees else 0
        size = Size(tokens, width, width * max(x_TD.element_size(), 2),
                    self.placement.virtual, plan.ids_TK.shape[1])
        exchange = exchange_of(self.exchange, self.placement.comm, size)
        experts = self.placement.virtual
        parts = zip(*(t.tensor_split(pieces) for t in (x_TD, plan.ids_TK, plan.weights_TK)),
                    strict=True)
        # all pieces are sent before the first one is awaited
        sent = [_Send.apply(x, weights, anchor, ids, plan, exchange, experts)
                for x, ids, weights in parts]
        return _SentTokens(self._arriving(sent, plan), anchor, plan, exchange)

    def _arriving(self, sent: list[tuple[Tensor, ...]],
                  plan: TokenExchangePlan) -> Iterator[ExpertRows]:
        for (x_RD, weights_RK, ids_RK), arrival in zip(sent, plan.arrivals, strict=True):
            arrival.wait()  # the current stream waits, not the host
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
    """Autograd function that sends tokens and gate weights. The backward pass returns and sums
    their gradients."""

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
    """Autograd function that returns results and sums them for each token. The backward pass sends
    the gradient of the sum."""

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
