"""Support torch's distributed checkpoints (DCP) for models whose experts are spread over ranks.

If ranks pass plain tensors with the same name to DCP, DCP assumes that they are copies and saves
only one of them. Therefore a state dict that DCP requests contains the experts of all ranks as
DTensors. DCP requests a state dict in `get_state_dict`, or from a model or optimizer that was
passed to DCP. When loading, experts may be given either as DTensors or as full tensors. All other
callers of `state_dict` receive only the experts of this rank. DCP refuses to save the tensors that
these callers receive.
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
from moe_plugin.utils.tensors import is_sharded

# key of a layer's extra state: the names of tensors that stay in float32 when others are cast
FLOAT32 = "float32"

# functions that copy an `ExpertPart`, or that allocate the target of a copy; they keep the class
_COPIES = {Tensor.detach, Tensor.clone, Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.contiguous,
           Tensor.pin_memory, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16,
           Tensor.new_empty, torch.clone, torch.detach}


@dataclass(frozen=True)
class ExpertWindow:
    """The position of a rank's local tensor within the tensor of all experts.

    Attributes:
        shape: the shape of the tensor of all experts. The first dimension indexes the experts.
        offsets: the start index of the local tensor in the full tensor, along each dimension.
        sizes: the shape of the local tensor.
        shard_axis: the dimension along which each expert is split over several ranks, or None if
            experts are not sharded.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shard_axis: int | None

    @property
    def index(self) -> tuple[slice, ...]:
        """The index that selects the local tensor from the full tensor."""
        return tuple(slice(first, first + size)
                     for first, size in zip(self.offsets, self.sizes, strict=True))


def window_of(name: str, sizes: Sequence[int], place: Placement, *,
              of_parameter: bool = True) -> ExpertWindow:
    """Return the position of a rank's local tensor within the tensor of all experts.

    Args:
        name: the name of the tensor. The last component of the name is a parameter name
            (`PART_AXIS`).
        sizes: the shape of this rank's local tensor.
        of_parameter: whether the tensor has the same dimensions as the parameter. For other
            tensors, such as factored optimizer states, the position is known only if experts are
            not sharded.
    Raises:
        ValueError: If the first dimension does not index experts, or if experts are split along an
            unknown dimension.
    """
    cut = place.shards > 1
    axis = PART_AXIS.get(name.rpartition(".")[2]) if cut and of_parameter else None
    if not sizes or sizes[0] != place.local or (cut and axis is None):
        raise ValueError(
            f"torch.distributed.checkpoint cannot save {name!r} of shape {tuple(sizes)}. The "
            f"first dimension must have size {place.local}, the number of experts on this rank. If "
            "experts are split over ranks, the split dimension must be known, which is not the "
            "case for custom experts, and no rank may store a copy of another rank's tensor, as in "
            "the formats int8 and nf4_double. Use moe_plugin.checkpoint.save and load")
    shape, offsets = list(sizes), [0] * len(sizes)
    shape[0], offsets[0] = place.experts, place.first_expert
    if axis is not None:
        shape[axis], offsets[axis] = sizes[axis] * place.shards, sizes[axis] * place.shard
    return ExpertWindow(tuple(shape), tuple(offsets), tuple(sizes), axis)


def window_in(name: str, shape: Sequence[int], place: Placement, *,
              of_parameter: bool = True) -> ExpertWindow:
    """Return the position of a rank's local tensor within a full tensor of a given shape.

    Args:
        name: the name of the tensor, as in `window_of`.
        shape: the shape of the full tensor.
        of_parameter: whether the tensor has the same dimensions as the parameter.
    Raises:
        ValueError: If the first dimension does not index experts, or if experts are split along an
            unknown dimension.
    """
    sizes = list(shape)
    if not sizes or sizes[0] != place.experts:
        raise ValueError(f"{name!r} of shape {tuple(shape)} does not fit a layer with num_experts="
                         f"{place.experts}, because the first dimension must have this size. Load "
                         "another checkpoint, or build the layer with its number of experts")
    sizes[0] = place.local
    if place.shards > 1 and of_parameter and (axis := PART_AXIS.get(name.rpartition(".")[2])):
        sizes[axis] //= place.shards
    return window_of(name, sizes, place, of_parameter=of_parameter)


class ExpertPart(Tensor):
    """A state dict tensor that contains only the local experts of this rank.

    Computations, copies and pickles treat this class as a plain tensor, but DCP refuses to save it.
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
        """Return a plain tensor that shares memory with this tensor."""
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
        f"{what} was returned by state_dict() and contains only the experts of this rank, but "
        "torch.distributed.checkpoint would save the experts of a single rank. Pass it the results "
        "of get_model_state_dict(model) and get_optimizer_state_dict(model, optimizer) of "
        "torch.distributed.checkpoint.state_dict, or the model itself")


def as_dtensor(value: Tensor, window: ExpertWindow, place: Placement) -> Any:
    """Return a DTensor that represents the experts of all expert-parallel ranks.

    The first call is collective if experts are sharded and not all ranks store the same experts.

    Args:
        window: the position of the local tensor in the full tensor.
        place: the ranks that store each expert.
    Raises:
        ValueError: If the communicator of the ranks is not a `TorchComm`.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    device, shards = value.device.type, place.shards
    # tensors on the CPU need a group whose backend supports the CPU
    comm = place.comm if device in (place.comm.device.type, "meta") else place.comm.hosts
    if not isinstance(comm, TorchComm):
        raise ValueError(f"torch.distributed.checkpoint cannot save experts that are spread over "
                         f"{comm.size} ranks of a {type(comm).__name__}, which is not a TorchComm. "
                         "Use moe_plugin.checkpoint.save")
    if shards in (1, comm.size):
        mesh = DeviceMesh.from_group(comm.group, device)
        axes = [Shard(window.shard_axis or 0)]
    else:
        parts: tuple[Any, ...] = comm.strided_subgroup(shards), comm.contiguous_subgroup(shards)
        mesh = DeviceMesh.from_group([part.group for part in parts], device,
                                     torch.tensor(comm.ranks).view(-1, shards),
                                     mesh_dim_names=("experts", "shards"))
        axes = [Shard(0), Shard(window.shard_axis or 0)]
    return DTensor.from_local(value.detach(), mesh, axes, run_check=False)


