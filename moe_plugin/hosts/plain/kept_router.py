"""Replace only the experts of a `transformers` model. The model's own code still computes the
choices and weights, the shared experts, and everything else around the experts.

This works for every class of experts that is called with tokens, choices and weights, and whose
weights are stacks with one matrix per expert. It is used for families whose router has no
counterpart among the settings of this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.formats.huggingface.format import state_source
from moe_plugin.checkpoint.layers import full_state, load_layer
from moe_plugin.comm import Comm
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import MoEConfig, from_dict, with_overrides
from moe_plugin.experts.gates import OwnGate, gate_settings
from moe_plugin.experts.matrices import of_transformers
from moe_plugin.hosts.plain.blocks import MoEBlock
from moe_plugin.hosts.plain.restored import copied
from moe_plugin.layer import MoELayer
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing import RouterModule
from moe_plugin.utils.messages import short
from moe_plugin.utils.tensors import is_sharded

_CHOICES = ("top_k", "num_experts_per_tok", "moe_top_k", "top_k_experts")
# the flags of transformers' decorator `use_experts_implementation`, with their default values
_FLAGS = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False,
          "is_transposed": False, "is_concatenated": True}
# classes without this decorator that are called in the same way
_UNDECORATED = ("DbrxExperts", "LongcatFlashExperts", "Step3p7Experts")
_UNUSED = "identity_rows"  # buffer with the rows of a stack that no expert reads (LongCat-Flash)


@dataclass(frozen=True)
class _Stack:
    """A parameter of an experts module, and the parameters of our experts that it contains.

    Attributes:
        name: name of the parameter in the experts module.
        parts: names of the parameters of our experts, in the order of the rows.
        swap: whether the last two axes are swapped.
        in_turn: whether the rows of the parts alternate.
        flat: whether the matrices of all experts are concatenated along the first axis.
    """

    name: str
    parts: tuple[str, ...]
    swap: bool = False
    in_turn: bool = False
    flat: bool = False

    def read(self, value: Tensor, experts: int) -> dict[str, Tensor]:
        value = value.unflatten(0, (experts, -1)) if self.flat else value[:experts]
        value = value.transpose(1, 2) if self.swap else value
        count = len(self.parts)
        halves = ([value[..., part::count] for part in range(count)] if self.in_turn
                  else value.chunk(count, -1))
        return dict(zip(self.parts, halves, strict=True))

    def write(self, tensors: Mapping[str, Tensor]) -> Tensor:
        halves = [tensors[part] for part in self.parts]
        value = torch.stack(halves, -1).flatten(-2) if self.in_turn else torch.cat(halves, -1)
        value = value.transpose(1, 2) if self.swap else value
        return (value.flatten(0, 1) if self.flat else value).contiguous()


def _stacks(module: Any) -> list[_Stack]:
    if type(module).__name__ == "DbrxExperts":
        return [_Stack("mlp.w1", ("w_gate_LDF",), swap=True, flat=True),
                _Stack("mlp.v1", ("w_in_LDF",), swap=True, flat=True),
                _Stack("mlp.w2", ("w_out_LFD",), flat=True)]
    gated, bias, _, transposed, concatenated = (getattr(module, name, value)
                                                for name, value in _FLAGS.items())
    first = "gate_up_proj" if gated else "up_proj"
    turn = gated and not concatenated
    inputs = ("w_gate_LDF", "w_in_LDF") if gated else ("w_in_LDF",)
    biases = ("bias_gate_LF", "bias_in_LF") if gated else ("bias_in_LF",)
    return [_Stack(first, inputs, not transposed, turn),
            _Stack("down_proj", ("w_out_LFD",), not transposed),
            *([_Stack(f"{first}_bias", biases, in_turn=turn),
               _Stack("down_proj_bias", ("bias_out_LD",))] if bias else [])]


class ModelChoices(RouterModule):
    """A router that returns the choices and weights that the model's own router has computed.

    Attributes:
        given: choices [T, K] and weights [T, K] of the next call.
        identities: whether some experts return their input.
        experts: the number of experts. A larger index stands for an expert that returns its input.
        skips: whether a weight of 0 means that the token skips the experts.
    """

    balances = True  # the model's own code decides whether it balances the load
    reads = frozenset()

    def __init__(self, experts: int, identities: bool, skips: bool) -> None:
        super().__init__()
        self.experts, self.identities, self.skips = experts, identities, skips
        self.given: tuple[Tensor, Tensor] | None = None

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, top_k: int | None = None,
                info: TokenInfo | None = None) -> Routing:
        """See `RouterModule`."""
        assert self.given is not None, "SwappedExperts passes the choices of each call"
        (ids_TK, weights_TK), self.given = self.given, None
        if mask_T is not None:
            ids_TK = ids_TK.masked_fill(~mask_T[:, None], -1)
        if self.skips:
            ids_TK = ids_TK.masked_fill(weights_TK == 0, -1)
        wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        weights_TK, same_TK = weights_TK.to(wide), ids_TK >= self.experts
        passthrough_T = (weights_TK * same_TK).sum(1)
        none_TK = same_TK | (ids_TK < 0)
        zero = torch.zeros((), device=x_TD.device)
        tokens = zero.long() + x_TD.shape[0] if mask_T is None else mask_T.sum()
        return Routing(ids_TK.masked_fill(none_TK, -1), weights_TK.masked_fill(none_TK, 0.0), None,
                       {}, zero, tokens, passthrough_T if self.identities else None)


class SwappedExperts(MoEBlock):
    """Experts that are called in the same way as the experts of a `transformers` model.

    Attributes:
        original: the model's own module, whose stacks are on the meta device.
        stacks: the parameters of the model's own module.
        post_expert_norm: the norm of the experts' outputs, or None. All ranks share its weight.
    """

    def __init__(self, module: Any, config: MoEConfig, comm: Comm, own_gate: bool) -> None:
        stacks = _stacks(module)
        values = {stack.name: module.get_parameter(stack.name) for stack in stacks}
        experts, like = config.num_experts, next(iter(values.values()))
        router = ModelChoices(experts, identities=hasattr(module, "identity_expert"),
                              skips=type(module).__name__ == "ZayaExperts")
        moe = MoELayer(config, comm, router=router, dtype=like.dtype, device=like.device,
                       host=HostContext(training=module.training))
        super().__init__(moe)
        # a tuple keeps the module from being registered as a submodule
        self.stacks, self.original = stacks, (module,)
        self.load(values)
        ours = dict(moe.named_parameters())
        for stack in stacks:
            value = values[stack.name]
            for name in stack.parts:
                if (parameter := ours.get(f"experts.{name}")) is not None:
                    parameter.requires_grad_(value.requires_grad)
            _replace(module, stack.name, nn.Parameter(value.detach().to("meta"),
                                                      value.requires_grad))
        self.post_expert_norm = module.post_expert_norm if has_norm(module) else None
        built: Any = moe.routed_experts.experts
        if own_gate:
            built.own_gate = OwnGate(module)
        if self.post_expert_norm is not None:
            built.finish = self.post_expert_norm.forward  # a bound method is not a submodule

    def forward(self, hidden_states: Tensor, top_k_index: Tensor,  # type: ignore[override]
                top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of each token's experts."""
        most = self.moe.config.router.top_k
        if top_k_index.shape[1] != most:
            raise ValueError(f"the model's router chose {top_k_index.shape[1]} experts per token, "
                             f"but router.top_k={most}. Pass settings={{'router.top_k': "
                             f"{top_k_index.shape[1]}}} to swap_moe_blocks")
        cast(ModelChoices, self.moe.router).given = top_k_index.long(), top_k_weights
        return super().forward(hidden_states)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Copy the stacks of all experts into the layer. Each rank copies only its own experts."""
        experts, tensors = self.moe.config.num_experts, dict[str, Tensor]()
        for stack in self.stacks:
            tensors |= stack.read(values[stack.name].detach(), experts)
            if not stack.flat and values[stack.name].shape[0] > experts:
                self.register_buffer(_UNUSED, values[stack.name].detach()[experts:].clone())
        load_layer(self.moe, state_source({f"experts.{name}": value for name, value
                                           in tensors.items()}, {}), "")

    @property
    def one_matrix_each(self) -> bool:
        """Whether the model's own stacks have one matrix per expert, along the first axis."""
        return _UNUSED not in self._buffers and not any(stack.flat for stack in self.stacks)

    def take(self, state: dict[str, Any], prefix: str) -> None:
        """Replace the model's own stacks in a state dict by the parameters of this layer.

        prefix: the prefix of the names of this module, with a trailing dot.
        """
        names = {stack.name: prefix + stack.name for stack in self.stacks}
        if all(name in state for name in names.values()):
            self.load({stack: state.pop(name) for stack, name in names.items()})
            state |= {f"{prefix}{name}": value for name, value in self.state_dict().items()
                      if name.startswith(("moe.", _UNUSED))}

    def restored(self) -> nn.Module:
        """Return the model's own experts with the weights of all ranks. Collective."""
        module: Any = copied(self.original[0])
        trains = {name: value.requires_grad for name, value in self.moe.named_parameters()}
        tensors = {name.removeprefix("experts."): value
                   for name, value in full_state(self.moe, "experts.").items()}
        for stack in self.stacks:
            value, first = stack.write(tensors), f"experts.{stack.parts[0]}"
            if module.get_parameter(stack.name).shape[0] > value.shape[0]:
                value = torch.cat([value, self.get_buffer(_UNUSED).to(value)])
            _replace(module, stack.name, nn.Parameter(value, trains.get(first, True)))
        if self.post_expert_norm is not None:
            module.post_expert_norm = self.post_expert_norm
        restored: nn.Module = module.train(self.training)
        return restored


