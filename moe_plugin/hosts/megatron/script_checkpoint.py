"""Checkpoints of Megatron's own training loop. A checkpoint folder appears only when the checkpoint
is complete, and the files have checksums.

If the newest checkpoint is damaged, the newest intact checkpoint is loaded instead. This module
handles synchronous checkpoints in the format `torch_dist` that are stored in a file system.
Megatron writes all other checkpoints without any changes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.checkpoint.formats.megatron import torch_dist
from moe_plugin.checkpoint.formats.megatron.common import (
    BACKEND,
    COMMON,
    METADATA,
    refuse_other_optimizers,
)
from moe_plugin.checkpoint.formats.megatron.source import open_checkpoint
from moe_plugin.checkpoint.source import Source
from moe_plugin.comm.host_collectives import collectives_named
from moe_plugin.config import run_config
from moe_plugin.hosts.megatron import checkpoint_files as files
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.optimizer import (
    checkpoint_metadata,
    prepare_optimizer_for_load,
)
from moe_plugin.hosts.megatron.compat.settings import script_arguments
from moe_plugin.hosts.megatron.model_settings import check_settings
from moe_plugin.hosts.megatron.stage_layouts import parse
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.utils.regular_files import move_into_place, write_whole

# "Foreign" checkpoints were not written by Megatron's own loop, but by `moe-plugin reshard` or by
# an earlier training loop of this package. Their tensors have Megatron's names, but they lack the
# script's arguments, the random states and the learning-rate scheduler.
logger = logging.getLogger("moe_plugin.megatron")
# (scheduler of the run,) inside `loading`; a context variable, because Megatron's code calls
# `completed`
_scheduler: ContextVar[tuple[Any, ...]] = ContextVar("scheduler", default=())


def optimizer_state(source: Source) -> bool | None:
    """Return whether a checkpoint contains optimizer state. Return None for a complete checkpoint
    of Megatron's own training loop, which needs no preparation (see `loading`).

    Raises:
        CheckpointError: If only the ranks that wrote the optimizer state can read it.
    """
    kept = source.values.get("megatron") or {}
    common = kept.get("common") or {}
    if not _is_foreign(common):
        # `moe-plugin reshard` may have copied only the model from Megatron's checkpoint
        return None if "optimizer" in common or kept.get("sharding_type") else False
    refuse_other_optimizers(source)
    return "optimizer" in common


@contextmanager
def loading(path: str, has_optimizer: bool | None, arguments: MutableMapping[str, Any],
            scheduler: Any) -> Iterator[None]:
    """Prepare Megatron's arguments and scheduler for loading a checkpoint inside the block.

    has_optimizer: see `optimizer_state`.
    """
    asked = arguments.get("no_load_optim")
    if has_optimizer is None:
        yield
        return
    outer = _scheduler.set((scheduler,))
    if not has_optimizer and not asked and scheduler is not None:
        logger.info("checkpoint %s has no optimizer state, so the optimizer starts from zero", path)
        arguments["no_load_optim"] = True
    try:
        yield
        if arguments.get("no_load_optim") and scheduler is not None and not scheduler.num_steps:
            scheduler.step(increment=arguments["consumed_train_samples"])
    finally:
        arguments["no_load_optim"] = asked
        _scheduler.reset(outer)


def completed(state: Any, path: str) -> Any:
    """Add the values that Megatron's training loop expects to a checkpoint of another program."""
    given = _scheduler.get()
    if not isinstance(state, dict) or not _is_foreign(state) or not given:
        return state
    progress, [scheduler] = state["progress"], given
    samples = progress["consumed_samples"]
    # the run's own arguments, so that Megatron finds no differences; without random states
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


_STEP = re.compile(r"iter_(\d{7,})\Z")


