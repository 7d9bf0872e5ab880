"""The records that travel through one MoE layer.

Shape legend (used in the whole package): T tokens of this rank, D model width, K choices per token,
E experts of the whole group, L experts of this rank, R rows that reach this rank's experts, F inner
width of an expert, C slots per expert and source rank, W ranks of the expert-parallel group, S
shards of one expert (W / E where E < W).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_plugin.utils.machine import exporting, to_device
from moe_plugin.utils.pytrees import as_pytree


# Rows of a rank's experts: how many each has, known on the host or on a device alone, of which
# tokens they are, and how they come and go.
@dataclass(frozen=True)
class RowCounts:
    """Rows by local expert, on the host; made on a device when asked for."""

    host: list[int]

    @property
    def number(self) -> int:
        """L, local experts."""
        return len(self.host)

    @property
    def total(self) -> int:
        """R, rows of all local experts."""
        return sum(self.host)

    @property
    def even(self) -> bool:
        """Whether it is known that all experts have as many rows."""
        for count in self.host:
            if count != self.host[0]:
                return False
        return True

    @property
    def real(self) -> int | Tensor:
        """Rows that experts compute for tokens; a scalar tensor where a device alone knows it."""
        return sum(self.host)

    def lengths(self) -> list[int]:
        """Rows of each expert, filler left out."""
        return self.host

    def device(self, device: torch.device) -> Tensor:
        """Rows of each expert, filler left out, int64 [L]; the host does not wait for a GPU."""
        if torch.compiler.is_compiling():
            return torch.tensor(self.host, dtype=torch.int64, device=device)
        if device.type != "cpu" and len(set(self.host)) == 1:
            return torch.full((len(self.host),), self.host[0], dtype=torch.int64, device=device)
        return to_device(self.host, device)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class DeviceCounts(RowCounts):
    """Rows by local expert in a buffer of fixed length, known on the device alone.

    The experts' rows come first, expert after expert; the rest of the buffer is filler, of which no
    result is read. Kernels that take lengths from the device leave the filler out. `host` is for
    those that need lengths on the host: the host reads the device, and the filler counts as rows of
    the last expert.

    Attributes:
        lengths_L: int64 [L], rows of each expert.
        rows: R, rows of the buffer.
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
        """Rows of each expert, filler included in the last; waits for the device, once."""
        if self._host is not None:
            return self._host
        before = self.lengths()[:-1]
        counts = [*before, self.rows - sum(before)]
        for count in counts if exporting() else ():  # type: ignore[no-untyped-call]
            # the program is to hold for any load
            torch._check(count >= 0)  # type: ignore[no-untyped-call]
        object.__setattr__(self, "_host", counts)
        return counts

    @property
    def number(self) -> int:
        """L, local experts."""
        return self.lengths_L.shape[0]

    @property
    def total(self) -> int:
        """R, rows of the buffer."""
        return self.rows

    @property
    def even(self) -> bool:
        """False: nothing is known."""
        return False

    @property
    def real(self) -> Tensor:
        """Rows of all experts, an int64 scalar on the device."""
        return self.lengths_L.sum()

    def lengths(self) -> list[int]:
        """Rows of each expert, filler left out; waits for the device if there are rows."""
        return self.lengths_L.tolist() if self.rows else [0] * self.number

    def device(self, device: torch.device) -> Tensor:
        """Rows of each expert, filler left out, int64 [L]."""
        return self.lengths_L


@dataclass(frozen=True)
class RowPlan:
    """Rows that experts take out of tokens, and where their results belong.

    Without an exchange the tokens are this rank's own; after one they are the rows as they arrived.

    Attributes:
        source_R, position_TK: see `kernels.rows`; rows lie expert after expert.
        weights_TK: [T, K] gate weights, differentiable; None: all are 1.
        counts: rows by expert; with fixed slots also the empty ones.
        complete: every choice has a row and no slot is empty; False: perhaps not.
    """

    source_R: Tensor
    position_TK: Tensor
    weights_TK: Tensor | None
    counts: RowCounts
    complete: bool = False

    @property
    def token_R(self) -> Tensor:
        """Token of each row, int64 [R]; 0 for an empty slot."""
        choice_R = self.source_R if self.complete else self.source_R.clamp(min=0)
        choices = self.position_TK.shape[1]
        return choice_R if choices == 1 else choice_R // max(1, choices)