def _replace(module: nn.Module, name: str, value: nn.Parameter) -> None:
    parent, _, last = name.rpartition(".")
    module.get_submodule(parent).register_parameter(last, value)


def has_norm(module: Any) -> bool:
    """Return whether a norm is applied to the outputs of the experts."""
    return bool(getattr(module, "has_post_expert_norm", False))


def replaceable(module: nn.Module) -> bool:
    """Return whether a module has experts that `SwappedExperts` can replace."""
    return of_transformers(module) or type(module).__name__ in _UNDECORATED


def kept_experts(model: nn.Module) -> Iterator[tuple[str, SwappedExperts]]:
    """Iterate over the names and modules of all experts that `swap_experts` has replaced."""
    return ((name, module) for name, module in model.named_modules()
            if isinstance(module, SwappedExperts))


def swap_experts(model: nn.Module, comm: Comm, settings: Mapping[str, Any]) -> list[str]:
    """Replace the experts of a model, and keep its routers. Collective.

    Args:
        model: the model. Its weights must be equal on all ranks.
        comm: the expert-parallel group.
        settings: additional settings of the layers, by dotted path.
    Returns: the names of the new modules. The list is empty if the model has no experts of a class
        that can be replaced.
    """
    swapped, names = dict[int, SwappedExperts](), list[str]()
    for parent_name, parent in list(model.named_modules()):
        for name, module in list(parent.named_children()):
            if not replaceable(module):
                continue
            if id(module) not in swapped:
                form = gate_settings(module)
                config = _config(model, parent, module, {**(form or {}), **settings})
                _check(config, module, own_gate=form is None)
                swapped[id(module)] = SwappedExperts(module, config, comm, form is None)
            setattr(parent, name, swapped[id(module)].train(module.training))
            names.append(f"{parent_name}.{name}".removeprefix("."))
    return names


