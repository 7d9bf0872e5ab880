"""Frozen experts (`experts.frozen`) whose codes are stored in host memory or in a file.

Only the codes and scales are stored outside the device. Biases and adapters are ordinary parameters
on the device. The matmuls of the forward and backward passes copy the codes of a few experts to the
slots of the cache, and nothing but the location of the codes is saved for the backward pass. Since
the codes never change, adapters can be trained even if the codes are in a file.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.experts.base import Experts, mark_expert
from moe_plugin.experts.frozen import FrozenExperts, part_shapes, rounder
from moe_plugin.kernels.expert_ffn import apply_to_rows
from moe_plugin.kernels.frozen import FROZEN_FORMATS, PARTS, FrozenWeight, frozen
from moe_plugin.memory.experts.store import (
    ExpertStore,
    FileWeights,
    HostWeights,
    counts_of,
    parts,
)
from moe_plugin.memory.experts.stored import StoredExperts
from moe_plugin.records import ExpertRows, ParameterRequest, RowCounts, RowPlan


@dataclasses.dataclass(frozen=True)
class StoredWeight(FrozenWeight):
    """Frozen weights whose codes are copied to the device when they are needed.

    Attributes:
        parts: tensors on the meta device, which have the shapes of the codes and scales.
        experts: the experts that the weights belong to.
        names: names of the byte tensors.
    """

    experts: Any = None
    names: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.experts.like.device  # type: ignore[no-any-return]

    @property
    def is_meta(self) -> bool:
        return self.device.type == "meta"

    def matmul(self, rows: Tensor, counts: RowCounts, back: bool = False) -> Tensor:
        return _Fetched.apply(rows, self, counts, back)  # type: ignore[no-any-return]

    def decoded(self, expert: int, *args: Any, **kwargs: Any) -> Tensor:
        [values_oI] = [weight.decoded(0, *args, **kwargs) for weight in self.each([expert])]
        return values_oI

    def tiles(self, expert: int, *args: Any, **kwargs: Any) -> Iterator[tuple[slice, Tensor]]:
        for weight in self.each([expert]):
            yield from weight.tiles(0, *args, **kwargs)

    def each(self, experts: Sequence[int]) -> Iterator[FrozenWeight]:
        """Yield the weights [1, I, O] of several experts, one after another. Each is valid until
        the next one is requested.
        """
        for slot, buffers in self.experts.in_slots(experts):
            yield FrozenWeight(self.format, tuple(buffers[name][slot:slot + 1]
                                                  for name in self.names),
                               self.dtype, self.first_scale, self.scales_apart)


class _Fetched(torch.autograd.Function):
    """A grouped matmul with stored weights, or with their transposes. The codes of a few experts at
    a time are on the device. See `FrozenWeight.matmul`.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: StoredWeight, counts: RowCounts,
                back: bool) -> Tensor:
        ctx.weight, ctx.counts, ctx.back = weight, counts, back
        groups = rows.split(counts.host)
        active = [expert for expert, count in enumerate(counts.host) if count]
        made = [one.matmul(groups[expert], RowCounts([counts.host[expert]]), back)
                for expert, one in zip(active, weight.each(active), strict=True)]
        return torch.cat(made) if made else rows.new_zeros(0, weight.shape[1 if back else 2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Fetched.apply(grad, ctx.weight, ctx.counts, not ctx.back), None, None, None


class StoredFrozenExperts(StoredExperts, FrozenExperts):
    """Frozen experts whose codes are in host memory or in a file. `freeze_stored` changes the class
    of `StoredExperts` to this class.
    """

    _pinned: Mapping[int, int]  # slots of the experts that a forward pass is computing

    @property
    def template(self) -> StoredFrozenExperts:  # type: ignore[override]
        return self

    @property
    def like(self) -> Tensor:  # type: ignore[override]
        """An empty tensor that has the dtype and the device of the layer."""
        return self._probe

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.uint8

    def _weight(self, name: str, tensors: Mapping[str, Any] | None = None,
                first_shard: int | None = None) -> FrozenWeight | None:
        form = FROZEN_FORMATS[self.format]
        names = form.names(name)
        if names[0] not in self.shapes:
            return None
        weight = StoredWeight(
            self.format, tuple(torch.empty(self.placement.local, *self.shapes[part],
                                           dtype=torch.uint8, device="meta") for part in names),
            self.dtype, experts=self, names=names)
        return self._placed(weight, name, first_shard) if form.nested else weight

    def forward(self, work: ExpertRows | ParameterRequest) -> Tensor:
        """See `Experts`. If the cache is too small for all experts that have rows, a few experts
        are computed at a time.

        Raises:
            TierError: If the codes cannot be read.
        """
        assert isinstance(work, ExpertRows), "parameters are only asked of experts that gather"
        parameters = work.parameters or self.compute_parameters()

        def compute(x: Tensor, rows: RowCounts | RowPlan, active: Sequence[int]) -> Tensor:
            with self._use(active):
                if work.started is not None:
                    work.started()
                return frozen(x, rows, parameters)

        active = [expert for expert, count in enumerate(counts_of(work.rows)) if count]
        room = self.store.room(len(active))
        if len(active) <= room:
            return compute(work.x, work.rows, active)
        return apply_to_rows(lambda rows_RD, counts: torch.cat(
            [compute(*part) for part in parts(rows_RD, counts, room)]), work.x, work.rows)

    def replace_parameters(self, biases: Mapping[str, Tensor]) -> None:
        """Replace the weights by codes without values, and the biases by parameters on the device.
        """
        for name in PARTS:
            self._parameters.pop(name, None)
        for name, value in biases.items():
            self.register_parameter(name, mark_expert(nn.Parameter(value, False)))
        for name, shape in self.shapes.items():
            self.register_parameter(name, None)
            if not self.on_disk:
                where = "meta" if self.like.is_meta else "cpu"
                self._adopt(name, torch.empty(self.placement.local, *shape, dtype=torch.uint8,
                                              device=where))
        self.store = ExpertStore(self._weights(), self._spec(), self.placement.first_expert,
                                 self.placement.local)

    def _weights(self) -> HostWeights | FileWeights:
        if self.on_disk:  # `experts.store_path` may be a file of the weights before rounding
            return FileWeights(self._new_file(), self._new_file, self.draw)
        return super()._weights()

    @contextmanager
    def _use(self, experts: Sequence[int]) -> Iterator[None]:
        with self.store.use(experts) as slots:
            self._pinned = dict(zip(experts, slots, strict=True))
            try:
                yield
            finally:
                self._pinned = {}

    def in_slots(self, experts: Sequence[int]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Yield the slot of each expert and the buffers of the cache, one expert after another. The
        slot is valid until the next one is requested.
        """
        if all(expert in self._pinned for expert in experts):
            yield from ((self._pinned[expert], self.store.cache.buffers) for expert in experts)
            return
        room = self.store.room(len(experts))
        for first in range(0, len(experts), room):
            with self.store.use(experts[first:first + room]) as slots:
                yield from ((slot, self.store.cache.buffers) for slot in slots)

    @torch.no_grad()
    def write(self, read: Mapping[str, Callable[[int], Tensor]]) -> None:
        """See `FrozenExperts`. If the codes are in a file, they are written to a new file."""
        weights = self.store.weights
        if isinstance(weights, FileWeights):
            weights.fill(read)
        else:
            super().write(read)

    def local_parameters(self) -> dict[str, Tensor]:
        """See `Experts`. The codes and scales are not included."""
        return {name: value for name, value in super().local_parameters().items()
                if name not in self.shapes}

    def draw(self, slot: int, targets: Mapping[str, Tensor]) -> None:
        """Raise a `ValueError`, because no codes have been loaded."""
        self.reset_parameters()

    def use_layer(self, number: int | None) -> None:
        """See `Experts`. Codes are in a file that contains a single layer."""

    def train(self, mode: bool = True) -> StoredFrozenExperts:
        return Experts.train(self, mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredFrozenExperts:
        codes = {name: self._parameters[name] for name in self.shapes}  # stay where they are
        self._parameters.update(dict.fromkeys(codes))
        Experts._apply(self, fn, recurse)
        self._parameters.update(codes)
        StoredExperts._apply(self, fn, recurse)
        return self


@torch.no_grad()
def freeze_stored(experts: StoredExperts, format: str) -> None:
    """Round the weights of stored experts to a format, and freeze the experts. The codes are stored
    in the same tier as the weights. Biases are moved to the device. See `experts.frozen.freeze`.

    Args:
        experts: experts whose `template` passes `check_format`. They become `StoredFrozenExperts`.
        format: a key of `FROZEN_FORMATS`.
    """
    template, old, device = experts.template, experts.store.weights, experts.store.cache.spec.device
    in_memory = dict(template.named_parameters())
    made: Any = experts
    made.format, made.gated, made.width = format, template.gated, template.w_in_LDF.shape[2]
    made.config, made.placement, made.memory = template.config, template.placement, template.memory
    made.adds_to_main_grad, made.shapes, made._pinned = template.adds_to_main_grad, {}, {}
    biases, names = dict[str, Tensor](), []
    for name, value in in_memory.items():
        if name in PARTS:
            names.append(name)
            made.shapes |= part_shapes(name, value.shape, template.placement, format)
        else:
            biases[name] = torch.empty(value.shape, dtype=experts.dtype, device=device)
    made.__class__ = StoredFrozenExperts
    made.replace_parameters(biases)

    @functools.lru_cache(1)
    def values(expert: int) -> dict[str, Tensor]:
        read = old.values(expert) if isinstance(old, FileWeights) else {
            name: value[expert] for name, value in in_memory.items()}
        found = {name: value.to(device, experts.dtype) for name, value in read.items()}
        for name, bias in biases.items():
            bias[expert] = found[name]
        return found

    if device.type != "meta":
        made.write(rounder({name: partial(_matrix_OI, values, name) for name in names},
                           template.placement, format))


def _matrix_OI(values: Callable[[int], Mapping[str, Tensor]], name: str, expert: int) -> Tensor:
    return values(expert)[name].T
