"""Register implementations of experts and of expert parallelism in `transformers`.

`transformers` has two registries: one for functions that compute experts, and one for classes that
exchange tokens between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.comm import Comm, LocalComm, TorchComm
from moe_plugin.comm.functional import gather
from moe_plugin.comm.group import UNEQUAL_TEXTS, CommError
from moe_plugin.comm.host_collectives import refused_together
from moe_plugin.comm.placement import Placement
from moe_plugin.config import MoEConfig, from_dict, with_overrides
from moe_plugin.config.options import aliases, canonical
from moe_plugin.config.tree import flatten, to_dict
from moe_plugin.dispatch.token_entry import split_tokens
from moe_plugin.experts.base import Experts
from moe_plugin.experts.matrices import of_transformers
from moe_plugin.experts.overwrites import OverwriteCheck
from moe_plugin.hosts.transformers.compat import (
    ALL_EXPERTS_FUNCTIONS,
    EPImplementation,
    EPImplementationInterface,
    TrainerCallback,
    holds_a_part,
    implementation_of,
)
from moe_plugin.hosts.transformers.experts import (
    activation_of,
    check_module,
    experts_of,
    stacks_read_once,
)
from moe_plugin.routed_experts import RoutedExperts, check_routed
from moe_plugin.utils.folder_lock import FolderLock, hold_folder
from moe_plugin.utils.messages import short

NAME = "moe_plugin"
# sections of settings that remain useful when the model defines the router and the expert sizes
SETTINGS = ("dispatch.", "parallel.", "comm.", "tuner.", "experts.compute", "experts.precision",
            "experts.recompute_activation")
KEPT = "_moe_plugin"  # attribute of an experts module in which its state between calls is stored
_OVER_RANKS = "_moe_plugin_ep"  # attribute of an experts module whose tokens our exchange delivers


def use(settings: Mapping[str, Any], name: str = NAME) -> None:
    """Register an implementation with your own settings, before the model is built.

    Afterwards, the name can be used in `experts_implementation=name` and in
    `DistributedConfig(ep_implementation=name)`.

    Args:
        settings: dict that maps dotted paths to values, such as `{"parallel.mode": "auto"}`. Nested
            dicts are also accepted.
        name: name of the implementation in the registries of `transformers`.
    Raises:
        ValueError: If a setting is unknown, or if it has no effect because the model has its own
            router and experts.
    """
    _check(settings)
    settings = dict(settings)
    ALL_EXPERTS_FUNCTIONS.register(name, partial(_experts_forward, settings))
    EPImplementationInterface.register(name, partial(PluginEP, settings))


def check(model: nn.Module) -> list[str]:
    """Return the names of all modules whose experts are computed by this package.

    `transformers` accepts any implementation name for any model, without checking it. If the model
    or its quantization method computes the experts itself, the implementation name has no effect.

    Raises:
        ValueError: If this package does not compute any experts of the model.
    """
    names = [name for name, module in model.named_modules() if _is_ours(module)]
    if not names:
        others = {name for name in (type(module).__name__ for module in model.modules())
                  if "Experts" in name}
        raise ValueError(
            f"moe-plugin computes no experts of {type(model).__name__}. The model has the expert "
            f"modules: {', '.join(sorted(others)) or 'none'}. At least one must be decorated by "
            f"use_experts_implementation. Set experts_implementation={NAME!r} or, for several "
            "ranks, ep_implementation, or use another model")
    return names


def computes_experts(model: nn.Module) -> bool:
    """Return True if this package computes experts of the model."""
    return any(_is_ours(module) for module in model.modules())


def _is_ours(module: Any) -> bool:
    if _OVER_RANKS in vars(module):
        return True
    name = of_transformers(module) and implementation_of(module)
    computed = ALL_EXPERTS_FUNCTIONS.get(name, None)
    if not isinstance(computed, partial) or computed.func is not _experts_forward:
        return False
    check_module(module)
    return True


def _check(settings: Mapping[str, Any]) -> None:
    where = "in a transformers model"
    sections = {path.split(".")[0] for path in to_dict(MoEConfig())}
    for path, value in canonical(flatten(settings), aliases(MoEConfig)).items():
        if path.split(".")[0] in sections and not f"{path}.".startswith(SETTINGS):
            raise ValueError(
                f"{path}={short(value)} {where} has no effect, because the model has its own "
                "router and experts. Use only settings under "
                f"{', '.join(s.rstrip('.') for s in SETTINGS)}, or replace the MoE blocks "
                "with this package's layers by moe_plugin.hosts.plain.huggingface.swap_moe_blocks")
    config = with_overrides(MoEConfig(), settings)
    check_routed(config, ranks=1)
    parallel = config.parallel
    parallel.require("shards", parallel.shards is None, f"none {where}, whose ranks store whole "
                     "experts", "leave it out")
    parallel.require("spill", parallel.spill != "standing", "never, least_loaded or everywhere "
                     f"{where}, where the end of a step is unknown", "use least_loaded")


class _Kept:
    """The shared state of all calls of an experts module. Copying the module does not copy this
    state. The copy builds its own state.

    key: the settings and the module for which this state was built.
    """

    def __init__(self, key: Any = None, routed: RoutedExperts | None = None) -> None:
        self.key, self.routed = key, routed

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kept, ()


def _experts_forward(settings: Mapping[str, Any], self: Any, hidden_states: Tensor,
                     top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts that are stored on the current rank. Called through
    `ALL_EXPERTS_FUNCTIONS`.

    Args:
        settings: settings of the implementation, as passed to `use`.
        self: the experts module.
        hidden_states: tokens with shape [T, D].
        top_k_index: indices [T, K] of the experts that each token selected. The index `num_experts`
            stands for any expert on another rank.
        top_k_weights: weights [T, K] of the selected experts.
    """
    with stacks_read_once(self):
        return _experts_read(settings, self, hidden_states, top_k_index, top_k_weights)


