"""Interfaces to the MoE layers, process groups and specs of Megatron-core 0.15 to 0.20.

| interface | 0.15 | 0.16 | 0.17 | 0.18, 0.19 |
|---|---|---|---|---|
| an MoE layer in a spec | ModuleSpec | ModuleSpec | ModuleSpec | functools.partial or ModuleSpec |
| groups are passed to | the exact class | the exact class | the exact class | every class |
| more arguments of the layer | | | is_mtp_layer | is_mtp_layer, name |
| `padding_mask` of layer and router | no | yes | yes | yes |
| injectable router in `MoESubmodules` | no | yes | yes | yes |
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import __version__ as core_version
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from moe_plugin.hosts.megatron.compat.aux_losses import forget_losses
from moe_plugin.hosts.megatron.compat.sequence_parts import NUMBER, tell_layers
from moe_plugin.hosts.megatron.compat.settings import newer_name, setting
from moe_plugin.utils.messages import warn_once
from moe_plugin.utils.replaced import replaced

OLDEST, NEWEST = (0, 15), (0, 20)  # tested versions; the newest is a state of the main branch
Group = dist.ProcessGroup


def check_version() -> None:
    """Raise a `ValueError` if Megatron-core is too old. Warn once about an untested version."""
    if NUMBER < OLDEST:
        raise ValueError(
            f"megatron-core {core_version} is too old. The version must be at least "
            f"{'.'.join(map(str, OLDEST))}. Run: pip install 'megatron-core>=0.15'")
    if NUMBER[:2] > NEWEST:
        warn_once(__name__, f"megatron-core {core_version} is newer than "
                  f"{'.'.join(map(str, NEWEST))}, the newest version that this package was tested "
                  "with. Compare some losses with Megatron's own layer, or run "
                  "scripts/test_megatron_versions.sh with this version.")


@dataclass(frozen=True)
class MegatronGroups:
    """Megatron's process groups, with the names that this package uses.

    Attributes:
        experts: process group of the ranks that together store all experts.
        expert_replicas: process group of the ranks that store copies of the same experts.
        tensor: the tensor-parallel process group.
        context: the context-parallel process group.
        tokens: process group of the tensor- and context-parallel ranks, which share a batch.
        data: process group of the ranks that store copies of the same dense parameters.
    """

    collection: Any
    experts: Group
    expert_replicas: Group
    tensor: Group
    context: Group
    tokens: Group
    data: Group


def groups(collection: Any | None) -> MegatronGroups:
    """Return the process groups passed by Megatron, or Megatron's global groups."""
    if collection is None or not hasattr(collection, "tp_ep") or not hasattr(collection, "tp_cp"):
        collection = moe_utils.get_default_pg_collection()
    context = _group(collection, "cp", parallel_state.get_context_parallel_group)
    data = _group(collection, "dp_cp",
                  lambda: parallel_state.get_data_parallel_group(with_context_parallel=True))
    return MegatronGroups(collection=collection, experts=collection.tp_ep,
                          expert_replicas=collection.expt_dp, tensor=collection.tp,
                          context=context, tokens=collection.tp_cp, data=data)


def _group(collection: Any, name: str, otherwise: Callable[[], Group]) -> Group:
    group = getattr(collection, name, None)
    return otherwise() if group is None else group


def all_data_group(collection: Any) -> Group:
    """Return the process group of all ranks that share the tokens of a step."""
    return _group(collection, "tp_dp_cp",
                  lambda: parallel_state.get_tensor_and_data_parallel_group(
                      with_context_parallel=True))


def destroy_groups() -> None:
    """Destroy Megatron's process groups, including the groups that `destroy_model_parallel` of
    Megatron 0.15 to 0.19 leaves behind.

    Records of auxiliary losses still refer to some of the groups that are left behind. Without this
    function, a child process that is forked later and creates new groups would destroy the groups
    that are left behind. The child process would then wait forever for threads that exist only in
    the parent process.
    """
    parallel_state.destroy_model_parallel()
    forget_losses()
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)


