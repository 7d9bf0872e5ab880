"""MoE layers in models of fairseq2: Llama 4's MoE blocks, and checkpoints of fairseq2's trainer.

    model = create_llama4_model(config)
    swap_moe(model, losses={"switch": 0.01})
    model = ddp_model(model)                   # on several ranks
    enable_checkpoints(model, gangs)
    trainer = Trainer(model=model, gangs=gangs, ...)

`replace_ffn` replaces the feed-forward networks of dense models.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.layers import local_window
from moe_plugin.comm import Comm, default_comm
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import MoEConfig, from_dict, with_overrides
from moe_plugin.config.named import overrides, refuse_timeout
from moe_plugin.experts.gates import named_activation
from moe_plugin.experts.optimizers import replaces_parameters
from moe_plugin.hosts.plain.blocks import MoEBlock, use_model_masks
from moe_plugin.hosts.plain.feed_forward import read_feed_forward
from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.layer import MoELayer, layers_in

EXTRA_STATE = "_extra_state"


@replaces_parameters
def swap_moe(model: nn.Module, comm: Comm | None = None, **settings: Any) -> list[str]:
    """Replace every MoE block of fairseq2's Llama 4 (`fairseq2.models.llama4.moe.MoE`) with a
    `MoEBlock` that has the same weights. Collective over `comm`.

    The outputs of the model stay the same up to rounding errors. Frozen parameters stay frozen.
    Padding tokens that the model's `BatchLayout` marks are not routed. The names of parameters
    change, so load the weights into the model before you call this function.

    Args:
        model: the model, which is modified in place. The weights must be identical on all ranks.
        comm: communicator of the expert-parallel group. Optional. Defaults to the default process
            group. If there is no default process group, each process stores all experts.
        settings: additional settings of the MoE layers. See
            `moe_plugin.config.named.named_config`.
    Returns: the names of the replaced modules.
    Raises:
        ValueError: If the model has no such block, if a block is sharded over ranks or on the meta
            device, or if a setting is not possible.
    """
    from fairseq2.models.llama4.moe import MoE

    found: list[tuple[str, Any]] = [(name, module) for name, module in model.named_modules()
                                    if name and isinstance(module, MoE)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no MoE block of fairseq2's Llama 4. To put "
                         "experts into a dense model, use moe_plugin.replace_ffn")
    refuse_timeout(comm, settings)
    configs = [with_overrides(_config(name, block), overrides(settings)) for name, block in found]
    comm = default_comm(configs[0].comm.timeout_s) if comm is None else comm
    # all layers are built before the first is inserted, so that an error leaves the model unchanged
    layers = [_layer(block, config, comm, number)
              for number, ((_, block), config) in enumerate(zip(found, configs, strict=True))]
    for (name, block), layer in zip(found, layers, strict=True):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, MoEBlock(layer).train(block.training))
    use_model_masks(model)
    return [name for name, _ in found]


def enable_checkpoints(model: nn.Module, gangs: Any) -> None:
    """Let fairseq2's `CheckpointManager` save and load the MoE layers of a model.

    The state of an MoE layer includes which experts a rank stores. This part is not a tensor, and
    fairseq2 saves only tensors, so it is converted to a tensor. Call this function before the
    `Trainer` is created. If a checkpoint is loaded with a different number of ranks, a `ValueError`
    is raised.

    Args:
        model: the model that is passed to the `Trainer`, after it was wrapped for data parallelism.
        gangs: the gangs of the `Trainer` and of the `CheckpointManager`.
    Raises:
        ValueError: If the gangs would save the experts of some ranks only.
    """
    from fairseq2.nn.data_parallel import (
        DataParallelFacade,
        get_data_parallel_facade,
        set_data_parallel_facade,
    )

    shared = max((layer.comm.size for layer in layers_in(model)), default=1)
    if shared > 1 and gangs.rdp.size > 1:
        raise ValueError(
            f"{shared} ranks share the experts, but of {gangs.rdp.size} ranks with the same dense "
            "parameters fairseq2 saves only the first. Use the gangs of create_fsdp_gangs(gangs), "
            "with which every rank saves a file")
    wrapped = get_data_parallel_facade(model)

    class Facade(DataParallelFacade):
        """The facade of the model, with tensors in place of other states."""

        def state_dict(self) -> dict[str, object]:
            return {name: value if isinstance(value, Tensor) else _as_tensor(value)
                    for name, value in wrapped.state_dict().items()}

        def load_state_dict(self, state_dict: dict[str, object]) -> None:
            wrapped.load_state_dict({
                name: _from_tensor(value) if name.endswith(EXTRA_STATE) else value
                for name, value in state_dict.items()})

        def no_sync(self) -> Any:
            return wrapped.no_sync()

        def clip_grad_norm(self, max_norm: float | None) -> Tensor:
            norm: Tensor = wrapped.clip_grad_norm(max_norm)
            return norm

        def summon_full_parameters(self) -> Any:
            return wrapped.summon_full_parameters()

    set_data_parallel_facade(model, Facade())


def _as_tensor(value: object) -> Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _from_tensor(value: Any) -> object:
    # the file may come from a stranger, so only tensors and plain values are read
    return torch.load(io.BytesIO(value.numpy().tobytes()), weights_only=True)


def _config(name: str, block: Any) -> MoEConfig:
    experts, shared = block.experts, block.shared_expert
    if block.tp_gang is not None or type(experts).__name__ != "GroupedExpertNetwork":
        raise ValueError(f"block {name!r} is sharded over ranks ({type(experts).__name__}). Call "
                         "swap_moe before the model is sharded; experts are then shared by the "
                         "ranks of `comm`")
    if any(parameter.is_meta for parameter in block.parameters()):
        raise ValueError(f"block {name!r} is on the meta device. Call swap_moe after the weights "
                         "are loaded")
    activation = named_activation(experts.activation)
    dense = None if shared is None else read_feed_forward(shared)
    if activation is None or shared is not None and (
            dense is None or dense.activation != activation or dense.dropout or dense.after):
        raise ValueError(f"block {name!r}: the activation {type(experts.activation).__name__} is "
                         "not supported, or the shared expert computes something else. Use one "
                         f"of {', '.join(ACTIVATIONS)} in both, without dropout")
    return from_dict({
        "model_dim": experts.model_dim, "num_experts": experts.num_experts,
        "router": {"name": "topk", "top_k": block.top_k, "score": "sigmoid", "normalize": "none"},
        "experts": {"kind": "gated_ffn", "hidden_dim": experts.inner_dim, "bias": False,
                    "activation": activation, "weights_first": True,
                    "shared_hidden_dim": 0 if dense is None else dense.hidden}})


@torch.no_grad()
def _layer(block: Any, config: MoEConfig, comm: Comm, number: int) -> MoELayer:
    weight = block.experts.gate_proj
    layer = MoELayer(config, comm, host=HostContext(layer_number=number, training=block.training),
                     dtype=weight.dtype, device=weight.device)
    ours = dict(layer.named_parameters())
    for name, (source, value) in _weights(block).items():
        if name.startswith("experts."):
            value = value.unflatten(0, (config.num_experts, -1))
            window = local_window(name.removeprefix("experts."), tuple(value.shape),
                                  layer.placement)
            value = value[window]
        ours[name].copy_(value)
        ours[name].requires_grad_(source.requires_grad)
    return layer


def _weights(block: Any) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Return a dict from the names in our layer to the parameters of a block, and to their values
    in the layout of our layer, where the experts are still concatenated along the first axis.
    """
    found = {"router.weight_ED": (block.router, block.router.T)}
    parts = (("fc_gate", "w_gate_LDF", "gate_proj"), ("fc_in", "w_in_LDF", "inner_proj"),
             ("fc_out", "w_out_LFD", "output_proj"))
    for linear, name, theirs in parts:
        weight = getattr(block.experts, theirs)
        found[f"experts.{name}"] = weight, weight
        if block.shared_expert is not None:
            weight = getattr(block.shared_expert, theirs).weight
            found[f"shared_expert.{linear}.weight"] = weight, weight
    return found