def whole_saves(save: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call `dist_checkpointing.save` so that only complete checkpoints have their final name."""
    final = str(given["checkpoint_dir"])
    step = _STEP.search(final)
    if step is None or "://" in final:
        return save(**given)
    if given.get("async_sharded_save"):
        files.together(final, lambda: begin_again(final))
        return save(**given)
    try:
        _save_whole(save, given, final, int(step[1]))
    except CheckpointError:
        files.abandon(final)
        raise


def _save_whole(save: Callable[..., Any], given: dict[str, Any], final: str, step: int) -> None:
    part = files.part_of(final)
    files.together(final, lambda: save(**{**given, "checkpoint_dir": part}))
    sums = files.sums(part)

    def finish() -> None:
        if dist.get_rank() == 0:
            files.write_meta(part, _description(step), sums)
            move_into_place(Path(part), Path(final))

    files.together(final, finish)


def begin_again(final: str) -> None:
    """Before the checkpoint in a folder is overwritten in place, delete the files that describe the
    old checkpoint.

    A folder that contains both old and new files must not look like a complete checkpoint. The file
    `common.pt` is also deleted. Megatron versions that do not write this file would otherwise read
    the old file.
    """
    for name in (files.META, BACKEND, METADATA, COMMON) if dist.get_rank() == 0 else ():
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(final, name))


def _description(step: int) -> dict[str, Any]:
    # the model's settings and sizes are stored in Megatron's own files
    arguments = script_arguments()
    # parsed and printed again, so that sizes of 1 that the command omits are included
    layouts = [str(layout) for layout in parse(arguments.get("stage_layouts") or [])]
    return {"model": {}, "layout": {"stage_layouts": layouts} if layouts else {}, "iteration": step,
            "megatron_core": core.core_version, "finetune": asdict(run_config(
                settings_from_flags(arguments)).finetune),
            "consumed_samples": arguments.get("consumed_train_samples", 0)}


def refuse_broken(chunks: list[Any], optimizer: Any) -> None:
    """Raise an error if a weight is not finite, before a checkpoint is saved. See
    `checkpoint_files.refuse_not_finite`.
    """
    arguments = script_arguments()
    if arguments.get("ckpt_format") == "torch_dist" and not arguments.get("use_megatron_fsdp"):
        files.refuse_not_finite(arguments["save"], chunks, optimizer)


def loads_whole(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's `load_checkpoint` so that the newest intact checkpoint is loaded.

    If the newest checkpoint is damaged, an earlier checkpoint is loaded. If the file that records
    the newest checkpoint is missing, the checkpoint with the highest iteration is loaded.
    """
    signature = inspect.signature(load)

    @functools.wraps(load)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        arguments = script_arguments()
        if (optimizer := given.arguments.get("optimizer")) is not None:
            prepare_optimizer_for_load(optimizer)
        with _newest_whole(arguments, arguments.get(given.arguments["load_arg"]),
                           given.arguments.get("opt_param_scheduler")):
            return load(*args, **kwargs)

    return call


@contextmanager
def _newest_whole(arguments: MutableMapping[str, Any], root: str | None,
                  scheduler: Any) -> Iterator[None]:
    """Inside the block, make Megatron load an intact checkpoint, by setting the argument that
    selects the iteration.

    scheduler: learning rate scheduler, or None if the run only evaluates.
    Raises:
        CheckpointError: On all ranks, if there are checkpoints but none of them is intact.
        ValueError: If there is no checkpoint to evaluate.
    """
    asked = arguments.get("ckpt_step")
    if not root or "://" in root or arguments.get("ckpt_format", "torch_dist") != "torch_dist":
        yield
        return
    newest = asked or latest_iteration(root)
    if newest is None:
        others = any(arguments.get(name) for name in (
            "pretrained_checkpoint", "non_persistent_ckpt_type", "non_persistent_save_interval"))
        if not others and files.gather(files.tracked(root))[0] is None:
            files.nothing_found(root, bool(arguments.get("skip_train")))
        yield
        return
    if asked:
        verified(files.folder(root, asked))
    else:
        arguments["ckpt_step"] = _newest_number(root, newest)
    path = files.folder(root, arguments["ckpt_step"])
    try:
        compared = files.on_first_rank(path, lambda: _compared(path, arguments))
        optimizer_state = None if compared is None else bool(compared)
        with loading(path, optimizer_state, arguments, scheduler):
            yield
    finally:
        arguments["ckpt_step"] = asked


def _compared(path: str, arguments: Mapping[str, Any]) -> bool | None:
    """Check that a checkpoint is safe to load and that its settings match the run (see
    `model_settings.check_settings`). Return the `optimizer_state` of the checkpoint.
    """
    newer, trusted = "layernorm_epsilon", bool(arguments.get("trust_checkpoint"))
    current = {**({"norm_epsilon": arguments[newer]} if newer in arguments else {}), **arguments}
    if not trusted:
        try:
            with files.readable(path):
                torch_dist.check_classes(path)
        except CheckpointError as error:
            raise files.unreadable(path, error) from error
    try:
        source = open_checkpoint(Path(path), trusted)
    except CheckpointError:  # Megatron may be able to read the format
        return None
    with source:
        check_settings(path, source.values["settings"], current)
        return optimizer_state(source)


def readable_loads(load: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call a function that loads a checkpoint, and add the checkpoint and advice to its errors."""
    path = str(given["checkpoint_dir"])
    with files.readable(path), collectives_named("a collective of a checkpoint's loading"):
        return completed(load(**given), path)


def latest_iteration(root: str) -> int | None:
    """Return the newest checkpoint's iteration, or None if Megatron must find it itself.

    The return value is also None if there is no checkpoint. This is a collective operation, so all
    ranks must call this function.
    """
    text = files.gather(files.tracked(root))[0]
    if text:
        return None if text == "release" else files.latest(root)
    left = files.older(root, 10**15)
    if left:
        logger.warning("%s is missing or empty in %s: training resumes from its newest checkpoint",
                       files.LATEST, root)
    if text is None:
        return left[0] if left else None
    # the file is empty because a run was killed while writing it; Megatron cannot read an empty
    # file
    newest = _newest_number(root, left[0]) if left else None
    files.together(root, lambda: _track(root, newest))
    return newest


def _newest_number(root: str, iteration: int) -> int:
    path, _ = files.newest_whole(root, iteration, verified)
    return int(os.path.basename(path).removeprefix("iter_"))


def _track(root: str, newest: int | None) -> None:
    """Write the iteration of the newest checkpoint to the file that records it. If the iteration is
    None, delete this file.

    Only the first rank writes or deletes the file.
    """
    path = os.path.join(root, files.LATEST)
    if dist.get_rank() != 0:
        return
    if newest is None:
        os.remove(path)
    else:
        write_whole(Path(path), str(newest))


def verified(path: str) -> dict[str, Any]:
    """Return the description of a checkpoint after verifying its files. Return an empty dict for a
    checkpoint that Megatron wrote without a description.
    """
    if files.of_megatron_alone(path) or files.of_another_format(path):
        return {}
    return files.verified_meta(path)