def _experts_read(settings: Mapping[str, Any], self: Any, hidden_states: Tensor,
                  top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    kept, key = self.__dict__.get(KEPT), (settings, self)
    if kept is None or kept.key != key:  # a replica of `nn.DataParallel` inherits this attribute
        experts = int(self.num_experts)
        # this rank may store fewer experts than a token chooses, if other ranks store the rest
        choices = min(top_k_index.shape[1], experts)
        kept = _Kept(key, _routed(self, settings, LocalComm(), experts, choices))
        self.__dict__[KEPT] = kept
    here_TK = top_k_index < self.num_experts
    if holds_a_part(self):
        top_k_weights = top_k_weights.masked_fill(~here_TK, 0.0)
        top_k_index = top_k_index.masked_fill(~here_TK, -1)
    return _call(kept.routed, self, hidden_states, top_k_index, top_k_weights)


class PluginEP(EPImplementation):
    """Expert parallelism on the device mesh of `transformers`, with the exchange, layouts and
    kernels of this package.

    If several ranks have the same tokens (`tp_mesh`), each of these ranks processes an equal share
    of the tokens, as in `AllToAllEP`. The kernels of this package compute the experts, even if
    `experts_implementation` names a different implementation.
    """

    def __init__(self, settings: Mapping[str, Any], experts: nn.Module, ep_mesh: Any,
                 tp_mesh: Any) -> None:
        check_module(experts)
        super().__init__(experts, ep_mesh, tp_mesh)
        self.settings, self.experts = settings, (experts,)
        self.routed: RoutedExperts | None = None
        config = with_overrides(MoEConfig(), settings)
        check_routed(config, ep_mesh.size())
        self.comm, self.sharing = (TorchComm(mesh.get_group(), config.comm.timeout_s)
                                   for mesh in (ep_mesh, tp_mesh))
        setattr(experts, _OVER_RANKS, True)
        self.overwrites: OverwriteCheck | None = None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor,
                 top_k_weights: Tensor) -> Tensor:
        """Compute the outputs [T, D] of the experts for the tokens [T, D] on the current rank."""
        try:
            with stacks_read_once(self.experts[0]):
                return self._through(hidden_states, top_k_index, top_k_weights)
        except CommError as error:
            if self.experts[0].training:
                raise
            raise CommError(f"{error}; {UNEQUAL_TEXTS}") from error

    def _through(self, hidden_states: Tensor, top_k_index: Tensor,
                 top_k_weights: Tensor) -> Tensor:
        module, routed = self.experts[0], self.routed
        self._check(module)
        if routed is None:
            experts = self.num_local_experts * self.comm.size
            routed = self.routed = _routed(module, self.settings, self.comm, experts,
                                           top_k_index.shape[1])
        if self.sharing.size == 1:
            y_TD = _call(routed, module, hidden_states, top_k_index, top_k_weights)
            return y_TD.clone() if y_TD._is_view() else y_TD  # FSDP2's hook must not be on a view
        tokens = hidden_states.shape[0]
        part = _part(hidden_states, top_k_index, top_k_weights, self.sharing)
        return gather(_call(routed, module, *part), self.sharing)[:tokens]

    def _check(self, module: Any) -> None:
        """In some training calls, compare the experts of all ranks. See `OverwriteCheck`."""
        if torch.compiler.is_compiling() or self.comm.size == 1 or not (
                module.training and torch.is_grad_enabled()):
            return
        if self.overwrites is None:
            self.overwrites = OverwriteCheck(self.comm, module)
            for parameter in module.parameters():
                parameter.expert_ranks = self.comm.size  # type: ignore[attr-defined]
        self.overwrites(module, None)


def _part(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor,
          comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
    missing = -x_TD.shape[0] % comm.size
    ids_TK = F.pad(ids_TK, (0, 0, 0, missing), value=-1).chunk(comm.size)[comm.rank]
    return split_tokens(x_TD, None, comm)[0], ids_TK, split_tokens(weights_TK, None, comm)[0]


def _call(routed: RoutedExperts, module: Any, x_TD: Tensor, ids_TK: Tensor,
          weights_TK: Tensor) -> Tensor:
    routed.experts.training = module.training
    wide = x_TD
    if not torch.is_autocast_enabled(x_TD.device.type):
        wide = x_TD.to(module.down_proj.dtype)
    return routed(wide, ids_TK, weights_TK, training=module.training).to(x_TD.dtype)


def _routed(module: Any, settings: Mapping[str, Any], comm: Comm, experts: int,
            choices: int) -> RoutedExperts:
    check_module(module)  # again, because the weights may be quantized after the model is built
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

    def make(config: MoEConfig, placement: Placement) -> Experts:
        return experts_of(module, config, placement)

    return RoutedExperts.of_model(
        config, comm, make, dtype=first.dtype,
        agreed={"class of the experts": type(module).__qualname__})


class FolderOfOneRun(TrainerCallback):
    """A callback that lets only one training run at a time use `output_dir`.

    See `moe_plugin.utils.folder_lock`.

    Args:
        take_over: True to use the folder even if another run seems to be using it.
    """

    def __init__(self, take_over: bool = False) -> None:
        self._take_over = take_over
        self._lock: FolderLock | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Lock the folder.

        Raises:
            ValueError: On all ranks, if another run is using the folder.
        """
        several = dist.is_available() and dist.is_initialized()
        with refused_together("the folder of the run") if several else nullcontext():
            if state.is_world_process_zero:
                self._lock = hold_folder(args.output_dir, self._take_over)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Release the folder. After a failure, the folder is released when the process exits."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
