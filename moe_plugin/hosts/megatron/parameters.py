"""Adapt expert parameters to Megatron: gradient buffers, clipping, initialisation, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_plugin.comm.placement import Placement
from moe_plugin.experts.base import IN_MEGATRON
from moe_plugin.experts.ffn import PART_AXIS, SHARD_AXIS
from moe_plugin.hosts.megatron.compat.core import MegatronGroups
from moe_plugin.hosts.megatron.compat.names import ShardedTensor
from moe_plugin.hosts.megatron.compat.optimizer import biases_are_vectors
from moe_plugin.routing.contract import keeps_init


def mark(experts: nn.Module) -> None:
    """Set the attributes by which Megatron recognises expert parameters.

    With `allreduce = False`, Megatron stores the gradient in the buffers for experts. Megatron then
    sums the gradient over the ranks that store the same experts, and divides the sum by the
    data-parallel size. Without expert parallelism, Megatron's own layer uses the buffers for dense
    parameters, whereas the layer of this package always uses the buffers for experts. The resulting
    gradients are the same in both cases. The buffers for experts can also be used if experts are
    sharded differently from dense layers. With the buffers for experts, the optimizer state has the
    same structure at every expert-parallel size. A checkpoint can therefore be loaded with a
    different size. With `tensor_model_parallel = True`, every rank of the model-parallel group adds
    its expert parameters to the gradient norm. Including all parameters is correct, because each
    rank stores different experts or different slices of experts. Expert biases are treated as
    vectors by the optimizers.
    """
    biases_are_vectors()
    parameter: Any  # the attributes are read by Megatron
    for parameter in experts.parameters():
        parameter.allreduce = False
        parameter.tensor_model_parallel = True
        parameter.partition_dim, parameter.partition_stride = 0, 1


def wait_for(experts: nn.Module) -> None:
    """Wait until Megatron has gathered the parameters of these experts (with
    `overlap_param_gather`).

    Megatron waits in a hook that runs before the forward pass of the module that owns the
    parameters. The layer of this package skips this forward pass if it gathers or broadcasts the
    expert parameters, or applies them token by token. This function therefore runs the hook
    directly. If the forward pass runs later, the hook has no effect.
    """
    if any(hasattr(parameter, "__fsdp_param__") for parameter in experts.parameters()):
        raise ValueError(
            "Megatron-FSDP around moe-plugin's MoE layer is not supported, because its results "
            "have not been compared with Megatron's own. Use DistributedDataParallel with "
            "use_distributed_optimizer=True.")
    for key, hook in tuple(experts._forward_pre_hooks.items()):
        of_megatron = (hook.__module__ or "").startswith("megatron.")
        if of_megatron and key not in experts._forward_pre_hooks_with_kwargs:
            hook(experts, ())


def gather(chunks: Iterable[Any]) -> None:
    """Gather the parameters after a step, for code that reads them before the next step.

    With `overlap_param_gather`, each rank updates only its own shards. The shards of other ranks
    are outdated until the next forward pass gathers the parameters. This is a collective operation,
    so all ranks must call this function.

    Args:
        chunks: model chunks with their data-parallel wrappers.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def initialise(experts: nn.Module, placement: Placement, weight_init: Callable[[Tensor], Any],
               output_init: Callable[[Tensor], Any]) -> None:
    """Initialise expert weights with Megatron's init methods. The initial weights do not depend on
    the number of ranks.

    One random number is drawn from torch's generator. The seed of each expert is the sum of this
    random number and the global index of the expert. Biases become zero.
    """
    base = int(torch.randint(2**31, ()))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for slot in range(placement.local):
            torch.manual_seed(base + placement.first_expert + slot)
            for name, parameter in experts.named_parameters():
                if parameter.dim() < 3:
                    parameter[slot].zero_()
                    continue
                method = output_init if name.startswith("w_out") else weight_init
                parameter[slot].copy_(
                    _whole(parameter[slot], SHARD_AXIS[name] - 1, placement.shards,
                           method)[placement.shard])


def initialise_linear(linear: nn.Linear, weight_init: Callable[[Tensor], Any]) -> None:
    """Initialise a linear layer with one of Megatron's init methods and a bias of zero."""
    with torch.no_grad():
        weight = torch.empty(linear.weight.shape, dtype=torch.float32)
        weight_init(weight)
        linear.weight.copy_(weight)
        if linear.bias is not None:
            linear.bias.zero_()


def _whole(like: Tensor, axis: int, shards: int, method: Callable[[Tensor],
                                                                  Any]) -> tuple[Tensor, ...]:
    shape = list(like.shape)
    shape[axis] *= shards
    whole = torch.empty(shape, dtype=torch.float32).t()  # Megatron's weights are [out, in]
    method(whole)
    return whole.t().chunk(shards, axis)


def expert_shards(experts: nn.Module, placement: Placement, groups: MegatronGroups, prefix: str,
                  offsets: tuple[Any, ...]) -> dict[str, ShardedTensor]:
    """Return the expert parameters as sharded tensors of Megatron with global shape [E, ...].

    Args:
        prefix: prefix of the state-dict keys, with a trailing dot.
        offsets: leading axes that Megatron adds to the tensors, for example the layer axis.
    """
    ahead = len(offsets)
    sharded: dict[str, ShardedTensor] = {}
    for name, parameter in experts.named_parameters():
        axis, copy = PART_AXIS[name], 0
        where = [(ahead, placement.first_expert // placement.local,
                  placement.experts // placement.local)]
        if axis is None:  # every shard has all scales
            copy = placement.shard
        elif placement.shards > 1:
            where.append((ahead + axis, placement.shard, placement.shards))
        sharded[prefix + name] = ShardedTensor.from_rank_offsets(
            prefix + IN_MEGATRON.get(name, name), parameter, *offsets, *where,
            replica_id=(copy, 0, dist.get_rank(groups.expert_replicas)), prepend_axis_num=ahead)
    return sharded


def replicated_shard(key: str, name: str, parameter: Tensor, groups: MegatronGroups,
                     offsets: tuple[Any, ...]) -> dict[str, ShardedTensor]:
    """Return the sharded tensor for a parameter that is stored on every rank of a pipeline stage.

    Args:
        key: key of the parameter in the state dict.
        name: name of the parameter in the checkpoint.
    """
    replica = (0, dist.get_rank(groups.tensor), dist.get_rank(groups.data))
    return {
        key: ShardedTensor.from_rank_offsets(name, parameter, *offsets, replica_id=replica,
                                             prepend_axis_num=len(offsets))
    }


def initialise_router(router: nn.Module, config: Any) -> None:
    """Initialise the router's parameters with Megatron's `init_method`."""
    with torch.no_grad():
        for parameter in router.parameters():
            if keeps_init(parameter):
                continue
            values = torch.empty(parameter.shape, dtype=torch.float32)
            config.init_method(values)
            parameter.copy_(values)