@dataclass(frozen=True)
class ExpertRows:
    """Work for this rank's experts.

    Attributes:
        x: [R, D] rows, expert after expert, or, with a `RowPlan`, [T, D] tokens.
        rows: rows by expert; or a `RowPlan`: the result then is [T, D], each token's rows weighted
            and summed.
        parameters: `FFNParameters` to compute with, e.g. gathered ones; None: those that the
            experts store.
        strategy: a `kernels.expert_ffn.Strategy`, how to compute; None: as configured.
        started: experts outside the device call it when all that they need is there, before they
            compute: what comes next can be fetched meanwhile.
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
    """The rows of one call: on their way to their experts, and back.

    Iterating gives work for this rank's experts, piece by piece, each when it has arrived. The
    results of a piece are put back before the next one is taken.

    Args:
        arriving: see above.
        anchor: as given to `Dispatcher.dispatch`.

    Attributes:
        results: of the pieces that were put back, in order, or what stands for them on their way.
    """

    def __init__(self, arriving: Iterable[ExpertRows], anchor: Tensor | None = None) -> None:
        self.arriving, self.anchor = arriving, anchor
        self.results: list[Tensor] = []

    def __iter__(self) -> Iterator[ExpertRows]:
        return iter(self.arriving)

    def put_back(self, result: Tensor) -> None:
        """Results [R, D] of the piece that was taken last, which may start to travel now; of a
        `RowPlan`'s tokens [T, D].
        """
        self.results.append(result)


@as_pytree()
@dataclass(frozen=True)
class TokenInfo:
    """What some routers and losses need to know of a call besides the tokens.

    Tensors may have the shape of the tokens' leading axes.

    Attributes:
        token_ids_T: int64, vocabulary index of each token (hash router).
        sequence_T: int64 in 0..sequences-1, the sequence of each token (loss `sequence`).
        sequences: number of sequences, >= 1 where sequence_T is read.
        router_index: which of several configured routers decides this call, the same on all ranks;
            None: as `router.selection` says.
    """

    token_ids_T: Tensor | None = None
    sequence_T: Tensor | None = None
    sequences: int = 0
    router_index: int | None = None

    def flat(self) -> "TokenInfo":
        """The same with one axis of tokens."""
        return self._each(lambda x: x.reshape(-1))

    def piece(self, pieces: int, index: int) -> "TokenInfo":
        """Of flat information one of `pieces` equal runs of tokens, the last filled with zeros."""
        return self._each(lambda x_T: torch.cat([x_T, x_T.new_zeros(-x_T.shape[0] % pieces)]).chunk(
            pieces)[index])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "TokenInfo":
        new = [x if x is None else change(x) for x in (self.token_ids_T, self.sequence_T)]
        return replace(self, token_ids_T=new[0], sequence_T=new[1])




@dataclass(frozen=True)
class CountedChoices:
    """The load of some choices, counted once for losses, statistics and dispatch.

    Attributes:
        ids_TK: the choices themselves, -1: no expert.
        load_KE: int64, tokens whose j-th choice is expert e.
        complete: ids_TK holds no -1; False: perhaps it does.
    """

    ids_TK: Tensor
    load_KE: Tensor
    complete: bool


@dataclass(frozen=True)
class Routing:
    """What a router decided.

    Attributes:
        ids_TK: int64, expert of each choice; -1: no expert (padding token, choice not taken). A
            token's experts differ.
        weights_TK: float32 (float64 for a float64 layer), gate weight of each choice,
            differentiable; 0 where ids_TK = -1.
        priority_T: float, larger keeps its slot longer under batch-prioritised capacity, if any is.
        losses: raw (unweighted) scalar losses by name, differentiable.
        entropy: scalar, mean entropy in nats of the score distribution over real tokens.
        tokens: scalar int64, number of real (unmasked) tokens.
        passthrough_T: weight of the token itself in its output, differentiable (BASE); None: 0.
        router: of several routers the name of the one that decided; None: there is one.
        chosen_TK: int64, the choices before a second-expert policy took some away, -1 for padding;
            None: it took none.
        undropped_TK: int64, the choices before the router dropped some by a capacity of its own
            (Megatron's router), -1 for padding. None if it has no capacity.
        capacity: slots per expert of that capacity. None if it has no capacity.
        counted: the load of the choices, for `dispatch.rows.known_load`; None: not counted.
        sizes: what a dispatcher began to agree on with other ranks when the choices were known, one
            block early; None: nothing. See `moe_plugin.dispatch.base.Dispatcher.start_sizes`.
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
        """The same routing with dropped choices removed."""
        return replace(self, ids_TK=self.ids_TK.masked_fill(~keep_TK, -1), weights_TK=weights_TK)


@dataclass(frozen=True)
class KeptRouting:
    """A routing after capacity.

    Attributes:
        routing: with dropped choices removed.
        before: the routing before anything was dropped.
        slots_TK: int64 [T, K], slot of each choice in its expert, -1: none; None: no limit.
        capacity: slots made per expert and source rank, equal on all ranks; None: no limit.
        any_load: the capacity fits any load, which the host does not know: nothing is dropped.
    """

    routing: Routing
    slots_TK: Tensor | None
    capacity: int | None
    before: Routing
    any_load: bool = False


@dataclass(frozen=True)
class Tokens:
    """The tokens of one call as a router sees them: checked, on one axis, this rank's part.

    Attributes:
        x_TD: [T, D] tokens.
        mask_T: bool [T], True = real token; None: all are real.
        info: what else is known of them.
        shape: of the layer's input.
        count: tokens of the input, before ranks shared them out.
    """

    x_TD: Tensor
    mask_T: Tensor | None
    info: TokenInfo
    shape: torch.Size
    count: int






@dataclass(frozen=True)
class Overlap:
    """In how many pieces rows travel and are computed, so that exchanges and matmuls overlap.

    Attributes:
        forward, backward: d and d_backward; 0 backward: as forward.
        background: one piece, too, travels in the background, because other work is done
            meanwhile.
        piece_axis: see `dispatch.pieces`.
    """

    forward: int = 1
    backward: int = 0
    background: bool = False
    piece_axis: str = "rows"

    @property
    def pieces(self) -> int:
        """Pieces that travel: so many that both directions can group them evenly."""
        return math.lcm(self.forward, self.backward or self.forward)


@dataclass(frozen=True)
class DispatchPlan:
    """What dispatch and combine of one call need; a dispatcher extends it by its own fields.

    All sizes in it are agreed between ranks, and nothing in it waits for a device.

    Attributes:
        rows: rows that this rank's experts compute; a scalar tensor where a device alone knows it.
    """

    rows: int | Tensor
