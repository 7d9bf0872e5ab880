"""Data classes that the components of an MoE layer pass to each other.

In this package, the name of a tensor ends with a suffix that describes its shape. The letters of
the suffix are:

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
from moe_plugin.utils.tensors import as_pytree


@dataclass(frozen=True)
class RowCounts:
    """The number of rows of each local expert, stored as a list on the host."""

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
        """True if all experts certainly have the same number of rows."""
        for count in self.host:
            if count != self.host[0]:
                return False
        return True

    @property
    def real(self) -> int | Tensor:
        """The number of rows with tokens. A scalar tensor if this number is known only on the
        device."""
        return sum(self.host)

    def lengths(self) -> list[int]:
        """Return the number of rows of each expert, not counting filler rows."""
        return self.host

    def device(self, device: torch.device) -> Tensor:
        """Return the number of rows of each expert as int64 [L], not counting filler rows.

        The host does not wait for a GPU.
        """
        if torch.compiler.is_compiling():
            return torch.tensor(self.host, dtype=torch.int64, device=device)
        if device.type != "cpu" and len(set(self.host)) == 1:
            return torch.full((len(self.host),), self.host[0], dtype=torch.int64, device=device)
        return to_device(self.host, device)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class DeviceCounts(RowCounts):
    """The number of rows of each local expert, if it is known only on the device.

    The rows are stored in a buffer of fixed length, which first contains the rows of all experts,
    one expert after the other, followed by filler rows, whose results are never used. Kernels that
    read the row counts from the device skip the filler rows. Kernels that need them on the host use
    `host`, in which filler rows are counted as rows of the last expert.

    Attributes:
        lengths_L: int64 [L], the number of rows of each expert.
        rows: the number of rows in the buffer, R.
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
        """The number of rows of each expert. Filler rows are counted as rows of the last expert.

        When this property is first read, the host waits for the device.
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
        """The number of rows in the buffer, R."""
        return self.rows

    @property
    def even(self) -> bool:
        """Always False, because the host does not know the row counts."""
        return False

    @property
    def real(self) -> Tensor:
        """The total number of rows of all experts, without filler rows, as an int64 scalar."""
        return self.lengths_L.sum()

    def lengths(self) -> list[int]:
        """Return the number of rows of each expert, not counting filler rows.

        The host waits for the device unless the buffer is empty.
        """
        return self.lengths_L.tolist() if self.rows else [0] * self.number

    def device(self, device: torch.device) -> Tensor:
        """Return the number of rows of each expert as int64 [L], not counting filler rows."""
        return self.lengths_L


@dataclass(frozen=True)
class RowPlan:
    """A mapping between tokens and expert rows, in both directions.

    Without an exchange between ranks, the tokens are this rank's own tokens. After an exchange, the
    tokens are the received rows, in the order in which they arrived.

    Attributes:
        source_R, position_TK: mappings from rows to choices and from choices to rows, as described
            in `kernels.rows`. Rows are sorted by expert.
        weights_TK: [T, K], differentiable gate weights. None if all weights are 1.
        counts: the number of rows of each expert, including empty slots if the number of slots is
            fixed.
        complete: True if every choice has a row and no slot is empty. False if this is not certain.
    """

    source_R: Tensor
    position_TK: Tensor
    weights_TK: Tensor | None
    counts: RowCounts
    complete: bool = False

    @property
    def token_R(self) -> Tensor:
        """The index of each row's token, int64 [R]. For empty slots, the index is 0."""
        choice_R = self.source_R if self.complete else self.source_R.clamp(min=0)
        choices = self.position_TK.shape[1]
        return choice_R if choices == 1 else choice_R // max(1, choices)


@dataclass(frozen=True)
class ExpertRows:
    """The input for computing this rank's experts once.

    Attributes:
        x: the rows [R, D], sorted by expert. If `rows` is a `RowPlan`, x contains tokens [T, D].
        rows: the number of rows of each expert, or a `RowPlan`. With a `RowPlan`, the result
            contains the weighted sum of each token's rows, [T, D].
        parameters: the `FFNParameters` to use, such as parameters gathered from other ranks.
            Defaults to the stored parameters.
        strategy: a `kernels.expert_ffn.Strategy` that computes the experts. Defaults to the
            configured strategy.
        started: a function that experts in host memory or on disk call after their weights have
            arrived and before they compute. The function can fetch the next weights, so that this
            transfer overlaps with the computation.
    """

    x: Tensor
    rows: RowCounts | RowPlan
    parameters: Any = None
    strategy: Callable[..., Tensor] | None = None
    started: Callable[[], object] | None = None


class ParameterRequest:
    """An input that makes experts return their `local_parameters` instead of computing rows.

    The request is passed to `forward`, because an adapter that wraps the experts changes their
    parameters only while its own `forward` runs.
    """


class Sent:
    """The rows of one call, which are sent to the experts and back.

    Iterating over this object yields the input of this rank's experts, one piece at a time, as soon
    as each piece has arrived. The caller must pass the result for a piece to `put_back` before it
    requests the next piece.

    Args:
        arriving: the pieces, in the order in which they arrive.
        anchor: the tensor that was passed to `Dispatcher.dispatch` as `anchor`.

    Attributes:
        results: the results that were passed to `put_back`, in this order. While a result is being
            sent back, a dispatcher may replace it with a placeholder.
    """

    def __init__(self, arriving: Iterable[ExpertRows], anchor: Tensor | None = None) -> None:
        self.arriving, self.anchor = arriving, anchor
        self.results: list[Tensor] = []

    def __iter__(self) -> Iterator[ExpertRows]:
        return iter(self.arriving)

    def put_back(self, result: Tensor) -> None:
        """Accept the result of the most recent piece, which may be sent back from now on.

        The shape of the result is [R, D], or [T, D] if the piece contains a `RowPlan`.
        """
        self.results.append(result)


