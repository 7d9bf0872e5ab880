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
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from moe_plugin.comm.placement import Placement
from moe_plugin.experts.former_names import use_current_names
from moe_plugin.experts.parts import (
    ExpertPart,
    ExpertWindow,
    as_dtensor,
    window_in,
    window_of,
)
from moe_plugin.routing.contract import FLOAT32
from moe_plugin.utils.dtensors import is_sharded

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
