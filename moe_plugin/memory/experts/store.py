"""`ExpertStore`, which stores the experts of a layer in host memory or in a file and loads them
into a cache on the device. Experts are computed in the slots of the cache.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.watchdog import ends_all_ranks
from moe_plugin.memory.copier import Copier, Ticket
from moe_plugin.memory.experts.cache import CacheSpec, ExpertCache, StoreCounters, shared_cache
from moe_plugin.memory.experts.files import ExpertFile
from moe_plugin.memory.tiers import HostTier, TierTensor, read_values
from moe_plugin.records import RowCounts, RowPlan
from moe_plugin.utils.machine import to_device


# Operations on rows of experts: in parts, in another order, or with other counts.
def counts_of(rows: RowCounts | RowPlan) -> list[int]:
    """Return the number of rows for each expert."""
    return (rows.counts if isinstance(rows, RowPlan) else rows).host


def parts(rows_RD: Tensor, counts: RowCounts,
           room: int) -> Iterator[tuple[Tensor, RowCounts, list[int]]]:
    """Divide the rows into groups of at most `room` experts. For each group, yield its rows, the
    row counts of all experts (0 outside the group), and the indices of the group's experts.
    """
    active = [expert for expert, n in enumerate(counts.host) if n]
    groups = [active[at:at + room] for at in range(0, len(active), room)]
    lengths = [sum(counts.host[e] for e in group) for group in groups]
    for part_RD, group in zip(rows_RD.split(lengths), groups, strict=True):
        yield part_RD, RowCounts([n if e in group else 0 for e, n in enumerate(counts.host)]), group


def with_counts(rows: RowCounts | RowPlan, lengths: list[int]) -> RowCounts | RowPlan:
    """Return the same rows with different row counts for the experts."""
    counts = RowCounts(lengths)
    return dataclasses.replace(rows, counts=counts) if isinstance(rows, RowPlan) else counts


def order_of(lengths: Sequence[int], slots: Sequence[int], device: torch.device) -> Tensor:
    """Return a permutation (int64 [R]) that sorts the rows of the experts by slot."""
    ends = torch.tensor(list(lengths)).cumsum(0).tolist()
    runs = [torch.arange(ends[i] - lengths[i], ends[i])
            for i in sorted(range(len(slots)), key=slots.__getitem__)]
    return to_device(torch.cat(runs), device)


def reordered(plan: RowPlan, order_R: Tensor, lengths: list[int]) -> RowPlan:
    """Return the same rows in the order given by a permutation."""
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(order_R.shape[0], device=order_R.device)
    position_TK = plan.position_TK
    moved_TK = place_R[position_TK.clamp(min=0)]
    return dataclasses.replace(
        plan, source_R=plan.source_R.index_select(0, order_R), counts=RowCounts(lengths),
        position_TK=torch.where(position_TK < 0, position_TK, moved_TK))


Parts = Sequence[tuple[int, Mapping[str, Tensor]]]  # expert, and its targets by parameter name


class HostWeights:
    """The parameters of experts that are stored in host memory. Each parameter name is mapped to a
    tensor [L, ...], or to None if the experts do not have this parameter.

    names: the names of the parameters that are copied to slots.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], names: Collection[str],
                 device: torch.device) -> None:
        self.parameters, self.names, self.tier = parameters, names, HostTier(device)

    def fetch(self, copier: Copier, parts: Parts) -> Ticket:
        """Start copying experts into slots of the cache."""
        wanted = []
        for expert, targets in parts:
            for name, target in targets.items():
                source = self._plain(name).detach()[expert]
                wanted.append((target, TierTensor(tuple(source.shape), source.dtype, source)))
        return self.tier.fetch(copier, wanted)

    def _plain(self, name: str) -> nn.Parameter:
        parameter = self.parameters.get(name)
        if parameter is None:  # a parametrization or an adapter replaced the parameter
            raise ValueError(f"experts' {name} is wrapped by another module, but "
                             "experts.store=host needs plain parameters; merge or remove the "
                             "wrapper, or use experts.store=device")
        return parameter

    @property
    def version(self) -> object:
        """An object that changes whenever a parameter changes, computed from the version counters
        and memory addresses of all parameters.
        """
        return [(value._version, value.data_ptr()) for name in self.names
                if (value := self.parameters.get(name)) is not None]