@as_pytree()
@dataclass(frozen=True)
class TokenInfo:
    """Additional inputs of a call, which some routers and losses need.

    The tensors may have the same leading dimensions as the tokens.

    Attributes:
        token_ids_T: int64, the vocabulary index of each token. Required by the router `hash`.
        sequence_T: int64, for each token, the index of its sequence, from 0 to sequences - 1.
            Required by the loss `sequence`.
        sequences: the number of sequences. This number must be at least 1 if `sequence_T` is used.
        router_index: if several routers are configured, the index of the router to use in this
            call. Must be equal on all ranks. None if `router.selection` selects the router.
    """

    token_ids_T: Tensor | None = None
    sequence_T: Tensor | None = None
    sequences: int = 0
    router_index: int | None = None

    def flat(self) -> "TokenInfo":
        """Return a copy whose tensors are flattened to a single token dimension."""
        return self._each(lambda x: x.reshape(-1))

    def piece(self, pieces: int, index: int) -> "TokenInfo":
        """Divide the flattened tensors into `pieces` equal parts, and return the part with the
        given index.

        The last part is padded with zeros.
        """
        return self._each(lambda x_T: torch.cat([x_T, x_T.new_zeros(-x_T.shape[0] % pieces)]).chunk(
            pieces)[index])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "TokenInfo":
        new = [x if x is None else change(x) for x in (self.token_ids_T, self.sequence_T)]
        return replace(self, token_ids_T=new[0], sequence_T=new[1])


@dataclass(frozen=True)
class CountedChoices:
    """Choices of experts and their load. The load is counted once and then used for losses,
    statistics and dispatch.

    Attributes:
        ids_TK: the choices. The index -1 means that no expert is chosen.
        load_KE: int64. Entry [k, e] is the number of tokens whose k-th choice is expert e.
        complete: True if `ids_TK` does not contain -1. False if this is unknown.
    """

    ids_TK: Tensor
    load_KE: Tensor
    complete: bool


@dataclass(frozen=True)
class Routing:
    """The experts that a router has chosen in one call, and the related losses and statistics.

    Attributes:
        ids_TK: int64, the index of the expert for each choice. The index is -1 for padding tokens
            and for unused choices. All choices of a token are different experts.
        weights_TK: float32, or float64 in a float64 layer. The differentiable gate weight of each
            choice. The weight is 0 where ids_TK is -1.
        priority_T: floating-point tensor, the priority of each token if the capacity is
            batch-prioritized. Tokens with the lowest priority are dropped first. None if the
            capacity is not batch-prioritized.
        losses: the differentiable scalar losses by name, not multiplied by their weights.
        entropy: a scalar, the mean entropy of the scores in nats, over all tokens except padding.
        tokens: an int64 scalar, the number of tokens that are not padding.
        passthrough_T: the differentiable weight with which each token is added to its own output,
            as in BASE layers. None if tokens are not added to their outputs.
        router: the name of the router that routed this call. None if there is only one router.
        chosen_TK: int64, the choices before a second-expert policy removed some of them. -1 for
            padding tokens. None if no choice was removed.
        undropped_TK: int64, the choices before the router itself dropped choices to enforce a
            capacity, as Megatron's router does. -1 for padding tokens. None if the router does not
            apply a capacity.
        capacity: the number of slots per expert that the router itself enforced. None if the router
            does not apply a capacity.
        counted: the load of the choices (`dispatch.rows.known_load`), or None if it is not counted.
        sizes: the exchange of row counts between ranks, if a dispatcher started it one block early,
            as soon as the choices were known. None if no exchange was started. See
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
        """Return a copy of this routing that contains only the choices for which `keep_TK` is True.
        """
        return replace(self, ids_TK=self.ids_TK.masked_fill(~keep_TK, -1), weights_TK=weights_TK)


@dataclass(frozen=True)
class KeptRouting:
    """The routing of a call after the capacity has been enforced.

    Attributes:
        routing: the routing without the dropped choices.
        before: the routing including the dropped choices.
        slots_TK: int64 [T, K], the index of the slot that each choice occupies in its expert. -1
            for dropped choices. None if no capacity is set.
        capacity: the number of slots per expert and source rank. Equal on all ranks. None if no
            capacity is set.
        any_load: True if the capacity is large enough for any load. With `any_load`, no choice is
            dropped, and the host does not need to know the load.
    """

    routing: Routing
    slots_TK: Tensor | None
    capacity: int | None
    before: Routing
    any_load: bool = False


@dataclass(frozen=True)
class Tokens:
    """The tokens of one call that this rank routes, after validation. The tokens are flattened to a
    single dimension.

    Attributes:
        x_TD: the tokens, [T, D].
        mask_T: bool [T], False for padding tokens. None if there is no padding.
        info: additional inputs for routers and losses.
        shape: the shape of the layer's input.
        count: the number of tokens in the layer's input, before they were divided among ranks."""

    x_TD: Tensor
    mask_T: Tensor | None
    info: TokenInfo
    shape: torch.Size
    count: int


@dataclass(frozen=True)
class DispatchPlan:
    """The inputs of dispatch and combine in one call. Each dispatcher adds further fields in a
    subclass.

    All ranks have already exchanged the sizes in the plan, so reading it never makes the host wait
    for a device.

    Attributes:
        rows: the number of rows that this rank's experts compute. A scalar tensor if this number is
            known only on the device."""

    rows: int | Tensor