def microbatches_a_step() -> int | None:
    """Return the number of micro-batches per step, or None if Megatron's calculator is not set."""
    known = getattr(calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    return None if known is None else known.get()


def init_base(layer: BaseMoELayer, config: Any, layer_number: int | None, collection: Any,
              extra: dict[str, Any]) -> None:
    """Call `BaseMoELayer.__init__` with the arguments that the installed version supports."""
    known = inspect.signature(BaseMoELayer.__init__).parameters
    BaseMoELayer.__init__(layer, config=config, layer_number=layer_number, pg_collection=collection,
                          **{name: value for name, value in extra.items() if name in known})


def count_local_experts(layer: Any, groups_: MegatronGroups) -> None:
    """Set the expert counts that `BaseMoELayer.__init__` derives from the expert-parallel group."""
    layer.ep_group = groups_.collection.ep
    layer.num_local_experts = layer.config.num_moe_experts // layer.ep_group.size()
    first = layer.ep_group.rank() * layer.num_local_experts
    layer.local_expert_indices = list(range(first, first + layer.num_local_experts))


def native_router(config: Any, submodules: Any, groups_: MegatronGroups,
                  is_mtp_layer: bool) -> torch.nn.Module:
    """Build the router defined in the spec (from Megatron 0.16 on), or Megatron's own router."""
    build = getattr(submodules, "router", None) or TopKRouter
    extra = {"is_mtp_layer": True} if is_mtp_layer else {}
    return build(config=config, pg_collection=groups_.collection, **extra)


def is_native_router(router: torch.nn.Module) -> bool:
    """Return True if a router is an instance of Megatron's own router class."""
    return isinstance(router, TopKRouter)


def has_native_layers(chunks: Iterable[torch.nn.Module]) -> bool:
    """Return True if model chunks contain an instance of Megatron's MoE layer class."""
    return any(isinstance(module, MoELayer) for chunk in chunks for module in chunk.modules())


def injects_router(submodules: Any) -> bool:
    """Return True if the spec defines a router that is not Megatron's own."""
    return getattr(submodules, "router", TopKRouter) not in (None, TopKRouter)


@dataclass(frozen=True)
class Undropped:
    """The routing decision of Megatron's router before tokens above the capacity are dropped.

    Attributes:
        probs_TE: the gate weights, with shape [tokens, experts].
        map_TE: boolean tensor [tokens, experts] that is True for the selected experts.
        capacity: maximum number of tokens per expert.
    """

    probs_TE: Tensor
    map_TE: Tensor
    capacity: int


def call_native_router(router: Any, x_SBD: Tensor, padding_SB: Tensor | None
                       ) -> tuple[Tensor, Tensor, Undropped | None]:
    """Run Megatron's router and return (probs_TE, routing_map_TE, undropped).

    `undropped` is the routing decision before tokens are dropped, or None without a capacity.

    padding_SB: boolean mask that is True for padding tokens. If the installed router does not
    accept a mask, `padding_SB` is ignored.
    """
    takes_mask = "padding_mask" in inspect.signature(router.forward).parameters
    given = {"padding_mask": padding_SB} if takes_mask and padding_SB is not None else {}
    if not is_native_router(router) or router.config.moe_expert_capacity_factor is None:
        return *router(x_SBD, **given), None
    with _undropped() as undropped:
        probs_TE, map_TE = router(x_SBD, **given)
    return probs_TE, map_TE, undropped[0] if undropped else None


@contextlib.contextmanager
def _undropped() -> Iterator[list[Undropped]]:
    """Yield a list. When Megatron's router runs, its selection before tokens are dropped is
    appended to this list.

    The selection that Megatron's router returns is different, because tokens have been dropped and
    experts have been padded to their capacity.
    """
    undropped, drop = list[Undropped](), router_module.apply_router_token_dropping

    def noted(probs_TE: Tensor, map_TE: Tensor, router_topk: int, capacity_factor: float,
              *args: Any, **settings: Any) -> Any:
        tokens, experts = map_TE.shape
        slots = moe_utils.get_capacity(tokens * router_topk, experts, capacity_factor)
        undropped.append(Undropped(probs_TE.detach(), map_TE.bool(), slots))
        return drop(probs_TE, map_TE, router_topk, capacity_factor, *args, **settings)

    router_module.apply_router_token_dropping = noted
    try:
        yield undropped
    finally:
        router_module.apply_router_token_dropping = drop


def shared_experts(config: Any, submodules: Any, groups_: MegatronGroups) -> torch.nn.Module:
    """Build Megatron's own shared expert from Megatron's spec.

    The spec has a ModuleSpec or a class up to Megatron 0.17, and a functools.partial from 0.18.
    """
    builder = getattr(submodules, "shared_experts", None)
    if builder is None:
        raise ValueError(
            "moe_shared_expert_intermediate_size is set, but the layer spec has no shared experts. "
            "Build the spec with Megatron's own functions, and replace its MoE layers with "
            "moe_plugin.hosts.megatron.spec.swap_moe.")
    config = copy.copy(config)
    config.moe_shared_expert_overlap = False  # overlap needs Megatron's own dispatcher
    kwargs = {"config": config, "pg_collection": groups_.collection}
    if hasattr(config, "moe_shared_expert_gate"):  # from 0.16 the gate is an argument
        kwargs["gate"] = config.moe_shared_expert_gate
    if isinstance(builder, functools.partial):
        return builder(**kwargs)
    return build_module(builder, **kwargs)


def swap_mlp(mlp: Any, replacement: type, settings: dict[str, Any]) -> Any:
    """Return a copy of a MoELayer's `mlp` spec with another class, or any other `mlp` unchanged."""
    if isinstance(mlp, functools.partial) and mlp.func is MoELayer:  # 0.18 on
        return functools.partial(replacement, *mlp.args, **mlp.keywords, **settings)
    if isinstance(mlp, ModuleSpec) and mlp.module is MoELayer:
        tell_layers()
        swapped = copy.copy(mlp)
        swapped.module, swapped.params = replacement, {**(mlp.params or {}), **settings}
        return swapped
    return mlp


def swap_spec(spec: Any, replacement: type, settings: dict[str, Any]) -> tuple[Any, int]:
    """Return a copy of a spec with all MoELayers replaced, and the number of replacements."""
    changed, (submodules, _) = [], _submodules(spec)
    if _is_stack(submodules):
        settings = {**settings, "in_hybrid": True}

    def change(name: str, value: Any) -> Any:
        swapped = swap_mlp(value, replacement, settings) if name == "mlp" else value
        changed.extend([swapped] if swapped is not value else [])
        return swapped

    return changed_spec(spec, change), len(changed)


def changed_spec(spec: Any, change: Callable[[str, Any], Any]) -> Any:
    """Copy the spec of a layer, block or hybrid stack, and apply `change` to the submodules.

    `change(name, value)` is called for each submodule of a layer and for the norm of a block.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        layers = [changed_spec(layer, change) for layer in spec.layer_specs]
        return replace(spec, layer_specs=layers, layer_norm=change("layer_norm", spec.layer_norm))
    submodules, partial = _submodules(spec)
    if submodules is None:
        return spec
    inner, stack = copy.copy(submodules), _is_stack(submodules)
    for name, value in list(vars(inner).items()):
        setattr(inner, name, changed_spec(value, change) if stack else change(name, value))
    if partial:
        return functools.partial(spec.func, *spec.args, **{**spec.keywords, "submodules": inner})
    outer = copy.copy(spec)
    outer.submodules = inner
    return outer


def _submodules(spec: Any) -> tuple[Any, bool]:
    partial = isinstance(spec, functools.partial)  # 0.18 on
    return (spec.keywords.get("submodules") if partial else getattr(spec, "submodules", None),
            partial)


def _is_stack(submodules: Any) -> bool:
    return hasattr(submodules, "moe_layer")


def with_engine(wanted: bool | None) -> bool:
    """Return `wanted`, or by default whether Megatron can import Transformer Engine."""
    return bool(getattr(gpt_layer_specs, "HAVE_TE", False)) if wanted is None else wanted


def gpt_moe_layer_spec(transformer_engine: bool | None, grouped: bool = False) -> Any:
    """Return Megatron's own spec of a GPT layer with MoE, for any number of experts.

    grouped: True to build the spec for `moe_grouped_gemm`.
    """
    make = (gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
            if with_engine(transformer_engine) else gpt_layer_specs.get_gpt_layer_local_spec)
    return make(num_experts=1, moe_grouped_gemm=grouped)


@contextlib.contextmanager
def chosen_layers(choose: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Inside the block, Megatron builds models from the layer specs that `choose` returns."""
    all_layers = transformer_block._get_block_submodules  # 0.15 to 0.19

    def chosen(*args: Any, **kwargs: Any) -> TransformerBlockSubmodules:
        block = all_layers(*args, **kwargs)
        return replace(block, layer_specs=choose(block.layer_specs))

    with replaced(transformer_block, _get_block_submodules=chosen):
        yield


def gpt_block_spec(config: Any, transformer_engine: bool | None,
                   vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return Megatron's spec for the layers of the current pipeline stage, according to `config`.

    vp_stage: index of the virtual pipeline stage, or None if there are no virtual stages.
    """
    return gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=with_engine(transformer_engine),
        normalization=config.normalization,
        qk_l2_norm=setting(config, "qk_l2_norm", False), vp_stage=vp_stage)  # from 0.16 on


def predictions_spec(config: Any, layers: TransformerBlockSubmodules,
                     transformer_engine: bool | None, vp_stage: int | None) -> Any:
    """Return Megatron's spec for multi-token prediction, based on the last layer spec."""
    return gpt_layer_specs.get_gpt_mtp_block_spec(
        config, layers, use_transformer_engine=with_engine(transformer_engine), vp_stage=vp_stage)


def replace_attention(spec: Any, ours: type) -> Any:
    """Return a copy of a spec in which `ours` replaces the `core_attention` module."""

    def change(name: str, value: Any) -> Any:
        if name == "self_attention":
            return changed_spec(value, change)
        return ours if name == "core_attention" else value

    return changed_spec(spec, change)


def call_supported(fn: Callable[..., Any], **kwargs: Any) -> Any:
    """Call `fn` with only those keyword arguments that its signature accepts."""
    known = inspect.signature(fn).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    named = {newer_name(name, known): value for name, value in kwargs.items()}
    return fn(**{name: value for name, value in named.items() if takes_all or name in known})


def bare(chunk: Any) -> Any:
    """Return a model chunk without its data-parallel and precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
