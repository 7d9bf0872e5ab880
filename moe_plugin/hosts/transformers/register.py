"""Names in the two registries of `transformers`: how experts are computed, and how tokens reach
them on other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_plugin.comm import Comm, LocalComm, TorchComm
from moe_plugin.comm.functional import gather
from moe_plugin.config import MoEConfig, from_dict, with_overrides
from moe_plugin.config.tree import flatten, to_dict
from moe_plugin.dispatch.token_entry import split_tokens
from moe_plugin.experts.base import Experts
from moe_plugin.hosts.transformers.experts import activation_of, experts_of
from moe_plugin.records import Placement
from moe_plugin.routed_experts import RoutedExperts

NAME = "moe_plugin"
# what is left to set where the model has the router and the experts' sizes
SETTINGS = ("dispatch.", "parallel.", "comm.", "tuner.", "experts.compute", "experts.precision",
            "experts.recompute")
_KEPT = "_moe_plugin"  # by a module of experts, for its next call


def use(settings: Mapping[str, Any], name: str = NAME) -> None:
    """Register `name` with settings of ours, for `experts_implementation=name` and
    `DistributedConfig(ep_implementation=name)`. Call it before the model is made.

    Args:
        settings: dotted paths to values, such as `{"parallel.mode": "auto"}`.
    Raises:
        ValueError: no such setting, or one that the model's own router or experts decide.
    """
    _check(settings)
    settings = dict(settings)
    ALL_EXPERTS_FUNCTIONS.register(name, partial(_experts_forward, settings))
    EPImplementationInterface.register(name, partial(PluginEP, settings))


def _check(settings: Mapping[str, Any]) -> None:
    known = flatten(to_dict(MoEConfig()))
    for path, value in settings.items():
        if path in known and not path.startswith(SETTINGS):
            raise ValueError(
                f"{path}={value!r} in a model of transformers: must be a setting under one of "
                f"{', '.join(s.rstrip('.') for s in SETTINGS)}, because the model has its own "
                "router and experts; leave it out, or put our layer in their place with "
                "moe_plugin.hosts.plain.huggingface.swap_moe_blocks")
    if with_overrides(from_dict({"model_dim": 8}), settings).parallel.spill == "standing":
        raise ValueError("parallel.spill='standing' in a model of transformers, which tells nobody "
                         "that a step is over: must be another; use parallel.spill='least_loaded'")


class _Kept:
    """What calls of one module of experts share. A copy of the module makes its own."""

    def __init__(self, routed: RoutedExperts | None = None) -> None:
        self.routed = routed

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kept, ()


def _experts_forward(settings: Mapping[str, Any], self: nn.Module, hidden_states: Tensor,
                     top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """As `ALL_EXPERTS_FUNCTIONS` calls it: the experts that this module has, of this rank alone.

    Args:
        hidden_states: [T, D]. top_k_index: [T, K]; num_experts: that of another rank.
        top_k_weights: [T, K].
    """
    kept = self.__dict__.get(_KEPT)
    if kept is None or kept.routed is None:
        experts = int(self.num_experts)
        routed = _routed(self, settings, LocalComm(), experts, top_k_index.shape[1])
        kept = self.__dict__[_KEPT] = _Kept(routed)
    here_TK = top_k_index < self.num_experts
    if self._is_expert_parallel:
        top_k_weights = top_k_weights.masked_fill(~here_TK, 0.0)
        top_k_index = top_k_index.masked_fill(~here_TK, -1)
    return _call(kept.routed, self, hidden_states, top_k_index, top_k_weights)


class PluginEP(EPImplementation):
    """Our exchange, layouts and kernels, on the mesh that `transformers` makes.

    Ranks that hold the same tokens (`tp_mesh`) take equal parts of them, as `AllToAllEP` does.
    Whatever `experts_implementation` is, our kernels compute the rows.
    """

    def __init__(self, settings: Mapping[str, Any], experts: nn.Module, ep_mesh: Any,
                 tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.settings, self.experts, self.kept = settings, (experts,), _Kept()
        self.comm = TorchComm(ep_mesh.get_group())
        self.sharing = TorchComm(tp_mesh.get_group()) if tp_mesh.size() > 1 else None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor,
                 top_k_weights: Tensor) -> Tensor:
        """[T, D] of the tokens [T, D] that this rank holds."""
        module, routed = self.experts[0], self.kept.routed
        if routed is None:
            experts = self.num_local_experts * self.comm.size
            routed = self.kept.routed = _routed(module, self.settings, self.comm, experts,
                                                top_k_index.shape[1])
        if self.sharing is None:
            return _call(routed, module, hidden_states, top_k_index, top_k_weights)
        tokens = hidden_states.shape[0]
        part = _part(hidden_states, top_k_index, top_k_weights, self.sharing)
        return gather(_call(routed, module, *part), self.sharing)[:tokens]


def _part(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor,
          comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's 1/size of them, filled up with tokens of no expert."""
    missing = -x_TD.shape[0] % comm.size
    ids_TK = F.pad(ids_TK, (0, 0, 0, missing), value=-1).chunk(comm.size)[comm.rank]
    return split_tokens(x_TD, None, comm)[0], ids_TK, split_tokens(weights_TK, None, comm)[0]


def _call(routed: RoutedExperts, module: nn.Module, x_TD: Tensor, ids_TK: Tensor,
          weights_TK: Tensor) -> Tensor:
    wide = x_TD
    if not torch.is_autocast_enabled(x_TD.device.type):
        wide = x_TD.to(module.down_proj.dtype)
    return routed(wide, ids_TK, weights_TK, training=module.training).to(x_TD.dtype)


def _routed(module: nn.Module, settings: Mapping[str, Any], comm: Comm, experts: int,
            choices: int) -> RoutedExperts:
    """The path of a module's calls. Collective."""
    first = module.gate_up_proj if module.has_gate else module.up_proj
    width, inner = first.shape[1:] if module.is_transposed else reversed(first.shape[1:])
    if module.has_gate:
        inner //= 2
    activation = activation_of(module)
    config = with_overrides(from_dict({
        "model_dim": width, "num_experts": experts,
        "router": {"top_k": choices},
        "experts": {"hidden_dim": inner, "kind": "gated_ffn" if module.has_gate else "ffn",
                    "bias": bool(module.has_bias), "activation": activation or "silu"}}), settings)

    def make(config: MoEConfig, place: Placement) -> Experts:
        return experts_of(module, config, place)

    return RoutedExperts(config, comm, make, dtype=first.dtype,
                         agreed={"class of the experts": type(module).__qualname__})
