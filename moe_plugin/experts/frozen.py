"""Feed-forward experts whose weights are frozen and stored as codes (`kernels.frozen`).

`freeze` rounds the weights of existing experts in place. The experts keep their biases and accept
low-rank adapters. All code that asks for a weight, such as `w_in_LDF`, gets a `FrozenWeight`. The
codes and scales are ordinary parameters without gradients, in bytes. They are saved, loaded,
gathered and lent to other ranks like all other expert parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.placement import Placement
from moe_plugin.experts.base import mark_expert
from moe_plugin.experts.ffn import SHARD_AXIS, FFNExperts, gather_parameters
from moe_plugin.experts.lora import ADAPTER_AXIS, LowRank, as_adapters, of_each_weight
from moe_plugin.kernels.expert_ffn import FFNParameters
from moe_plugin.kernels.frozen import (
    FROZEN_AXIS,
    FROZEN_FORMATS,
    PARTS,
    FrozenWeight,
    frozen,
    quantized,
)
from moe_plugin.records import ExpertRows, ParameterRequest


class FrozenExperts(FFNExperts):
    """Experts whose weights are stored as codes and scales. `freeze` changes the class of other
    experts to this class.

    Attributes:
        format: a key of `FROZEN_FORMATS`.
        like: an empty tensor that has the dtype and the device of the layer.
        width: inner width of the part of each expert that this rank stores.
    """

    traceable = False  # the host reads the number of rows of each expert
    format: str
    like: Tensor
    width: int

    def _weight(self, name: str, tensors: Mapping[str, Any] | None = None,
                first_shard: int | None = None) -> FrozenWeight | None:
        """Return a weight, a key of `PARTS`. See `compute_parameters` for the arguments."""
        form = FROZEN_FORMATS[self.format]
        names, tensors = form.names(name), self._parameters if tensors is None else tensors
        if tensors.get(names[0]) is None:
            return None
        weight = FrozenWeight(self.format, tuple(tensors[part] for part in names), self.dtype)
        return self._placed(weight, name, first_shard) if form.nested else weight

    def _placed(self, weight: FrozenWeight, name: str, first_shard: int | None) -> FrozenWeight:
        """Return the weight with the positions of its scales in the whole expert."""
        place, step = self.placement, FROZEN_FORMATS[weight.format].inputs
        first = place.shard if first_shard is None else first_shard
        inner = self.width // step  # scales of each output of w_out in one shard
        if SHARD_AXIS[name] == 1:
            return replace(weight, first_scale=first * inner, scales_apart=place.shards * inner)
        return replace(weight, first_scale=first * self.width * (weight.shape[1] // step))

    @property
    def w_in_LDF(self) -> FrozenWeight:  # type: ignore[override]
        """Return the input weights, [L, D, F]."""
        weight = self._weight("w_in_LDF")
        assert weight is not None
        return weight

    @property
    def w_gate_LDF(self) -> FrozenWeight | None:  # type: ignore[override]
        """Return the gate weights [L, D, F], or None for experts without gates."""
        return self._weight("w_gate_LDF")

    @property
    def w_out_LFD(self) -> FrozenWeight:  # type: ignore[override]
        """Return the output weights, [L, F, D]."""
        weight = self._weight("w_out_LFD")
        assert weight is not None
        return weight

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    def forward(self, work: ExpertRows | ParameterRequest) -> Any:
        """See `FFNExperts`. The setting `experts.compute` has no effect."""
        if isinstance(work, ParameterRequest):
            return self.local_parameters()
        return frozen(work.x, work.rows, work.parameters or self.compute_parameters())

    def local_parameters(self) -> dict[str, Tensor]:
        """See `Experts`. The bytes of frozen weights have the names in `kernels.frozen.PARTS`."""
        stored: dict[str, Tensor] = {name: value for name, value in self._parameters.items()
                                     if value is not None and name not in ADAPTER_AXIS}
        return stored if self.adapters is None else {**stored, **self.used_adapters()}

    def compute_parameters(self, tensors: Mapping[str, Tensor] | None = None,
                           first_shard: int | None = None) -> FFNParameters:
        tensors = self.local_parameters() if tensors is None else tensors
        weights: dict[str, Any] = {name: weight for name in PARTS if (
            weight := self._weight(name, tensors, first_shard)) is not None}
        return super().compute_parameters({**tensors, **weights}, first_shard)

    def gathered_parameters(self, local: dict[str, Tensor] | None, comm: Comm, shards: int,
                            first_shard: int) -> FFNParameters:
        """See `Experts`. Bytes are gathered as bytes, apart from the parameters that may need
        gradients.
        """
        local = self.local_parameters() if local is None else local
        gathered = dict[str, Tensor]()
        for group in by_dtype(local):
            gathered |= gather_parameters(group, comm, shards)
        return self.compute_parameters(gathered, first_shard)

    def reset_parameters(self) -> None:
        """Raise a `ValueError`, because initial values are drawn before weights are frozen."""
        raise ValueError(f"experts frozen in the format {self.format} have no initial values. Load "
                         "their codes, or draw the values before freeze_experts")

    @torch.no_grad()
    def merge(self, adapters: Mapping[str, LowRank]) -> None:
        """Add adapters to the weights, and round the sums to the format again. One expert is
        decoded at a time. Collective if experts are split over ranks.
        """
        names = {"in": ["w_in_LDF", *(["w_gate_LDF"] if self.gated else [])], "out": ["w_out_LFD"]}
        self.write(rounder({name: partial(_sum_OI, getattr(self, name), adapter) for name, adapter
                            in of_each_weight(adapters, names)}, self.placement, self.format))

    @torch.no_grad()
    def write(self, read: Mapping[str, Callable[[int], Tensor]]) -> None:
        """Replace codes and scales, one expert at a time.

        Args:
            read: mapping from the name of a byte tensor to a function that returns the bytes of one
                expert, by local index.
        """
        for expert in range(self.placement.local):
            for name, bytes_of in read.items():
                self.get_parameter(name)[expert] = bytes_of(expert)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenExperts:
        with torch.no_grad():
            self.like = fn(self.like)
        super()._apply(fn, recurse)
        return self


def _sum_OI(weight: FrozenWeight, adapter: LowRank, expert: int) -> Tensor:
    """Return the weights [O, I] of one expert with its adapter, in float32."""
    a_LIR, b_LRO, factor_LO = adapter
    sum_OI = weight.decoded(expert, slice(0, weight.shape[2])) + (a_LIR[expert] @ b_LRO[expert]).T
    return sum_OI if factor_LO is None else sum_OI * factor_LO[expert][:, None]


def by_dtype(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Divide tensors into those that contain bytes and all others. Both groups keep the order of
    the tensors, and empty groups are left out.
    """
    groups: list[dict[str, Tensor]] = [
        {name: value for name, value in tensors.items()
         if (value.dtype == torch.uint8) == in_bytes} for in_bytes in (False, True)]
    return [group for group in groups if group]


