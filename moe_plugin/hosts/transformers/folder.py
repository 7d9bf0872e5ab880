"""A `Trainer` callback that prevents two runs from using the same `output_dir` at the same time."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from moe_plugin.comm.host_collectives import refused_together
from moe_plugin.hosts.transformers.compat import TrainerCallback
from moe_plugin.utils.folder_lock import FolderLock, hold_folder


class FolderOfOneRun(TrainerCallback):
    """A callback that lets only one training run at a time use `output_dir`.

    See `moe_plugin.utils.folder_lock`.

    Args:
        take_over: True to use the folder even if another run seems to be using it.
    """

    def __init__(self, take_over: bool = False) -> None:
        self._take_over = take_over
        self._lock: FolderLock | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Lock the folder.

        Raises:
            ValueError: On all ranks, if another run is using the folder.
        """
        several = dist.is_available() and dist.is_initialized()
        with refused_together("the folder of the run") if several else nullcontext():
            if state.is_world_process_zero:
                self._lock = hold_folder(args.output_dir, self._take_over)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Release the folder. After a failure, the folder is released when the process exits."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
