"""The return values of an MoE layer: the output, the losses and the statistics.

`moe_plugin.records` explains the letters in tensor names.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_plugin.utils.statistics import Statistic, statistics
from moe_plugin.utils.tensors import as_pytree

# The number of LayerStats that are stored before they are summed. Summing many at once saves small
# device operations; the limit bounds the memory.
FOLD_AT = 64
# a statistic, and a name if `Statistic.by_name` is true (otherwise an empty string)
_Key = tuple[str, str]


@as_pytree("layout", "decisions", "router", "collectives")
@dataclass(frozen=True)
class LayerStats:
    """Statistics of one forward pass on this rank. Tensors are copied to the host only in
    `as_dict`.

    Attributes:
        load_KE: int64 [K, E]. Entry [k, e] is the number of tokens whose k-th choice was expert e,
            including choices that were dropped later.
        kept_KE: int64 [K, E]. Like `load_KE`, but without dropped choices.
        entropy: the mean entropy, in nats, of the router's scores (`Routing.entropy`).
        tokens: the number of tokens without padding (`Routing.tokens`).
        losses: the unweighted losses by name, detached from the autograd graph.
        bytes_sent: the number of bytes that this rank sent to other ranks in the forward pass.
            `bytes_sent` includes rows in both directions, counts, outputs of the shared expert, and
            gathered parameters. An all-reduce is counted as a ring all-reduce. Bytes sent by
            packages such as DeepEP are not included.
        rows: the number of rows that this rank's experts computed (`DispatchPlan.rows`).
        rows_sent: the number of rows sent for the tokens of this rank. The `ragged` dispatcher
            counts one row for each expert, rank or node to which a token is sent (`dispatch.send`),
            including rows that stay on this rank. The `bounded` dispatcher counts all slots,
            including empty slots. Other dispatchers report 0.
        rows_between: how many of the rows in `rows_sent` were sent to other nodes.
        capacity: the number of slots per expert and source rank. None if no token can be dropped.
        layout: the label of the layout, such as `r=1 d=2 linear auto`.
        exchanges: the number of all-to-all exchanges, by algorithm.
        collectives: the name of the active implementation of collectives (`comm.collectives`), such
            as `forest`. None if the group has only one rank.
        decisions: the tuner's decisions since the last call, as plain Python values.
        copies: the number of ranks that report statistics of the same tokens. A sum over ranks must
            multiply the statistics of each rank by 1/copies.
        router: the name of the router that routed this call (`Routing.router`).
        chosen_KE: int64 [K, E]. Like `load_KE`, but including choices that the second-expert policy
            dropped. None if the second-expert policy dropped no choice.
        store: counters of the store for experts outside the device (`StoreCounters`), and the
            number of bytes of cached experts as `resident_bytes`. Empty if all experts are stored
            on the device.
        self_balanced: whether the router balances the load without a balance loss
            (`RouterModule.balances`).
        more: values of the registered statistics that define a `measure` function, by name.
    """

    load_KE: Tensor
    kept_KE: Tensor
    entropy: Tensor
    tokens: Tensor
    losses: dict[str, Tensor]
    bytes_sent: int = 0
    rows: int | Tensor = 0
    rows_sent: int = 0
    rows_between: int = 0
    capacity: int | None = None
    layout: str | None = None
    exchanges: dict[str, int] = field(default_factory=dict)
    decisions: tuple[dict[str, Any], ...] = ()
    copies: int = 1
    router: str | None = None
    chosen_KE: Tensor | None = None
    store: dict[str, int] = field(default_factory=dict)
    collectives: str | None = None
    self_balanced: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as plain numbers, with the names defined in
        `moe_plugin/utils/statistics.py`.

        The host waits for the device.
        """
        sums = StatsSums()
        sums.add(dataclasses.replace(self, copies=1))
        # a record leaves out counters that are 0
        return {**sums.record(sums.vector()), "store": dict(self.store)}


