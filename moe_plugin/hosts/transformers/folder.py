"""A `Trainer` of transformers that keeps other runs from its `output_dir`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from moe_plugin.comm.host_collectives import refused_together
from moe_plugin.hosts.transformers.compat import TrainerCallback
from moe_plugin.utils.folder_lock import FolderLock, hold_folder


class FolderOfOneRun(TrainerCallback):
    """Only one run at a time trains into `output_dir`; see `moe_plugin.utils.folder_lock`.

    Args:
        take_over: also where another run seems to have the folder.
    """

    def __init__(self, take_over: bool = False) -> None:
        self._take_over = take_over
        self._lock: FolderLock | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Raises: ValueError: another run has the folder; on all ranks."""
        several = dist.is_available() and dist.is_initialized()
        with refused_together("the folder of the run") if several else nullcontext():
            if state.is_world_process_zero:
                self._lock = hold_folder(args.output_dir, self._take_over)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Release the folder; a run that fails does so when its process ends."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
