"""Dispatchers that use external packages to send each token once to each rank that has at least one
of its experts.

Before a rank returns the outputs of its experts, it multiplies them by the gate weights and sums
them per token. The number of bytes sent therefore does not depend on how many of a token's experts
are on the same rank. The backward pass of a dispatch operation is a combine operation, and vice
versa. Each subclass of `TokenExchange` adapts one package. This module contains the code shared by
all adapters.

The row counts arrive together with the rows. The host waits once per piece, in `dispatch`, for the
row counts from the package. `plan` only computes the largest number of tokens on any rank, and does
so only for packages that need this number. A piece is a range of consecutive tokens of a rank. If a
dispatcher declares `supports_pieces`, the operations of its package can run in the background. For
these packages, the forward pass starts sending all pieces immediately, and returns the outputs of
one piece while the next piece is computed. If there is only one piece, its exchange overlaps with
other work of the layer. The backward pass waits for every operation.

In tensor names, T is the number of tokens on this rank, R the number of received tokens, K the
number of choices per token (with HybridEP, one choice per row), and D the width of a token.
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
    """Return immediately. Used by operations that do not run in the background."""


def package_why_not(package: str, file: str, name: str, install: str) -> str | None:
    """Return None if the installed package contains the file, and otherwise the reason and a
    remedy.

    The package is not imported, because that would load its libraries and might require a GPU.

    Args:
        package: name of the package.
        file: path within the package. Only the required version of the package contains this file.
        name: name of the required software, for use in the message.
        install: installation instructions, for use in the message.
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
    """The maximum sizes that an exchange must support.

    Attributes:
        tokens: largest number of tokens on any rank in one piece, rounded up to a multiple of 64.
        width: width of a token, D.
        token_bytes: size of a token in bytes.
        experts: total number of expert shards on all ranks.
        top_k: number of choices per token, K.
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
        x_RD: [R, D], the received tokens.
        ids_RK: int64 [R, K], the index of each chosen expert among this rank's experts. The index
            is -1 for experts on other ranks.
        weights_RK: float32 [R, K], the gate weights.
        counts: number of rows for each expert on this rank.
        handle: object of the package that is needed to return the outputs.
        wait: function that makes the current stream wait until the tensors have been received.
    """

    x_RD: Tensor
    ids_RK: Tensor
    weights_RK: Tensor
    counts: list[int]
    handle: Any
    wait: Wait = done


class TokenExchange(ABC):
    """The buffers that a package needs to exchange tokens within one group. Creating the buffers is
    collective.

    Attributes:
        comm: the group.
        size: maximum sizes that the buffers support.
        agrees: True if the package needs `Size.tokens`.
    """

    agrees: ClassVar[bool] = True

    def __init__(self, comm: Comm, size: Size) -> None:
        self.comm, self.size = comm, size

    @classmethod
    def key(cls, size: Size) -> tuple[Any, ...]:
        """Return a key. Sizes with different keys require different exchanges."""
        return ()

    @abstractmethod
    def send(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: int) -> Arrival:
        """Send tokens to the ranks of their experts.

        Args:
            x_TD: [T, D], contiguous tensor of tokens.
            ids_TK: int64 [T, K], the expert shard of each choice, or -1 if it has no expert.
            weights_TK: float32 [T, K], contiguous tensor of gate weights.
            experts: total number of expert shards on all ranks.
        """

    @abstractmethod
    def send_again(self, x_TD: Tensor, handle: Any) -> Tensor:
        """Send other data for the same tokens along the same paths, and return it as [R, D]."""

    @abstractmethod
    def send_back(self, x_RD: Tensor, handle: Any, weights_RK: Tensor | None = None
                  ) -> tuple[Tensor, Tensor | None, Wait]:
        """Return the outputs to the ranks of their tokens, and sum the outputs of each token on
        these ranks.

        Args:
            x_RD: [R, D], outputs computed on this rank.
            handle: the `handle` attribute of the `Arrival` that contained the tokens.
            weights_RK: [R, K], gradients of the gate weights, which are sent together with the
                outputs. Optional.
        Returns: The summed outputs [T, D], the gradients of the gate weights [T, K] or None, and a
            function that waits for these tensors.
        """


@dataclass
class _Exchanges:
    """The exchanges of one group, stored by class and key."""

    made: dict[tuple[Any, ...], TokenExchange] = field(default_factory=dict)


def exchange_of(exchange_class: type[TokenExchange], comm: Comm, size: Size) -> TokenExchange:
    """Return a group's exchange that supports at least the given sizes.

    The exchange is created on first use. If a larger exchange is needed later, it replaces the
    existing one. Creating an exchange is collective. All ranks must pass the same sizes.
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
    """The plan of one call, which contains the choices and gate weights of the tokens to send.
    Unlike in other plans, the row counts are known only after `dispatch`.

    Args:
        ids_TK: int64 [T, K*S], the chosen expert shards of this rank's tokens.
        weights_TK: float32 [T, K*S], the gate weights, which require gradients.
        most: largest number of tokens on any rank, or 0 if the package does not need this number.

    Attributes:
        arrivals: for each piece, the received tokens. Filled by `dispatch`.
    """

    def __init__(self, ids_TK: Tensor, weights_TK: Tensor, most: int) -> None:
        self.ids_TK, self.weights_TK, self.most = ids_TK, weights_TK, most
        self.arrivals: list[Arrival] = []

    @property
    def rows(self) -> int:  # type: ignore[override]
        """See `DispatchPlan`. Before the rows have arrived, the number of rows is 0."""
        return sum(sum(arrival.counts) for arrival in self.arrivals)


class _SentTokens(Sent):
    """Tokens that an external package sends in pieces (`Sent`)."""

    def __init__(self, arriving: Iterator[ExpertRows], anchor: Tensor | None,
                 plan: TokenExchangePlan, exchange: TokenExchange) -> None:
        super().__init__(arriving, anchor)
        self.plan, self.exchange = plan, exchange
        self.waits: list[Wait] = []

    def put_back(self, result: Tensor) -> None:
        arrival = self.plan.arrivals[len(self.results)]
        self.results.append(_Return.apply(result, self.anchor, self.exchange, arrival.handle,
                                          self.waits))


class TokenDispatcher(Dispatcher[TokenExchangePlan]):
    """Base class of dispatchers that send tokens with an external package.

    Attributes:
        exchange: class of the exchange.
        name: registered name of the dispatcher.
    """

    exchange: ClassVar[type[TokenExchange]]
    name: ClassVar[str]

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        if not isinstance(self.placement.comm, TorchComm):
            raise ValueError(
                f"dispatch.name={self.name!r} cannot be used with group "
                f"{self.placement.comm.name!r}, which is not a torch.distributed group. Use "
                "dispatch.name='ragged'")

    def plan(self, kept: KeptRouting) -> TokenExchangePlan:
        """See `Dispatcher`.

        If the package needs the largest number of tokens on any rank, the plan requires one
        all-reduce, and the host waits for it.
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
            ValueError: If the tokens are not bf16 tensors on a GPU.
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
    """Autograd function that sends tokens and gate weights to the ranks of the experts. The
    backward pass sends their gradients back and sums them.
    """

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
    """Autograd function that returns outputs to the ranks of their tokens and sums the outputs of
    each token. The backward pass sends the gradients of the sums.
    """

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