def check_format(experts: FFNExperts, format: str) -> None:
    """Raise a `ValueError` if the weights of these experts cannot be stored in a format."""
    shards = experts.placement.shards
    refused: dict[str, str] = {}
    for other, form in FROZEN_FORMATS.items():
        for name in PARTS:
            if (weight := getattr(experts, name)) is not None:
                why = form.refusal(*weight.shape[1:], shards, SHARD_AXIS[name] == 1)
                if why is not None:
                    refused.setdefault(other, f"{name}, which has {why}")
    if format in refused:
        others = [other for other in FROZEN_FORMATS if other not in refused]
        raise ValueError(f"format={format} cannot store {refused[format]}. Use the format "
                         f"{' or '.join(others) or 'of 16 bits'}, or other widths"
                         f"{', or at least as many experts as ranks' if shards > 1 else ''}")


@torch.no_grad()
def freeze(experts: FFNExperts, format: str) -> None:
    """Round the weights of experts to a format, and freeze the experts. The codes do not depend on
    the number of ranks. One expert is rounded at a time, and each weight tensor is freed before the
    next one is rounded.

    Collective if experts are split over ranks. On the meta device, only the shapes change.

    Args:
        experts: experts for which `check_format` raises no error. They become `FrozenExperts`.
        format: a key of `FROZEN_FORMATS`.
    """
    made: Any = experts
    made.like, made.format, made.gated = experts.w_in_LDF.new_empty(0), format, experts.gated
    made.width = experts.w_in_LDF.shape[2]
    weights = {name: weight for name in PARTS
               if (weight := experts._parameters.pop(name, None)) is not None}
    made.__class__ = FrozenExperts
    for name in list(weights):
        weight = weights.pop(name)
        for part, shape in part_shapes(name, weight.shape, experts.placement, format).items():
            value = torch.empty(len(weight), *shape, dtype=torch.uint8, device=weight.device)
            experts.register_parameter(part, mark_expert(nn.Parameter(value, False)))
        if not weight.is_meta:
            matrices = {name: [matrix.T for matrix in weight].__getitem__}
            made.write(rounder(matrices, experts.placement, format))
    experts.requires_grad_(False)


