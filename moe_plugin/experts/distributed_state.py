"""State dicts of models whose experts are spread over ranks, inside and outside of torch's
distributed checkpoints (DCP).

Whatever DCP asks for a state dict (`get_state_dict` and its kin, a model or optimizer that is given
to it) gets experts as DTensors of all experts, and gives them back as such or whole. Everybody else
gets and gives this rank's experts, as tensors that DCP refuses.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from moe_plugin.comm.placement import Placement
from moe_plugin.comm.torch_comm import TorchComm
from moe_plugin.experts.base import use_current_names
from moe_plugin.experts.ffn import PART_AXIS
from moe_plugin.utils.dtensors import is_sharded

# Key of a layer's extra state: names of its tensors that stay in float32 when others are cast
FLOAT32 = "float32"

# A rank's part of a tensor of all experts, as torch's distributed checkpoints (DCP) need it.
#
# DCP takes plain tensors of one name for copies of each other, and saves one of them.

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


_DCP = "torch.distributed.checkpoint"
_ORIGIN = ("ep_size", "ep_rank", "shards")
# Optimizers know their parameters and nothing of the layers that these are of
_LAYERS: weakref.WeakSet[Any] = weakref.WeakSet()


def hook(layer: Any) -> None:
    """State dicts of a new layer, a `MoELayer`, are what the reader needs."""
    layer.register_state_dict_post_hook(give)
    layer.register_load_state_dict_pre_hook(take)
    follow(layer)


def follow(layer: Any) -> None:
    """Optimizers' states of this layer's experts are, too; it has its hooks."""
    _LAYERS.add(layer)
    if layer.comm.size > 1 and not hasattr(Optimizer.state_dict, "gives_experts"):
        Optimizer.state_dict = _giving(Optimizer.state_dict)  # type: ignore[method-assign]
        Optimizer.load_state_dict = _taking(Optimizer.load_state_dict)  # type: ignore[method-assign]


def asked_by_dcp() -> bool:
    """Whether a function of DCP has called."""
    frame = sys._getframe(1) if _DCP in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_DCP):
            return True
        frame = frame.f_back
    return False


def give(layer: Any, state: dict[str, Any], prefix: str, _: object) -> None:
    """Hook after `state_dict`. Where DCP asks, the origin of the experts, too, is that of all, and
    what a tuner learned is left out: it is of these ranks.
    """
    dcp, place = asked_by_dcp(), layer.placement
    for key in [key for key in state if key.startswith(prefix + "experts.")]:
        if place.comm.size > 1 and type(state[key]) is Tensor:
            state[key] = _given(state[key], key, place, dcp)
    if dcp:
        state[prefix + "_extra_state"] = {
            **{name: value for name, value in layer.get_extra_state().items()
               if name in ("version", "num_experts", FLOAT32)}, "ep_size": 1, "ep_rank": 0}


def take(layer: Any, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Hook before `load_state_dict`: the inverse of `give`."""
    use_current_names(state, prefix + "experts.")
    place, dcp = layer.placement, asked_by_dcp()
    own = {f"{prefix}experts.{name}": value for name, value in layer.experts.named_parameters()}
    keys = [key for key in state if key.startswith(prefix + "experts.")]
    whole = [key for key in keys if place.comm.size > 1 and (
        is_sharded(state[key]) or (dcp and key in own and state[key].shape != own[key].shape))]
    for key in keys:
        state[key] = (_taken(state[key], window_in(key, state[key].shape, place)) if key in whole
                      else _plain(state[key]))
    extra = state.get(prefix + "_extra_state")
    if whole == keys != [] and isinstance(extra, Mapping):
        state[prefix + "_extra_state"] = {
            **{name: value for name, value in extra.items() if name not in _ORIGIN},
            **{name: value for name, value in layer.get_extra_state().items() if name in _ORIGIN}}


def _given(value: Tensor, name: str, place: Placement, dcp: bool, *,
           of_parameter: bool = True) -> Tensor:
    if not dcp:
        return value.detach().as_subclass(ExpertPart)
    window = window_of(name, value.shape, place, of_parameter=of_parameter)
    return as_dtensor(value, window, place)  # type: ignore[no-any-return]


def _taken(value: Any, window: ExpertWindow) -> Tensor:
    """This rank's part of a whole tensor."""
    if not is_sharded(value):
        return value[window.index]  # type: ignore[no-any-return]
    chunks = value.__create_chunk_list__()
    if [(*chunk.offsets, *chunk.sizes) for chunk in chunks] == [(*window.offsets, *window.sizes)]:
        return value.to_local()
    return value.full_tensor()[window.index]


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, ExpertPart) else value


def placed_parameters() -> dict[int, tuple[str, Placement]]:
    """Name and place of every expert parameter that other ranks have more of, by id."""
    return {id(parameter): (name, layer.placement)
            for layer in list(_LAYERS) if layer.placement.comm.size > 1
            for name, parameter in layer.experts.named_parameters()}


def _giving(original: Callable[[Optimizer], dict[str, Any]]) -> Any:
    @functools.wraps(original)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        found, dcp = original(self), asked_by_dcp()

        def given(parameter: Tensor, value: Any, name: str, place: Placement) -> Any:
            if type(value) is not Tensor or not value.ndim or (
                    value.numel() == 1 and value.shape != parameter.shape):
                return value
            return _given(value, name, place, dcp, of_parameter=value.shape == parameter.shape)

        return _changed(self, found, given, range(len(_parameters(self))))

    state_dict.gives_experts = True  # type: ignore[attr-defined]
    return state_dict


def _taking(original: Callable[[Optimizer, dict[str, Any]], None]) -> Any:
    @functools.wraps(original)
    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        def taken(parameter: Tensor, value: Any, name: str, place: Placement) -> Any:
            if not is_sharded(value):
                return _plain(value)
            whole = window_of(name, parameter.shape, place).shape
            return _taken(value, window_in(name, value.shape, place,
                                           of_parameter=tuple(value.shape) == whole))

        saved = [*chain.from_iterable(group["params"] for group in state_dict["param_groups"])]
        original(self, _changed(self, state_dict, taken, saved))

    return load_state_dict


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]


def _changed(optimizer: Optimizer, found: dict[str, Any], change: Callable[..., Any],
             keys: Iterable[Any]) -> dict[str, Any]:
    """An optimizer's state with other values for experts' parameters; keys: of its parameters."""
    placed, state = placed_parameters(), dict(found["state"])
    for parameter, key in zip(_parameters(optimizer), keys, strict=False):
        if id(parameter) in placed and key in state:
            state[key] = _over(state[key], partial(change, parameter), *placed[id(parameter)])
    return {**found, "state": state}


def _over(value: Any, change: Callable[..., Any], name: str, place: Placement) -> Any:
    """Also where states are nested."""
    if isinstance(value, Mapping):
        return {key: _over(inner, change, name, place) for key, inner in value.items()}
    return change(value, name, place)
