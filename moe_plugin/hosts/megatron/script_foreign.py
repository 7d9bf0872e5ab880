"""Checkpoints that Megatron's own loop did not write, for it to load: of `moe-plugin reshard`, and
of the training loop that this package had before. Tensors are named as Megatron's; its script's
arguments, random states and the scheduler of learning rates are not there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from moe_plugin.checkpoint.formats.megatron.common import refuse_other_optimizers
from moe_plugin.checkpoint.source import Source
from moe_plugin.hosts.megatron import checkpoint_files as files
from moe_plugin.hosts.megatron.compat.optimizer import checkpoint_metadata
from moe_plugin.hosts.megatron.compat.settings import script_arguments

logger = logging.getLogger("moe_plugin.megatron")
# (the scheduler of the run,) inside `loading`: what reads a file is called by Megatron's code
_scheduler: ContextVar[tuple[Any, ...]] = ContextVar("scheduler", default=())


def optimizer_state(source: Source) -> bool | None:
    """Whether a checkpoint of this kind has optimizer state; None: it is Megatron's own, whole.

    Raises:
        CheckpointError: it has one that only the ranks that wrote it can read.
    """
    kept = source.values.get("megatron") or {}
    common = kept.get("common") or {}
    if not _is_foreign(common):
        # `moe-plugin reshard` took the model alone out of Megatron's own
        return None if "optimizer" in common or kept.get("sharding_type") else False
    refuse_other_optimizers(source)
    return "optimizer" in common


@contextmanager
def loading(path: str, has_optimizer: bool | None, arguments: MutableMapping[str, Any],
            scheduler: Any) -> Iterator[None]:
    """Around Megatron's loading of a checkpoint; has_optimizer: see `optimizer_state`."""
    asked = arguments.get("no_load_optim")
    if has_optimizer is None:
        yield
        return
    outer = _scheduler.set((scheduler,))
    if not has_optimizer and not asked and scheduler is not None:
        logger.info("checkpoint %s has no optimizer state: the optimizer starts from zero", path)
        arguments["no_load_optim"] = True
    try:
        yield
        if arguments.get("no_load_optim") and scheduler is not None and not scheduler.num_steps:
            scheduler.step(increment=arguments["consumed_train_samples"])
    finally:
        arguments["no_load_optim"] = asked
        _scheduler.reset(outer)


def completed(state: Any, path: str) -> Any:
    """What Megatron's loop reads, with what it looks for there."""
    given = _scheduler.get()
    if not isinstance(state, dict) or not _is_foreign(state) or not given:
        return state
    progress, [scheduler] = state["progress"], given
    samples = progress["consumed_samples"]
    # of the run itself, with which Megatron then agrees; without random states
    args = argparse.Namespace(**{
        **script_arguments(), "consumed_train_samples": samples, "skipped_train_samples": 0,
        "consumed_valid_samples": 0, "no_save_rng": True, "world_size": 0})
    schedule = {} if scheduler is None else {**scheduler.state_dict(), "num_steps": samples}
    return {**state, "args": args, "iteration": progress["iteration"], "checkpoint_version": 3.0,
            "opt_param_scheduler": schedule,
            "content_metadata": {**checkpoint_metadata(), **_layers_apart(path)}}


def _is_foreign(common: Mapping[str, Any]) -> bool:
    return "progress" in common and "args" not in common


def _layers_apart(path: str) -> dict[str, bool]:
    with contextlib.suppress(OSError, ValueError, AttributeError), \
            open(os.path.join(path, files.META), encoding="utf-8") as stream:
        if json.load(stream).get("layout", {}).get("stage_layouts"):
            return {"non_homogeneous_layers": True}
    return {}
