"""Checkpoints of `Trainer` for models whose experts this package computes.

`Trainer` refuses to save the optimizer of a model that `from_pretrained(distributed_config=...)`
has distributed, and it cannot load weights into such a model. On a single rank, it does not load
experts whose names in files differ from the names of the model's parameters (transformers issue
48805). The functions below replace methods of `Trainer`, and receive the original method.

A checkpoint is the folder that `Trainer` usually writes. If the model is distributed, the folder
`optimizer` replaces the file `optimizer.pt`. Torch's distributed checkpoint (DCP) writes this
folder, in which each rank stores its own part of the optimizer state. A run with another number of
ranks, or with other sizes of the mesh, can therefore read it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers.distributed.checkpoint import (
    load_optimizer_distributed,
    save_optimizer_distributed,
)

from moe_plugin.hosts.plain.adapters.trainer import FAILURES, Method, together, written
from moe_plugin.utils.messages import short

_OPTIMIZER, _SCHEDULER = "optimizer", "scheduler.pt"


def save_weights(original: Method, self: Any, output_dir: str | None = None,
                 state_dict: Any = None) -> None:
    """`Trainer._save`, which raises a `ValueError` on all ranks if the first rank cannot write.

    The weights are gathered before the first rank writes. If this rank fails, the other ranks do
    not wait for it in a collective of `save_pretrained`.
    """
    if not self.is_distributed_loading_by_transformers:
        return original(self, output_dir, state_dict)
    model, writes = self.model, self.args.should_save
    whole = model.gather_sharded_state_dict_for_save(
        model, model.state_dict(), model.config.distributed_config, save_on_this_rank=writes)
    model.gather_sharded_state_dict_for_save = lambda *args, **kwargs: whole
    model.barrier_after_gathered_checkpoint_save = lambda distributed_config: None
    try:
        with written(Path(output_dir or self.args.output_dir)):
            if writes:
                original(self, output_dir, state_dict)
    finally:
        del model.gather_sharded_state_dict_for_save, model.barrier_after_gathered_checkpoint_save


def save_optimizer(original: Method, self: Any, output_dir: str) -> None:
    """`Trainer._save_optimizer_and_scheduler`, with the optimizer states of all ranks."""
    if not self.is_distributed_loading_by_transformers:
        return original(self, output_dir)
    save_optimizer_distributed(self.model, self.optimizer.optimizer,
                               os.path.join(output_dir, _OPTIMIZER))
    if self.args.should_save:
        torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))


def load_optimizer(original: Method, self: Any, checkpoint: str | None) -> None:
    """`Trainer._load_optimizer_and_scheduler`, with any number of ranks.

    Raises:
        ValueError: On all ranks, if the checkpoint contains no optimizer state, or the state of
            another optimizer.
    """
    if checkpoint is None or not self.is_distributed_loading_by_transformers and not os.path.isdir(
            os.path.join(checkpoint, _OPTIMIZER)):
        return original(self, checkpoint)
    remedy = ("resume from another checkpoint, or start a new run from its weights with "
              "from_pretrained and without resume_from_checkpoint")
    missing = [name for name in (_OPTIMIZER, _SCHEDULER)
               if not os.path.exists(os.path.join(checkpoint, name))]
    optimizer = self.optimizer.optimizer
    with together("the checkpoint's optimizer"):
        if missing:
            raise ValueError(f"{checkpoint} contains no {' and no '.join(missing)}, but a run over "
                             "several ranks resumes only with both. save_only_model=True does not "
                             f"write them, and one rank writes optimizer.pt; {remedy}")
    with together("the checkpoint's optimizer"):
        try:
            load_optimizer_distributed(self.model, optimizer, f"{checkpoint}/{_OPTIMIZER}")
        except (*FAILURES, KeyError, ValueError) as error:
            raise ValueError(
                f"the optimizer state in {checkpoint} does not fit the optimizer "
                f"{type(optimizer).__name__} and the model ({short(error, 300)}). Use those of the "
                f"run that wrote it, or {remedy}") from error
    state = torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True)
    self.lr_scheduler.load_state_dict(_regrouped(state, self.optimizer.param_groups))


def _regrouped(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a schedule's state for the parameter groups of this run, whose number depends on the
    mesh. The learning rates are those that the optimizer's state has for the groups.
    """
    saved = len(state["_last_lr"])
    rates = {"base_lrs": "initial_lr", "_last_lr": "lr"}
    return {name: value if not isinstance(value, list) or len(value) != saved
            else [group[rates[name]] for group in groups] if name in rates
            else value[:1] * len(groups) for name, value in state.items()}


def load_model(original: Method, self: Any, checkpoint: str, model: Any = None) -> None:
    """`Trainer._load_from_checkpoint`, for distributed models and all families. See `_fill`."""
    _fill(self.model, checkpoint)


def load_best(original: Method, self: Any) -> None:
    """`Trainer._load_best_model`, for distributed models and all families. See `_fill`."""
    _fill(self.model, self.state.best_model_checkpoint)


@torch.no_grad()
def _fill(model: Any, checkpoint: str) -> None:
    """Copy the weights of a checkpoint into a model, which keeps its parameters.

    `from_pretrained` reads the files, because it knows how the names of a family's files differ
    from the names of its parameters. If the model is distributed, each rank reads only its own
    part. Until this function returns, a rank stores its part of the weights twice.

    Raises:
        ValueError: On all ranks, if names or shapes differ from those of the model.
    """
    with together(f"the weights of {checkpoint}"):
        read, report = type(model).from_pretrained(
            checkpoint, dtype=model.dtype, output_loading_info=True,
            distributed_config=getattr(model.config, "distributed_config", None))
        own, new = model.state_dict(), read.state_dict()
        saved = {name: tuple(value.shape) for name, value in new.items()
                 if name not in report["missing_keys"]}
        wanted = {name: tuple(value.shape) for name, value in own.items()}
        if saved != wanted:
            first = min(name for name in {*saved, *wanted} if saved.get(name) != wanted.get(name))
            raise ValueError(
                f"{checkpoint} does not fit {type(model).__name__.removeprefix('FSDP')}: {first} "
                f"has the shape {saved.get(first)} in the checkpoint and must have "
                f"{wanted.get(first)}; resume with the model that the run was started with, or "
                "choose another output_dir for a new run")
    for name, value in own.items():
        value.copy_(new[name])