_DCP = "torch.distributed.checkpoint"
_ORIGIN = ("ep_size", "ep_rank", "shards")
# all layers, because an optimizer knows its parameters but not the layers that contain them
_LAYERS: weakref.WeakSet[Any] = weakref.WeakSet()


def hook(layer: Any) -> None:
    """Register the state dict hooks on a new `MoELayer`."""
    layer.register_state_dict_post_hook(give)
    layer.register_load_state_dict_pre_hook(take)
    follow(layer)


def follow(layer: Any) -> None:
    """For a layer that already has the state dict hooks, also convert the experts in state dicts of
    optimizers.
    """
    _LAYERS.add(layer)
    if layer.comm.size > 1 and not hasattr(Optimizer.state_dict, "gives_experts"):
        Optimizer.state_dict = _giving(Optimizer.state_dict)  # type: ignore[method-assign]
        Optimizer.load_state_dict = _taking(Optimizer.load_state_dict)  # type: ignore[method-assign]


def asked_by_dcp() -> bool:
    """Return whether a function of DCP is on the call stack."""
    # DCP calls `state_dict` without any argument by which it could be recognized
    frame = sys._getframe(1) if _DCP in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_DCP):
            return True
        frame = frame.f_back
    return False


def give(layer: Any, state: dict[str, Any], prefix: str, _: object) -> None:
    """Convert a layer's experts in a state dict that was just created. This function is a hook that
    runs after `state_dict`.

    If DCP requested the state dict, the layer's extra state describes the experts of all ranks, and
    the tuner's state is omitted, because it is valid only for the current number of ranks.
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
    """Convert a layer's experts in a state dict back to local tensors. This function is the inverse
    of `give`. The function is a hook that runs before `load_state_dict`.
    """
    use_current_names(state, prefix + "experts.")
    place, dcp = layer.placement, asked_by_dcp()
    shapes = {f"{prefix}experts.{name}": value.shape
              for name, value in layer.experts.named_parameters()}
    keys = [key for key in state if key.startswith(prefix + "experts.")]
    whole = [key for key in keys if place.comm.size > 1 and (
        is_sharded(state[key]) or (dcp and key in shapes and state[key].shape != shapes[key]))]
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
    """Return the local tensor of this rank, selected from a full tensor or a DTensor."""
    if not is_sharded(value):
        return value[window.index]  # type: ignore[no-any-return]
    chunks = value.__create_chunk_list__()
    if [(*chunk.offsets, *chunk.sizes) for chunk in chunks] == [(*window.offsets, *window.sizes)]:
        return value.to_local()
    return value.full_tensor()[window.index]


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, ExpertPart) else value


def placed_parameters() -> dict[int, tuple[str, Placement]]:
    """Return the name and placement of each expert parameter whose layer spreads its experts over
    several ranks, by the parameter's id.
    """
    return {id(parameter): (name, layer.placement)
            for layer in list(_LAYERS) if layer.placement.comm.size > 1
            for name, parameter in layer.experts.named_parameters()}


def _giving(original: Callable[[Optimizer], dict[str, Any]]) -> Any:
    @functools.wraps(original)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        found, dcp = original(self), asked_by_dcp()

        def given(parameter: Tensor, value: Any, name: str, place: Placement) -> Any:
            # step counters and other scalars are not divided over the ranks
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


def _changed(optimizer: Optimizer, state_dict: dict[str, Any], change: Callable[..., Any],
             keys: Iterable[Any]) -> dict[str, Any]:
    """Apply a function to the optimizer state of each expert parameter.

    Args:
        optimizer: the optimizer.
        change: a function that computes a new state tensor from the parameter, the old state
            tensor, the parameter's name and its placement.
        keys: the key of each parameter in the state dict, in the order of the parameters.
    """
    placed, state = placed_parameters(), dict(state_dict["state"])
    for parameter, key in zip(_parameters(optimizer), keys, strict=False):
        if id(parameter) in placed and key in state:
            state[key] = _over(state[key], partial(change, parameter), *placed[id(parameter)])
    return {**state_dict, "state": state}


def _over(value: Any, change: Callable[..., Any], name: str, place: Placement) -> Any:
    # states of some optimizers are nested mappings
    if isinstance(value, Mapping):
        return {key: _over(inner, change, name, place) for key, inner in value.items()}
    return change(value, name, place)
