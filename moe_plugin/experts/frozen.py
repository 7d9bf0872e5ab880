"""Feed-forward experts whose weights are frozen and stored as codes (`kernels.frozen`).

`freeze` rounds the weights of existing experts in place. The experts keep their biases and accept
low-rank adapters. All code that asks for a weight, such as `w_in_LDF`, gets a `FrozenWeight`. The
codes and scales are ordinary parameters without gradients, in bytes. They are saved, loaded,
gathered and lent to other ranks like all other expert parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """

    traceable = False  # the host reads the number of rows of each expert
    format: str
    like: Tensor

    def _weight(self, name: str) -> FrozenWeight | None:
        return _weight_in(self._parameters, name, self.format, self.dtype)

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
            weight := _weight_in(tensors, name, self.format, self.dtype)) is not None}
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

    def merge(self, adapters: Mapping[str, LowRank]) -> None:
        """Add adapters to the weights, and round the sums to the format again. One expert is
        decoded at a time. Collective if experts are split over ranks.
        """
        names = {"in": ["w_in_LDF", *(["w_gate_LDF"] if self.gated else [])], "out": ["w_out_LFD"]}
        for name, adapter in of_each_weight(adapters, names):
            weight = self._weight(name)
            assert weight is not None
            made = _stored(name, partial(_sum_OI, weight, adapter), weight, self.placement,
                           self.format)
            for part, value in made.items():
                self.get_parameter(part).data = value

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


def _weight_in(tensors: Mapping[str, Any], name: str, format: str,
               dtype: torch.dtype) -> FrozenWeight | None:
    parts = tuple(tensors[part] for part in PARTS[name] if part in tensors)
    return FrozenWeight(format, parts, dtype) if parts else None


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
    like, gated = experts.w_in_LDF.new_empty(0), experts.gated
    for name in PARTS:
        weight = experts._parameters.pop(name, None)
        if weight is None:
            continue
        if weight.is_meta:
            _, inner, outer = weight.shape
            shapes = FROZEN_FORMATS[format].shapes(inner, outer)
            made = {part: torch.empty(len(weight), *shape, dtype=torch.uint8, device="meta")
                    for part, shape in zip(PARTS[name], shapes, strict=False)}
        else:
            made = _stored(name, [matrix.T for matrix in weight].__getitem__, weight,
                           experts.placement, format)
        for part, value in made.items():
            experts.register_parameter(part, mark_expert(nn.Parameter(value, False)))
    made_frozen: Any = experts
    made_frozen.__class__ = FrozenExperts
    made_frozen.like, made_frozen.format, made_frozen.gated = like, format, gated
    experts.requires_grad_(False)


def _stored(name: str, matrix_OI: Callable[[int], Tensor], like: Any, place: Placement,
            format: str) -> dict[str, Tensor]:
    """Round the matrices [O, I] of all local experts, and return the byte tensors [L, ...] by name.

    Each shard of an expert gets its slice of the codes of the whole expert, so that the codes do
    not depend on the number of shards.

    Args:
        name: a key of `PARTS`.
        matrix_OI: function that returns this rank's matrix of an expert, by local index.
        like: the weights [L, I, O], of which the first length is used.
        place: the ranks that store each expert.
        format: a key of `FROZEN_FORMATS`.
    """
    shards = place.comm.contiguous_subgroup(place.shards) if place.shards > 1 else None
    made = dict[str, Tensor]()
    for expert in range(like.shape[0]):
        w_OI = matrix_OI(expert)
        if shards is not None:
            # outputs are the first axis; inputs are gathered along the first axis and swapped back
            inputs = SHARD_AXIS[name] == 1
            whole = shards.all_gather((w_OI.T if inputs else w_OI).contiguous())
            w_OI = whole.T if inputs else whole
        for part, value in zip(PARTS[name], quantized(w_OI, format), strict=False):
            if shards is not None:
                value = value.chunk(place.shards, FROZEN_AXIS[part] - 1)[place.shard]
            if part not in made:
                made[part] = value.new_empty(like.shape[0], *value.shape)
            made[part][expert] = value
    return made


def merge_frozen(experts: FrozenExperts) -> None:
    """Merge the used adapters of frozen experts into their codes. See `FrozenExperts.merge`."""
    with torch.no_grad():
        experts.merge(as_adapters(experts.used_adapters()))