@dataclass
class StatsSums:
    """The statistics of several calls of a layer, reduced by the rules in the table of statistics.

    Attributes:
        pending: the statistics of calls that have not been reduced yet.
        device: float64 sums and maxima of statistics that are tensors.
        host: sums and maxima of statistics that are known on the host.
        counts: for each statistic, the number of calls that reported a value.
        names: for statistics with the reduction `names`, the number of calls that reported each
            name.
        lists: pairs (statistic, value) for statistics with the reduction `list`.
    """

    pending: list[LayerStats] = field(default_factory=list)
    device: dict[_Key, Tensor] = field(default_factory=dict)
    host: dict[_Key, Any] = field(default_factory=dict)
    counts: Counter[_Key] = field(default_factory=Counter)
    names: Counter[_Key] = field(default_factory=Counter)
    lists: list[tuple[str, Any]] = field(default_factory=list)

    def add(self, stats: LayerStats) -> None:
        """Add the statistics of one call, without communication and without copying data to the
        host.
        """
        self.pending.append(stats)
        if len(self.pending) >= FOLD_AT:
            self.fold()

    def copied(self) -> StatsSums:
        """Return an independent copy of these sums."""
        return dataclasses.replace(self, **{
            f.name: copy.copy(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def fold(self) -> None:
        """Reduce the statistics of all pending calls."""
        calls, self.pending = self.pending, []
        if not calls:
            return
        copies_N = calls[0].load_KE.new_tensor([s.copies for s in calls], dtype=torch.float64)
        columns: dict[str, Tensor] = {}  # values by statistic, stacked over calls
        for statistic in statistics.values():
            name = statistic.name
            if statistic.of_calls is not None:
                self._add_tensors(statistic, "", statistic.of_calls(columns))
                continue
            if statistic.reduce == "derived":
                continue
            values = [value for s in calls if (value := statistic.value_of(s)) is not None]
            if statistic.reduce == "list":
                self.lists += [(name, entry) for value in values for entry in value]
            elif statistic.reduce == "names":
                for value in values:
                    by_name = {value: 1} if isinstance(value, str) else value
                    self.names.update({(name, key): n for key, n in by_name.items()})
            elif not statistic.on_device:
                for key, known in _by_key(statistic, values).items():
                    self._add_numbers(statistic, key, known)
            else:
                for key, known in _by_key(statistic, values).items():
                    x = torch.stack(known).double() if known else copies_N.new_zeros(0)
                    if statistic.shared:
                        # ranks with the same tokens each report a fraction of the counts
                        x = x / copies_N.view(-1, *[1] * (x.dim() - 1))
                    columns[name] = x
                    if statistic.reduce == "mean per token":
                        x = x * columns["tokens"]
                    self._add_tensors(statistic, key, x)

    def _add_tensors(self, statistic: Statistic, key: str, x: Tensor) -> None:
        """Add the values of several calls for one statistic, given as a float64 tensor [N] or [N,
        E]."""
        at = (statistic.name, key)
        before = self.device.get(at)
        if statistic.reduce == "max":
            start = x.new_full((1,), -math.inf) if before is None else before[None]
            self.device[at] = torch.cat([start, x]).amax(0)
        else:
            self.device[at] = x.sum(0) if before is None else before + x.sum(0)
        self.counts[at] += len(x)

    def _add_numbers(self, statistic: Statistic, key: str, known: list[Any]) -> None:
        at = (statistic.name, key)
        if statistic.reduce == "max":
            self.host[at] = max([self.host.get(at, -math.inf), *known])
        else:
            self.host[at] = self.host.get(at, 0) + sum(known)
        self.counts[at] += len(known)

    def _lengths(self, ranks: int) -> dict[_Key, int]:
        """Return the number of elements of each statistic in `vector`, in order."""
        lengths = {at: self.device[at].numel() for at in sorted(self.device)}
        lengths |= dict.fromkeys(sorted(self.host), 1)
        return {at: ranks if statistics.get(at[0]).reduce == "max" else length
                for at, length in lengths.items()}

    def vector(self, rank: int = 0, ranks: int = 1) -> Tensor:
        """Return the sums of this rank as a float64 vector. The caller sums the vectors of all
        ranks.

        Each rank writes its maximum to a separate element, so that a single sum over ranks reduces
        both sums and maxima.
        """
        self.fold()
        known = [self.host[at] for at in sorted(self.host)]
        # some dispatchers count rows on the device, and a copy to the host would wait for it
        numbers = [0 if isinstance(x, Tensor) else x for x in known]
        host = torch.tensor([*numbers, *(self.counts[at] for at in sorted(self.counts))],
                            dtype=torch.float64, device=next(iter(self.device.values())).device)
        values = [*(self.device[at] for at in sorted(self.device)),
                  *(x.double() if isinstance(x, Tensor) else host[i] for i, x in enumerate(known))]
        parts = []
        for at, x in zip(self._lengths(ranks), values, strict=True):
            if statistics.get(at[0]).reduce == "max":
                slots = x.new_zeros(ranks)
                slots[rank] = x
                x = slots
            parts.append(x.reshape(-1))
        return torch.cat([*parts, host[len(known):]])

    def record(self, sums: Tensor, ranks: int = 1) -> dict[str, Any]:
        """Return the record that docs/observability.md describes.

        sums: the sum of the `vector` of all ranks. The same statistics must be registered on all
        ranks.
        """
        numbers, totals, start = sums.tolist(), dict[_Key, list[float]](), 0
        for at, length in self._lengths(ranks).items():
            totals[at] = numbers[start : start + length]
            start += length
        counts = dict(zip(sorted(self.counts), numbers[start:], strict=True))
        record: dict[str, Any] = {}
        for statistic in statistics.values():
            record[statistic.name] = self._field(statistic, record, totals, counts)
        return record

    def _field(self, statistic: Statistic, record: dict[str, Any],
               totals: dict[_Key, list[float]], counts: dict[_Key, float]) -> Any:
        """Return the value of one statistic for a record. record: the fields of the record that
        were computed earlier.
        """
        name, reduce = statistic.name, statistic.reduce
        if statistic.derive is not None:
            return statistic.derive(record)
        if reduce == "list":
            return [value for of, value in self.lists if of == name]
        if reduce == "names":
            return {key: n for (of, key), n in self.names.items() if of == name}
        found: dict[str, Any] = {}
        for at, values in totals.items():
            if at[0] == name:
                # counts are integers only up to rounding, because of `shared`
                values = list(map(round, values)) if reduce == "count" else values
                tensor = self.device.get(at)
                found[at[1]] = (values if tensor is not None and tensor.dim() and reduce != "max"
                                else _reduced(reduce, values, counts[at], record))
        if not statistic.by_name:
            return found[""]
        return {key: value for key, value in found.items() if value or reduce != "count"}


def _by_key(statistic: Statistic, values: list[Any]) -> dict[str, list[Any]]:
    """Return the values that calls reported for each name, where values without a name have the
    name "".
    """
    if not statistic.by_name:
        return {"": values}
    names = sorted({*statistic.names, *(key for value in values for key in value)})
    return {key: [value[key] for value in values if key in value] for key in names}


def _reduced(reduce: str, values: list[float], count: float, record: dict[str, Any]) -> Any:
    """Compute the value of a statistic from its sum or from its maxima over all ranks."""
    if reduce == "max":
        return max(values) if count else None
    [total] = values
    if reduce == "mean":
        return total / count if count else None
    if reduce == "mean per token":
        # routers of other frameworks report NaN
        return None if math.isnan(total) else total / record["tokens"] if record["tokens"] else 0.0
    return total


@as_pytree()
@dataclass(frozen=True)
class MoEOutput:
    """The return value of a `MoELayer` call.

    Attributes:
        output: a tensor with the shape and dtype of the input.
        losses: the unweighted, differentiable losses by name. `weighted_loss` computes their
            weighted sum.
        stats: the statistics of the call.
    """

    output: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)
    stats: LayerStats | None = None


def weighted_loss(losses: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    """Return the sum of weight * loss over all names. A loss without a weight is ignored.

    Args:
        losses: scalar losses by name.
        weights: the weight of each loss by name.
    Raises:
        ValueError: there are losses and non-zero weights, but no loss has a non-zero weight.
    """
    terms = [weight * losses[name] for name, weight in weights.items() if weight and name in losses]
    if losses and not terms and any(weights.values()):
        raise ValueError(
            f"there are weights for {', '.join(name for name in weights if weights[name])}, but "
            f"the losses are {', '.join(losses)}. At least one loss needs a weight. Pass weights "
            "for these names, such as layer.config.losses")
    # the start value has the device and dtype of the losses
    return sum(terms, torch.zeros(()) if not losses else next(iter(losses.values())).new_zeros(()))
