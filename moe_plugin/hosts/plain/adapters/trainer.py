"""Methods of `transformers.Trainer` that write and read checkpoints.

`add_lora` replaces them, so that `Trainer` and its subclasses, such as those of TRL, resume runs
whose checkpoints contain only adapters, and write each checkpoint completely or not at all. The
original methods are called for all other models, and with DeepSpeed and the FSDP of accelerate.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from moe_plugin.comm.host_collectives import refused_together
from moe_plugin.hosts.plain.adapters.files import TENSORS
from moe_plugin.hosts.plain.adapters.load import restore_adapter
from moe_plugin.hosts.plain.restored import ADAPTERS
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import move_into_place, write_remedy

Method = Callable[..., Any]
FAILURES = (OSError, RuntimeError, CheckpointException)
_STATE = "trainer_state.json"
_UNFINISHED = "unfinished"  # folder in `output_dir` to which a checkpoint is written at first


def extend_trainer() -> None:
    """Replace methods of `Trainer`. Later calls, and calls without accelerate, have no effect."""
    import transformers

    if not transformers.utils.is_accelerate_available():
        return
    trainer: Any = transformers.Trainer
    methods: dict[str, Method] = {
        "_save_checkpoint": save_checkpoint, "_load_best_model": load_best,
        "_load_from_checkpoint": load_from_checkpoint}
    for name, ours in methods.items():
        if not hasattr(getattr(trainer, name), "_moe_plugin_adapters"):
            setattr(trainer, name, around(getattr(trainer, name), ours, _has_adapters))
            getattr(trainer, name)._moe_plugin_adapters = True


def around(original: Method, ours: Method, applies: Callable[[Any], bool]) -> Method:
    """Return a method that calls `ours` if `applies` returns True, and `original` otherwise."""
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not applies(self):
            return original(self, *args, **kwargs)
        return ours(original, self, *args, **kwargs)

    method._moe_plugin_original = original  # type: ignore[attr-defined]
    return method


def _has_adapters(trainer: Any) -> bool:
    return (any(name.endswith(ADAPTERS) for name, _ in trainer.model.named_parameters())
            and not trainer.is_fsdp_enabled and not trainer.is_deepspeed_enabled)


def load_from_checkpoint(original: Method, self: Any, checkpoint: str, model: Any = None) -> None:
    """`Trainer._load_from_checkpoint`, also for files of `save_adapter`."""
    if os.path.isfile(os.path.join(checkpoint, TENSORS)):
        return restore_adapter(self.model, checkpoint)
    original(self, checkpoint, model)


def load_best(original: Method, self: Any) -> None:
    """`Trainer._load_best_model`, also for files of `save_adapter`."""
    if os.path.isfile(os.path.join(self.state.best_model_checkpoint, TENSORS)):
        return restore_adapter(self.model, self.state.best_model_checkpoint)
    original(self)


def save_checkpoint(original: Method, self: Any, model: Any, trial: Any) -> None:
    """`Trainer._save_checkpoint`, which writes to a temporary folder. The folder gets its final
    name only when all ranks have written their files, so a killed run leaves no partial checkpoint.

    Raises:
        ValueError: On all ranks, if one of the ranks cannot write its files.
    """
    folder = Path(self._get_output_dir(trial=trial))
    name = f"checkpoint-{self.state.global_step}"
    scratch, target = folder / _UNFINISHED, folder / name
    with written(scratch):
        if self.args.should_save:
            shutil.rmtree(scratch, ignore_errors=True)
    pushes, self.args.push_to_hub = self.args.push_to_hub, False
    self._get_output_dir = lambda trial: str(scratch)
    failure: BaseException | None = None
    try:
        original(self, model, trial)
    except FAILURES as error:
        if not self.is_distributed_loading_by_transformers:
            raise
        failure = error  # on this rank only; the other ranks wait below
    finally:
        del self._get_output_dir
        self.args.push_to_hub = pushes
    with written(target):
        if failure is not None:
            raise failure
    with written(target):
        _publish(self, scratch / name, target)
    if pushes:
        self._push_from_checkpoint(str(target))


def _publish(trainer: Any, scratch: Path, target: Path) -> None:
    from transformers.trainer_utils import rotate_checkpoints

    state = trainer.state
    if state.best_model_checkpoint == str(scratch):
        state.best_model_checkpoint = str(target)
    if trainer.args.should_save:
        state.save_to_json(str(scratch / _STATE))  # again, with the final name of the folder
        move_into_place(scratch, target)
        scratch.parent.rmdir()
        rotate_checkpoints(str(target.parent), trainer.args.save_total_limit,
                           state.best_model_checkpoint, use_mtime=True)


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """Wait until all ranks have run the block. Raise a `ValueError` on all ranks if one fails."""
    with together(f"the checkpoint {folder}"):
        try:
            yield
        except FAILURES as error:
            raise ValueError(f"the checkpoint {folder} cannot be written ({short(error)}); "
                             f"{write_remedy(error, folder.parent)}") from error


def together(what: str) -> Any:
    return refused_together(what) if dist.is_initialized() else nullcontext()
