"""The records that are passed between the parts of one MoE layer.

All tensor names in the package end in a shape suffix made of these letters:

* T: the tokens of this rank
* D: the width of the model
* K: the expert choices per token
* E: the experts of the whole expert-parallel group
* L: the experts of this rank
* R: the rows that this rank's experts compute
* F: the inner width of an expert
* C: the slots per expert and source rank
* W: the ranks of the expert-parallel group
* S: the shards of one expert, which is W / E if there are fewer experts than ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_plugin.utils.machine import exporting, to_device
from moe_plugin.utils.pytrees import as_pytree


@dataclass(frozen=True)
class RowCounts:
    """The number of rows of each local expert, as a list on the host."""

    host: list[int]

    @property
    def number(self) -> int:
        """The number of local experts, L."""
        return len(self.host)

    @property
    def total(self) -> int:
        """The number of rows of all local experts, R."""
        return sum(self.host)

    @property
    def even(self) -> bool:
        """Whether all experts are known to have the same number of rows."""
        for count in self.host:
            if count != self.host[0]:
                return False
        return True

    @property
    def real(self) -> int | Tensor:
        """The number of rows that contain tokens. A scalar tensor if only the device knows it."""
        return sum(self.host)

    def lengths(self) -> list[int]:
        """Return the number of rows of each expert, without filler rows."""
        return self.host

    def device(self, device: torch.device) -> Tensor:
        """Return the number of rows of each expert, without filler rows, as int64 [L].

        The host does not wait for a GPU.
        """
        if torch.compiler.is_compiling():
            return torch.tensor(self.host, dtype=torch.int64, device=device)
        if device.type != "cpu" and len(set(self.host)) == 1:
            return torch.full((len(self.host),), self.host[0], dtype=torch.int64, device=device)
        return to_device(self.host, device)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class DeviceCounts(RowCounts):
    """The number of rows of each local expert, known only on the device.

    The rows are in a buffer of fixed length. The rows of the experts come first, one expert after
    the other. The remaining rows are filler, whose results are never read. Kernels that read
    lengths from the device skip the filler. Kernels that need lengths on the host use `host`, where
    filler rows belong to the last expert.

    Attributes:
        lengths_L: int64 [L], the number of rows of each expert.
        rows: the number of rows of the buffer (R).
    """

    lengths_L: Tensor
    rows: int
    _host: list[int] | None

    def __init__(self, lengths_L: Tensor, rows: int) -> None:
        object.__setattr__(self, "lengths_L", lengths_L)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "_host", None)

    @property  # type: ignore[misc]
    def host(self) -> list[int]:  # type: ignore[override]
        """The number of rows of each expert. The last number includes filler rows.

        The first access waits for the device.
        """
        if self._host is not None:
            return self._host
        before = self.lengths()[:-1]
        counts = [*before, self.rows - sum(before)]
        for count in counts if exporting() else ():  # type: ignore[no-untyped-call]
            # without this bound torch.export would specialize the program to the traced load
            torch._check(count >= 0)  # type: ignore[no-untyped-call]
        object.__setattr__(self, "_host", counts)
        return counts

    @property
    def number(self) -> int:
        """The number of local experts, L."""
        return self.lengths_L.shape[0]

    @property
    def total(self) -> int:
        """The number of rows of the buffer, R."""
        return self.rows

    @property
    def even(self) -> bool:
        """Always False, because the host does not know the lengths."""
        return False

    @property
    def real(self) -> Tensor:
        """The number of rows of all experts without filler, an int64 scalar on the device."""
        return self.lengths_L.sum()

    def lengths(self) -> list[int]:
        """Return the number of rows of each expert, without filler rows.

        The host waits for the device unless the buffer is empty.
        """
        return self.lengths_L.tolist() if self.rows else [0] * self.number

    def device(self, device: torch.device) -> Tensor:
        """Return the number of rows of each expert, without filler rows, as int64 [L]."""
        return self.lengths_L


@dataclass(frozen=True)
class RowPlan:
    """The tokens that each expert reads as its rows, and the positions of the results.

    Without an exchange the tokens are this rank's own tokens. After an exchange they are the rows
    in the order in which they arrived.

    Attributes:
        source_R, position_TK: the maps from rows to choices and from choices to rows, as described
            in `kernels.rows`. The rows are ordered by expert.
        weights_TK: [T, K], differentiable gate weights. It is None if all weights are 1.
        counts: the number of rows of each expert. With fixed slots, empty slots are also counted.
        complete: True if every choice has a row and no slot is empty. False if this is not known.
    """

    source_R: Tensor
    position_TK: Tensor
    weights_TK: Tensor | None
    counts: RowCounts
    complete: bool = False

    @property
    def token_R(self) -> Tensor:
        """The token of each row, int64 [R]. Empty slots have token 0."""
        choice_R = self.source_R if self.complete else self.source_R.clamp(min=0)
        choices = self.position_TK.shape[1]
        return choice_R if choices == 1 else choice_R // max(1, choices)


@dataclass(frozen=True)
class ExpertRows:
    """The input of one computation of this rank's experts.

    Attributes:
        x: [R, D] rows, ordered by expert. If `rows` is a `RowPlan`, x is [T, D] tokens.
        rows: the number of rows of each expert, or a `RowPlan`. With a `RowPlan` the result is
            [T, D], the weighted sum of each token's rows.
        parameters: the `FFNParameters` to compute with, such as gathered parameters. It is None if
            the experts use their stored parameters.
        strategy: a `kernels.expert_ffn.Strategy` that computes the experts. It is None if the
            configured strategy is used.
        started: a function that experts in host memory or on disk call as soon as their weights
            have arrived, before they compute, so that the next weights can be fetched during the
            computation.
    """

    x: Tensor
    rows: RowCounts | RowPlan
    parameters: Any = None
    strategy: Callable[..., Tensor] | None = None
    started: Callable[[], object] | None = None


class ParameterRequest:
    """A request that experts accept instead of rows, and answer with their `local_parameters`.

    The request passes through `forward`, because an adapter that wraps the experts changes their
    parameters only while its own `forward` runs.
    """


class Sent:
    """The rows of one call that are sent to the experts and back.

    Iterating yields the input of this rank's experts in pieces, each as soon as it has arrived. The
    caller passes the results of a piece to `put_back` before it requests the next piece.

    Args:
        arriving: the pieces, in the order in which they arrive.
        anchor: the tensor that was passed to `Dispatcher.dispatch` as `anchor`.

    Attributes:
        results: the results passed to `put_back`, in order. A dispatcher may replace a result with
            a placeholder while the result is sent back.
    """

    def __init__(self, arriving: Iterable[ExpertRows], anchor: Tensor | None = None) -> None:
        self.arriving, self.anchor = arriving, anchor
        self.results: list[Tensor] = []

    def __iter__(self) -> Iterator[ExpertRows]:
        return iter(self.arriving)

    def put_back(self, result: Tensor) -> None:
        """Accept the result of the latest piece, which may now be sent back.

        The result is [R, D], or [T, D] if the piece has a `RowPlan`.
        """
        self.results.append(result)


@as_pytree()
@dataclass(frozen=True)
class TokenInfo:
    """Additional inputs that some routers and losses need for a call.

    The tensors may have the shape of the leading axes of the tokens.

    Attributes:
        token_ids_T: int64, the vocabulary index of each token. The router `hash` reads it.
        sequence_T: int64 in 0..sequences-1, the sequence of each token. The loss `sequence` reads
            it.
        sequences: the number of sequences. It must be at least 1 if `sequence_T` is read.
        router_index: the index of the configured router that routes this call, equal on all ranks.
            It is None if `router.selection` chooses the router.
    """

    token_ids_T: Tensor | None = None
    sequence_T: Tensor | None = None
    sequences: int = 0
    router_index: int | None = None

    def flat(self) -> "TokenInfo":
        """Return a copy in which the tensors have a single token axis."""
        return self._each(lambda x: x.reshape(-1))

    def piece(self, pieces: int, index: int) -> "TokenInfo":
        """Return the part number `index` of `pieces` equal parts of flat information.

        The last part is padded with zeros.
        """
        return self._each(lambda x_T: torch.cat([x_T, x_T.new_zeros(-x_T.shape[0] % pieces)]).chunk(
            pieces)[index])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "TokenInfo":
        new = [x if x is None else change(x) for x in (self.token_ids_T, self.sequence_T)]
        return replace(self, token_ids_T=new[0], sequence_T=new[1])


@dataclass(frozen=True)
class CountedChoices:
    """The load of a set of choices, which is counted once for losses, statistics and dispatch.

    Attributes:
        ids_TK: the choices. The value -1 stands for no expert.
        load_KE: int64. Entry [k, e] is the number of tokens whose choice number k is expert e.
        complete: True if ids_TK contains no -1. False if this is not known.
    """

    ids_TK: Tensor
    load_KE: Tensor
    complete: bool


@dataclass(frozen=True)
class Routing:
    """The decision of a router for one call.

    Attributes:
        ids_TK: int64, the expert of each choice. The value is -1 for padding tokens and for choices
            that were not used. A token has no expert twice.
        weights_TK: float32, or float64 in a float64 layer. The differentiable gate weight of each
            choice, 0 where ids_TK is -1.
        priority_T: float, the priority of each token under batch-prioritized capacity. Tokens with
            larger values are dropped later. It is None without batch-prioritized capacity.
        losses: the differentiable scalar losses by name, before they are multiplied by weights.
        entropy: a scalar, the mean entropy in nats of the scores of all unmasked tokens.
        tokens: a scalar int64, the number of unmasked tokens.
        passthrough_T: the differentiable weight with which a token is added to its output (BASE).
            It is None if the weight is 0.
        router: the name of the router that routed this call, or None if the layer has one router.
        chosen_TK: int64, the choices before a second-expert policy removed some, -1 for padding. It
            is None if no choice was removed.
        undropped_TK: int64, the choices before the router applied a capacity (Megatron's router),
            -1 for padding. It is None if the router has no capacity.
        capacity: the number of slots per expert of the router's capacity. It is None if the router
            has no capacity.
        counted: the load of the choices, for `dispatch.rows.known_load`. It is None if not counted.
        sizes: the exchange of sizes with other ranks that a dispatcher started one block early,
            when the choices were known. It is None if no exchange was started. See
            `moe_plugin.dispatch.base.Dispatcher.start_sizes`.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    priority_T: Tensor | None
    losses: dict[str, Tensor]
    entropy: Tensor
    tokens: Tensor
    passthrough_T: Tensor | None = None
    router: str | None = None
    chosen_TK: Tensor | None = None
    undropped_TK: Tensor | None = None
    capacity: int | None = None
    counted: CountedChoices | None = None
    sizes: Any = None

    def with_kept(self, keep_TK: Tensor, weights_TK: Tensor) -> "Routing":
        """Return this routing without the choices for which keep_TK is False."""
        return replace(self, ids_TK=self.ids_TK.masked_fill(~keep_TK, -1), weights_TK=weights_TK)


@dataclass(frozen=True)
class KeptRouting:
    """A routing to which the capacity has been applied.

    Attributes:
        routing: the routing without dropped choices.
        before: the routing before any choice was dropped.
        slots_TK: int64 [T, K], the slot of each choice in its expert, or -1 for a dropped choice.
            None without a capacity.
        capacity: the number of slots per expert and source rank, equal on all ranks. None without a
            capacity.
        any_load: True if the capacity is large enough for any load, so that no choice is dropped
            and the host does not need to know the load.
    """

    routing: Routing
    slots_TK: Tensor | None
    capacity: int | None
    before: Routing
    any_load: bool = False


@dataclass(frozen=True)
class Tokens:
    """The validated tokens of one call that this rank routes, on a single axis.

    Attributes:
        x_TD: [T, D] tokens.
        mask_T: bool [T], which is False for padding tokens. It is None if there is no padding.
        info: additional inputs of routers and losses.
        shape: the shape of the layer's input.
        count: the number of tokens of the input, before the ranks divided them among each other.
    """

    x_TD: Tensor
    mask_T: Tensor | None
    info: TokenInfo
    shape: torch.Size
    count: int


@dataclass(frozen=True)
class DispatchPlan:
    """The inputs of dispatch and combine for one call. Each dispatcher adds further fields.

    All ranks have agreed on the sizes in the plan, and reading the plan never waits for a device.

    Attributes:
        rows: the number of rows that this rank's experts compute. A scalar tensor if only the
            device knows the number.
    """

    rows: int | Tensor
