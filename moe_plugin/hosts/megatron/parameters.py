"""Expert parameters in Megatron: marks for its gradient buffers and clipping, initial values, and
checkpoint shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_plugin.comm.placement import Placement
from moe_plugin.experts.base import IN_MEGATRON
from moe_plugin.experts.ffn import SHARD_AXIS
from moe_plugin.hosts.megatron.compat.core import MegatronGroups
from moe_plugin.hosts.megatron.compat.names import ShardedTensor
from moe_plugin.hosts.megatron.compat.optimizer import biases_are_vectors


def mark(experts: nn.Module) -> None:
    """Set the attributes by which Megatron recognises expert parameters.

    `allreduce = False`: the gradient is stored in the expert buffers, summed over the ranks that
    store the same experts, and divided by the data-parallel size. Without expert parallelism
    Megatron's own layer uses the dense buffers, but our layer always uses the expert buffers. Both
    choices give equal results. Expert buffers are also correct if experts are split differently
    from dense layers, and the optimizer then has the same parts at every expert-parallel size, so
    its checkpoint can be loaded at another size.
    `tensor_model_parallel = True`: the gradient norm counts the parameter on every rank of its
    model-parallel group, because each of these ranks stores different experts or slices.
    Expert biases are treated as vectors by the optimizers.
    """
    biases_are_vectors()
    for parameter in experts.parameters():
        parameter.allreduce = False
        parameter.tensor_model_parallel = True
        parameter.partition_dim, parameter.partition_stride = 0, 1


def wait_for(experts: nn.Module) -> None:
    """Wait until Megatron has gathered these parameters (`overlap_param_gather`).

    Megatron waits in a hook before the forward pass of the module that owns the parameters. Our
    layer also uses experts without calling their forward pass: gathered (r = 0), broadcast, or
    token by token. If the forward pass is called as well, the hook has nothing left to do.
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
    """Gather the parameters after a step, so that code other than the next step can read them.

    Under `overlap_param_gather` each rank has new values only for its own shards until the forward
    pass of the next step gathers the parameters. This is a collective call.

    Args:
        chunks: chunks of the model, in their data-parallel wrappers.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def initialise(experts: nn.Module, place: Placement, weight_init: Callable[[Tensor], Any],
               output_init: Callable[[Tensor], Any]) -> None:
    """Initialise expert weights with Megatron's init methods, identically on any number of ranks.

    A single draw from torch's generator seeds all experts by their global index. Biases become
    zero.
    """
    base = int(torch.randint(2**31, ()))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for slot in range(place.local):
            torch.manual_seed(base + place.first_expert + slot)
            for name, parameter in experts.named_parameters():
                if parameter.dim() < 3:
                    parameter[slot].zero_()
                    continue
                method = output_init if name.startswith("w_out") else weight_init
                parameter[slot].copy_(
                    _whole(parameter[slot], SHARD_AXIS[name] - 1, place.shards,
                           method)[place.shard])


def initialise_linear(linear: nn.Linear, weight_init: Callable[[Tensor], Any]) -> None:
    """Initialise the weights of a linear layer with one of Megatron's init methods; a bias
    becomes zero.
    """
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


def expert_shards(experts: nn.Module, place: Placement, groups: MegatronGroups, prefix: str,
                  offsets: tuple[Any, ...]) -> dict[str, ShardedTensor]:
    """Return Megatron sharded tensors of the expert parameters, with global shape [E, ...].

    Args:
        prefix: prefix of the state-dict keys, with a trailing dot.
        offsets: the leading axes that Megatron adds, such as the layer axis.
    """
    ahead = len(offsets)
    replica = (0, 0, dist.get_rank(groups.expert_replicas))
    found: dict[str, ShardedTensor] = {}
    for name, parameter in experts.named_parameters():
        where = [(ahead, place.first_expert // place.local, place.experts // place.local)]
        if place.shards > 1:
            where.append((ahead + SHARD_AXIS[name], place.shard, place.shards))
        found[prefix + name] = ShardedTensor.from_rank_offsets(
            prefix + IN_MEGATRON.get(name, name), parameter, *offsets, *where,
            replica_id=replica, prepend_axis_num=ahead)
    return found


def replicated_shard(key: str, name: str, parameter: Tensor, groups: MegatronGroups,
                     offsets: tuple[Any, ...]) -> dict[str, ShardedTensor]:
    """Return the sharded tensor of a parameter that every rank of a pipeline stage stores.

    Args:
        key: key of the parameter in the state dict.
        name: name of the parameter in the checkpoint.
    """
    replica = (0, dist.get_rank(groups.tensor), dist.get_rank(groups.data))
    return {
        key: ShardedTensor.from_rank_offsets(name, parameter, *offsets, replica_id=replica,
                                             prepend_axis_num=len(offsets))
    }
