"""Support for `--stage-layouts` in Megatron's own training loop.

This module sets the arguments for the pipeline stage of each rank and builds the process groups of
all layouts. Checkpoints then store the tensors of each layer separately.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps

from moe_plugin.hosts.megatron.compat.checkpointing import wrap
from moe_plugin.hosts.megatron.compat.names import get_model_config
from moe_plugin.hosts.megatron.compat.settings import replace_training, script_arguments
from moe_plugin.hosts.megatron.passes import bare
from moe_plugin.hosts.megatron.stage_layouts import (
    StageLayouts,
    initialize,
    stages_of,
    unequal_passes,
)

_APART = "non_homogeneous_layers"


def prepared(args: argparse.Namespace) -> StageLayouts | None:
    """Return the pipeline stages that the parsed arguments describe. The arguments for the stage of
    the current rank are set in `args`.

    Raises:
        ValueError: see `stages_of`.
    """
    # arguments from a file (--yaml-cfg) do not include our arguments
    stages = stages_of(args, args.world_size) if getattr(args, "stage_layouts", None) else None
    if stages is None:
        return None
    vars(args).update(vars(stages.arguments(args, stages.stage_of(args.rank))))
    # all stages use the same padded vocabulary, so every stage must be able to split it evenly
    args.make_vocab_size_divisible_by = math.lcm(
        args.make_vocab_size_divisible_by, *(layout.tp for layout in stages.layouts)
    ) // args.tensor_model_parallel_size
    # Megatron saves random states by tensor-parallel rank, which does not work with different
    # layouts: a resumed run starts again from the seed
    args.no_save_rng = args.no_load_rng = True
    args.dist_ckpt_optim_fully_reshardable = True
    return stages


def passes_of(stages: StageLayouts, chunks: list[Any], optimizer: Any) -> Callable[..., Any]:
    """Return the function that runs the forward and backward passes of a step. See
    `unequal_passes`. This is a collective operation.
    """
    unequal = unequal_passes(stages, argparse.Namespace(**script_arguments()),
                             get_model_config(chunks[0]), optimizer)
    # Megatron's model-parallel group, in which ranks agree whether to make a step, would differ
    # between stages
    ps._MODEL_PARALLEL_GROUP = dist.group.WORLD
    for groups in (getattr(bare(chunk), "pg_collection", None) for chunk in chunks):
        if groups is not None:
            groups.mp = dist.group.WORLD
    return unequal


def follow(stages: Callable[[], StageLayouts | None]) -> None:
    """Until the process ends, make Megatron use the process groups of the stages and a matching
    checkpoint format.

    stages: function that returns the stages of the run, or None if all stages have the same layout.
        `stages` is called after the script has parsed its arguments.
    """
    make = ps.initialize_model_parallel
    signature = inspect.signature(make)

    @functools.wraps(make)
    def groups(*args: Any, **kwargs: Any) -> None:
        layouts, given = stages(), signature.bind(*args, **kwargs).arguments
        if layouts is None:
            make(**given)
        else:
            initialize(layouts, lambda **sizes: make(**{**given, **sizes}))

    def loaded(load: Callable[..., Any], given: dict[str, Any]) -> Any:
        if stages() is not None and not (
                dist_checkpointing.load_content_metadata(given["checkpoint_dir"]) or {}
        ).get(_APART):
            # the checkpoint stores all layers in one tensor, from which these stages request
            # parts of different sizes
            given = {**given, "validate_access_integrity": False}
        return load(**given)

    ps.initialize_model_parallel = groups
    wrap("load", loaded)
    replace_training("_build_sharded_state_dict_metadata", lambda build: functools.wraps(build)(
        lambda *args, **kwargs: {**build(*args, **kwargs),
                                 **({} if stages() is None else {_APART: True})}))