def part_shapes(name: str, shape: Sequence[int], place: Placement,
                format: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the byte tensors that a rank stores for one expert, by name.

    Args:
        name: a key of `PARTS`.
        shape: shape [L, I, O] of the weights that this rank stores.
        place: the ranks that store each expert.
        format: a key of `FROZEN_FORMATS`.
    """
    form, whole, made = FROZEN_FORMATS[format], list(shape), {}
    whole[SHARD_AXIS[name]] *= place.shards
    for part, sizes in zip(form.names(name), form.shapes(*whole[1:]), strict=True):
        axis = FROZEN_AXIS[part]
        made[part] = tuple(size // place.shards if at == axis else size
                           for at, size in enumerate(sizes, start=1))
    return made


def rounder(matrices_OI: Mapping[str, Callable[[int], Tensor]], place: Placement,
            format: str) -> dict[str, Callable[[int], Tensor]]:
    """Return functions for `FrozenExperts.write`. They round the weights of one expert when they
    are called with its index, and must be called for one expert after another.

    Each shard of an expert gets its slice of the codes of the whole expert, so that the codes do
    not depend on the number of shards.

    Args:
        matrices_OI: mapping from keys of `PARTS` to functions that return this rank's matrix [O, I]
            of an expert, by local index.
        place: the ranks that store each expert.
        format: a key of `FROZEN_FORMATS`.
    """
    names = {name: FROZEN_FORMATS[format].names(name) for name in matrices_OI}

    @functools.lru_cache(1)
    def made(expert: int) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name, matrix_OI in matrices_OI.items():
            parts = quantized(_whole(name, matrix_OI(expert), place), format)
            for part, value in zip(names[name], parts, strict=True):
                axis = FROZEN_AXIS[part]
                found[part] = value if axis is None else value.chunk(place.shards, axis - 1)[
                    place.shard]
        return found

    def of(part: str, expert: int) -> Tensor:
        return made(expert)[part]

    return {part: partial(of, part) for parts in names.values() for part in parts}


def _whole(name: str, w_OI: Tensor, place: Placement) -> Tensor:
    """Gather the matrix of an expert from the ranks over which it is split."""
    if place.shards == 1:
        return w_OI
    shards = place.comm.contiguous_subgroup(place.shards)
    # outputs are the first axis; inputs are gathered along the first axis and swapped back
    inputs = SHARD_AXIS[name] == 1
    whole = shards.all_gather((w_OI.T if inputs else w_OI).contiguous())
    return whole.T if inputs else whole


def merge_frozen(experts: FrozenExperts) -> None:
    """Merge the used adapters of frozen experts into their codes. See `FrozenExperts.merge`."""
    with torch.no_grad():
        experts.merge(as_adapters(experts.used_adapters()))