def _config(model: nn.Module, parent: nn.Module, module: Any,
            settings: Mapping[str, Any]) -> MoEConfig:
    stacks, who = _stacks(module), type(module).__name__
    values = [module.get_parameter(stack.name) for stack in stacks]
    dtype = values[0].dtype
    if any(is_sharded(value) for value in values) or not dtype.is_floating_point \
            or dtype.itemsize < 2:
        raise ValueError(f"{who} has weights of {dtype} in a {type(values[0]).__name__}. Only "
                         "whole weights of 16 bits or more can be swapped. Load the model without "
                         "quantization and without a distributed_config")
    experts = int(module.num_experts if stacks[0].flat else module.down_proj.shape[0])
    tensors = stacks[0].read(values[0].detach(), experts)
    _, width, inner = next(iter(tensors.values())).shape
    gated = getattr(module, "has_gate", True)
    return with_overrides(from_dict({
        "model_dim": width, "num_experts": experts, "losses": {},
        "router": {"top_k": _choices(model, parent, module)},
        "experts": {"kind": "gated_ffn" if gated else "ffn", "hidden_dim": inner,
                    "bias": bool(getattr(module, "has_bias", False))}}), settings)


def _check(config: MoEConfig, module: Any, own_gate: bool) -> None:
    who = type(module).__name__
    if config.losses:
        raise ValueError(f"losses={short(config.losses)} has no effect with {who}, because the "
                         "model's own router chooses the experts. Use the model's own loss, "
                         "output_router_logits=True")
    where = f"with {who}, whose gate or norm has no counterpart among our settings"
    if own_gate or has_norm(module):
        config.experts.read_where(False, where, "use it for another model", "precision", "store")
    if has_norm(module):
        config.parallel.require("replicas", config.parallel.replicas == 1, f"1 {where}",
                                "leave it out")
        config.parallel.require("shards", config.parallel.shards in (None, 1), f"1 {where}",
                                "use at most as many ranks as experts")


def _choices(model: Any, parent: nn.Module, module: nn.Module) -> int:
    """Return the number of experts per token, which the model's router or settings contain."""
    for owner in (*parent.children(), parent, getattr(module, "config", None), model.config):
        for name in _CHOICES:
            if type(value := getattr(owner, name, None)) is int:
                return int(value)
    raise ValueError(f"the number of experts per token of {type(parent).__name__} is unknown. "
                     "Pass settings={'router.top_k': K}")