class FileWeights:
    """Experts that are stored in a file. If the parameters of an expert have not been loaded, they
    are initialized on first use.

    Args:
        file: existing file, or file created by `own_file`.
        new_file: function that creates an unnamed file. By default, the file has the dtype of the
            layer.
        draw: function that writes the initial parameters of an expert to `targets`. `draw` is
            called as `draw(expert, targets)`.
    """

    def __init__(self, file: ExpertFile, new_file: Callable[..., ExpertFile],
                 draw: Callable[[int, Mapping[str, Tensor]], None]) -> None:
        self.file, self._new_file, self._draw = file, new_file, draw
        self.written = set() if file.writable else set(range(file.local))
        self._fills, self._read = 0, False

    def fetch(self, copier: Copier, parts: Parts) -> Ticket:
        """Start copying experts into slots of the cache."""
        # the current file, even if it is replaced before the copy runs
        parts, file, written = list(parts), self.file, self.written
        self._read = True

        def read() -> None:
            for expert, targets in parts:
                self._ensure_written(expert, file, written)
                held = file.held(expert)
                for name, target in targets.items():
                    read_values(held[name], target, file.name)

        expert_bytes = sum(held.nbytes for held in file.held(0).values())
        return copier.start_call(read, len(parts) * expert_bytes)

    @property
    def version(self) -> object:
        """Number of times that the file has been filled."""
        return self._fills

    @property
    def filled(self) -> bool:
        """True if the parameters of all experts have been loaded."""
        return self._fills > 0 or not self.file.writable

    @ends_all_ranks(OSError)
    def fill(self, read: Mapping[str, Callable[[int], Tensor]]) -> None:
        """Write the parameters of all experts to the file, one expert at a time. Parameters whose
        names are not in `read` are not changed.

        Args:
            read: mapping from the name of a parameter to a function that returns it for one expert.
        Raises:
            TierError: If the disk is full, in which case the previous parameters remain.
        """
        # running copies may still write initial values to a file that was read
        unused = self.file.writable and not self.written and not self._read
        file = self.file if unused else self._new_file()
        for expert in range(self.file.local):
            if len(read) < len(self.file.shapes):
                for name, x in self.values(expert).items():
                    if name not in read:
                        file.write(expert, name, x)
            for name, values in read.items():
                file.write(expert, name, values(expert))
        self.file, self.written = file, set(range(self.file.local))
        self._fills += 1

    def mapped(self) -> dict[str, Tensor]:
        """Map the experts into memory, as `ExpertFile.mapped` does. If other processes can change
        the file, the file is copied first.

        Raises:
            TierError: If the file was truncated or cannot be read, or if the disk is full.
        """
        if not self.file.writable:
            copy = self._new_file(self.file.dtype)
            for expert in range(self.file.local):
                for name, x in self.values(expert).items():
                    copy.write(expert, name, x)
            return copy.mapped()
        for expert in range(self.file.local):
            self._ensure_written(expert, self.file, self.written)
        return self.file.mapped()

    def values(self, expert: int) -> dict[str, Tensor]:
        """Read the parameters of an expert."""
        if expert not in self.written:
            return self._drawn(expert, self.file.dtype)
        made = self._empty(self.file.dtype)
        for name, held in self.file.held(expert).items():
            read_values(held, made[name], self.file.name)
        return made

    def _empty(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: torch.empty(shape, dtype=dtype) for name, shape in self.file.shapes.items()}

    def _drawn(self, expert: int, dtype: torch.dtype) -> dict[str, Tensor]:
        made = self._empty(dtype)
        self._draw(expert, made)
        return made

    def _ensure_written(self, expert: int, file: ExpertFile, written: set[int]) -> None:
        if expert not in written:
            for name, x in self._drawn(expert, file.dtype).items():
                file.write(expert, name, x)
            written.add(expert)


class ExpertStore:
    """The stored experts of a layer, and the cache whose slots are used to compute them.

    Args:
        weights: object that stores the parameters of the experts.
        spec: specification of the cache on the device. Layers with equal specifications share a
            cache.
        first: global index of the first expert stored on this rank.
        local: number of experts on this rank, L.

    Attributes:
        counters: cache statistics for this layer.
        cache: cache whose slots are used to compute the experts.
    """

    def __init__(self, weights: HostWeights | FileWeights, spec: CacheSpec, first: int,
                 local: int) -> None:
        self.weights, self.first, self.local = weights, first, local
        self.counters = StoreCounters()
        self._join(spec)

    def _join(self, spec: CacheSpec) -> None:
        self.cache: ExpertCache = shared_cache(spec)
        self.number = self.cache.add_layer(self.local)
        self._leaving = weakref.finalize(self, self.cache.drop_layer, self.number, self.local)
        # when the interpreter exits, the cache needs no update
        self._leaving.atexit = False  # type: ignore[misc]  # typeshed lists no such slot
        self._seen = self.weights.version

    def move(self, spec: CacheSpec) -> None:
        """From the next call on, use a cache with a different dtype or device."""
        if spec != self.cache.spec:
            self._leaving()
            self._join(spec)

    def room(self, experts: int) -> int:
        """Return how many of `experts` experts can be computed at once; see `ExpertCache.room`."""
        return self.cache.room(experts)

    @contextmanager
    def use(self, experts: Sequence[int]) -> Iterator[list[int]]:
        """Load at most `room` experts of this rank, and yield the indices of their slots. See
        `ExpertCache.use`.

        Raises:
            TierError: If the experts cannot be read. All other ranks are stopped as well.
        """
        self._follow()
        with ends_all_ranks(OSError), self.cache.use(self.number, experts, self._fetch,
                                                     self.counters) as slots:
            yield slots

    def prefetch(self, ids: Iterable[int]) -> None:
        """Start loading experts that this layer may soon need, without waiting for them.

        Args:
            ids: distinct global indices of experts. Experts stored on other ranks are skipped, as
                are experts for which no slot is available.
        """
        self._follow()
        mine = [expert - self.first for expert in ids if 0 <= expert - self.first < self.local]
        if mine:
            self.cache.prefetch(self.number, mine, self._fetch, self.counters)

    def forget(self) -> None:
        """Evict all experts of this layer because their stored parameters have changed."""
        self.cache.forget(self.number)

    def resident(self) -> list[int]:
        """Return the experts of this rank that are in slots or that are being copied to slots."""
        return self.cache.resident(self.number)

    def _follow(self) -> None:
        version = self.weights.version
        if version != self._seen:
            self.forget()
            self._seen = version

    def _fetch(self, parts: Parts) -> Ticket:
        return self.weights.fetch(self.cache.copier, parts)

    def __getstate__(self) -> dict[str, Any]:
        return {"weights": self.weights, "spec": self.cache.spec, "first": self.first,
                "local": self.local, "counters": replace(self.counters)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        counters = state.pop("counters")
        ExpertStore.__init__(self, **state)
        self.counters = counters
