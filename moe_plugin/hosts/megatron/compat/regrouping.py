"""Change the expert-parallel size of existing process groups, optimizers and gradient buffers.

Megatron 0.15 to 0.19 is supported, without tensor, context and pipeline parallelism and without a
distributed optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import copy as copied
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor, nn

from moe_plugin.hosts.megatron.compat.core import call_supported
from moe_plugin.hosts.megatron.compat.optimizer import parts

_LISTED = "_global_process_group_list"
_STATE = re.compile(rf"_[A-Z_]+|{_LISTED}")
# names of the expert groups in a ProcessGroupCollection
_OF_EXPERTS = re.compile(r"ep|expt_\w+|intra_expt_dp|tp_ep\w*")


def expert_groups() -> dict[str, Any]:
    """Return the current expert process groups and their sizes, by name in `parallel_state`."""
    return {name: value for name, value in group_state().items() if "EXPERT" in name}


def make_expert_groups(size: int, args: Mapping[str, Any]) -> dict[str, Any]:
    """Create expert process groups for a different expert-parallel size. The current groups do not
    change. This is a collective operation.

    args: dict of the script's arguments.
    """
    before = group_state()
    restore_groups({name: {} if isinstance(value, dict) else None
                    for name, value in before.items() if name != _LISTED})
    try:
        call_supported(ps.initialize_model_parallel, expert_model_parallel_size=size,
                       distributed_timeout_minutes=args["distributed_timeout_minutes"],
                       nccl_communicator_config_path=args["nccl_communicator_config_path"],
                       create_gloo_process_groups=args.get("use_gloo_process_groups", True))
        made, everything = expert_groups(), _groups(group_state().values())
    finally:
        restore_groups(before)
    expert_groups_made = _groups(made.values())
    for group in everything - expert_groups_made:  # dense layers retain their existing groups
        dist.destroy_process_group(group)
    if (listed := getattr(ps, _LISTED, None)) is not None:
        listed += expert_groups_made
    return made


def group_state() -> dict[str, Any]:
    """Return the variables of `parallel_state` that store groups. Lists and dicts are copied."""
    return {name: copied(value) if isinstance(value, (list, dict)) else value
            for name, value in vars(ps).items() if _STATE.fullmatch(name)}


def restore_groups(state: Mapping[str, Any]) -> None:
    """Set variables of `parallel_state` to copies, because Megatron adds to lists and dicts."""
    vars(ps).update({name: copied(value) if isinstance(value, (list, dict)) else value
                     for name, value in state.items()})


def _groups(values: Iterable[Any]) -> set[dist.ProcessGroup]:
    return {value for value in values if isinstance(value, dist.ProcessGroup)}


def follow_groups(model: nn.Module, collection: Any, size: int) -> None:
    """Replace the expert process groups in all modules of a model.

    collection: Megatron's process group collection, which contains the new groups.
    size: the new expert-parallel size.
    """
    for module in model.modules():
        config, groups = getattr(module, "config", None), getattr(module, "pg_collection", None)
        if hasattr(config, "expert_model_parallel_size"):
            config.expert_model_parallel_size = size  # type: ignore[union-attr]
        for name in vars(groups) if groups is not None else ():
            if _OF_EXPERTS.fullmatch(name) and hasattr(collection, name):
                setattr(groups, name, getattr(collection, name))


def rewrap(chunk: Any) -> None:
    """Recreate the gradient buffers of a `DistributedDataParallel` object for its current
    parameters and groups.

    The `DistributedDataParallel` object itself is not replaced.
    """
    chunk.grad_accs.clear()  # with their hooks
    new = type(chunk)(config=chunk.config, ddp_config=chunk.ddp_config, module=chunk.module)
    attributes = vars(new)  # shared, so that the new hooks see changes of the old object
    attributes.update({name: value for name, value in vars(chunk).items()
                       if name not in attributes})
    object.__setattr__(chunk, "__dict__", attributes)


def part_of(optimizer: Any, parameters: Iterable[Tensor]) -> Any:
    """Return the optimizer in a chain that updates these parameters or their float32 copies."""
    wanted = set(parameters)
    return next(part for part in parts(optimizer) if part.optimizer is not None and not
                wanted.isdisjoint({*main_copies(part), *part.get_parameters()}))


def main_copies(part: Any) -> dict[Tensor, Tensor]:
    """Return the float32 copy of each 16-bit parameter as a dict, which may be empty."""
    pairs = zip(getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()),
                strict=True)
    return {p: copy for ps, copies in pairs for p, copy in zip(ps, copies, strict=True)}


def follow_parameters(part: Any, changed: Mapping[Tensor, Tensor],
                      copies: Mapping[Tensor, Tensor]) -> None:
    """Replace old parameters with new parameters in the lists of an optimizer.

    Args:
        part: the optimizer.
        changed: dict that maps each old parameter to its replacement, with Megatron's attributes.
        copies: dict that maps each new parameter to its float32 copy (see `main_copies`).
    """
    before = main_copies(part)
    new = {before[p]: copies[changed[p]] for p in changed if p in before}
    for old, copy in new.items():
        vars(copy).update(vars(old))
    for p in changed.values():
        if p in copies:
            p.main_param = copies[p]  # type: ignore[attr-defined]
    for name in ("float16_groups", "fp32_from_fp32_groups"):
        for group in getattr(part, name, ()):
            group[:] = [changed.get(p, p) for p in group]
    for group in getattr(part, "fp32_from_float16_groups", ()):
        group[:] = [new.get(p, p) for p in group]
    if hasattr(part, "grad_stats_parallel_group"):
        part.grad_stats_parallel_group = ps.get_expert_tensor_model_pipeline_parallel_group()
