"""A rank's part of a tensor of all experts, as torch's distributed checkpoints (DCP) need it.

DCP takes plain tensors of one name for copies of each other, and saves one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_plugin.comm.placement import Placement
from moe_plugin.comm.torch_comm import TorchComm
from moe_plugin.experts.ffn import PART_AXIS

# what gives the same values in another tensor, or begins a copy that gets them
_COPIES = {Tensor.detach, Tensor.clone, Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.contiguous,
           Tensor.pin_memory, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16,
           Tensor.new_empty, torch.clone, torch.detach}


@dataclass(frozen=True)
class ExpertWindow:
    """Where a rank's part of an expert tensor lies.

    Attributes:
        shape: of the whole tensor, all experts first.
        offsets, sizes: of the part, by axis.
        shard_axis: along which every expert is cut over several ranks; None: experts are whole.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shard_axis: int | None

    @property
    def index(self) -> tuple[slice, ...]:
        """What takes the part out of the whole tensor."""
        return tuple(slice(first, first + size)
                     for first, size in zip(self.offsets, self.sizes, strict=True))


def window_of(name: str, sizes: Sequence[int], place: Placement, *,
              of_parameter: bool = True) -> ExpertWindow:
    """Where a rank's tensor lies among those of all ranks.

    Args:
        name: ends with that of the parameter, see `PART_AXIS`.
        sizes: of this rank's part.
        of_parameter: whether it has the parameter's axes. Other ones (factored optimizer state) are
            known of whole experts alone.
    Raises:
        ValueError: it has no axis of experts, or experts are cut along an axis that is not known.
    """
    cut = place.shards > 1
    axis = PART_AXIS.get(name.rpartition(".")[2]) if cut and of_parameter else None
    if not sizes or sizes[0] != place.local or (cut and axis is None):
        raise ValueError(
            f"{name!r} of shape {tuple(sizes)}: must have this rank's {place.local} experts as its "
            "first axis, and experts that are cut over several ranks a known inner axis, for "
            "torch.distributed.checkpoint to save it by global index (custom experts are modules "
            "without such an axis); use moe_plugin.checkpoint.save and load")
    shape, offsets = list(sizes), [0] * len(sizes)
    shape[0], offsets[0] = place.experts, place.first_expert
    if axis is not None:
        shape[axis], offsets[axis] = sizes[axis] * place.shards, sizes[axis] * place.shard
    return ExpertWindow(tuple(shape), tuple(offsets), tuple(sizes), axis)


def window_in(name: str, shape: Sequence[int], place: Placement, *,
              of_parameter: bool = True) -> ExpertWindow:
    """What of a whole tensor of this shape a rank stores; arguments and errors as `window_of`."""
    sizes = list(shape)
    if not sizes or sizes[0] != place.experts:
        raise ValueError(f"{name!r} of shape {tuple(shape)} does not fit a layer with num_experts="
                         f"{place.experts}: its first axis must be as long; load another "
                         "checkpoint, or build the layer with its number of experts")
    sizes[0] = place.local
    if place.shards > 1 and of_parameter and (axis := PART_AXIS.get(name.rpartition(".")[2])):
        sizes[axis] //= place.shards
    return window_of(name, sizes, place, of_parameter=of_parameter)


class ExpertPart(Tensor):
    """A rank's part of an expert tensor in a state dict: computes, copies and is pickled as the
    plain tensor that it is, and DCP refuses it.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
            if func in _COPIES and isinstance(made, Tensor):
                made = made.as_subclass(cls)
            return made

    def plain(self) -> Tensor:
        """The same memory as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __create_write_items__(self, fqn: str, _: object) -> NoReturn:
        raise _not_all(f"{fqn!r} of shape {tuple(self.shape)}")

    def __create_chunk_list__(self) -> NoReturn:
        raise _not_all(f"a tensor of shape {tuple(self.shape)}")


def _not_all(what: str) -> ValueError:
    return ValueError(
        f"{what} has the experts of this rank alone, as state_dict() gives them, and "
        "torch.distributed.checkpoint would keep those of one rank: must be of all experts; give "
        "it what get_model_state_dict(model) and get_optimizer_state_dict(model, optimizer) of "
        "torch.distributed.checkpoint.state_dict return, or the model itself")


def as_dtensor(value: Tensor, window: ExpertWindow, place: Placement) -> Any:
    """The whole tensor as a DTensor over the expert-parallel ranks, of which `value` is this rank's
    part. Collective the first time, where experts are cut and not all ranks have the same ones.

    Raises:
        ValueError: the ranks are not a process group of torch.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    device, shards = value.device.type, place.shards
    comm = place.comm if device in (place.comm.device.type, "meta") else place.comm.hosts
    if not isinstance(comm, TorchComm):
        raise ValueError(f"experts are spread over {comm.size} ranks of a {type(comm).__name__}: "
                         "must be a TorchComm for torch.distributed.checkpoint; use "
                         "moe_plugin.checkpoint.save")
    if shards in (1, comm.size):
        mesh = DeviceMesh.from_group(comm.group, device)
        axes = [Shard(window.shard_axis or 0)]
    else:
        parts = comm.strided_subgroup(shards), comm.contiguous_subgroup(shards)
        mesh = DeviceMesh.from_group([part.group for part in parts], device,
                                     torch.tensor(comm.ranks).view(-1, shards),
                                     mesh_dim_names=("experts", "shards"))
        axes = [Shard(0), Shard(window.shard_axis or 0)]
    return DTensor.from_local(value.detach(), mesh, axes, run_check=False)
