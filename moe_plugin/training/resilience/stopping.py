"""A run that its user stops (SIGINT, Ctrl-C) ends in one line of one rank: where it stopped, what
was kept, and how it goes on.

The signal may come twice, from the terminal and from a launcher, and Python may lose the
`KeyboardInterrupt` that it raises, in a destructor for example; or another rank is faster, and this
one meets its broken connection. So whatever ends a run after the signal is taken for it, and loops
ask again in each step (`Stopping.around_step`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch.distributed as dist

from moe_plugin.utils.messages import first_process
from moe_plugin.utils.run_feature import RunFeature, StepInput

STATUS = 128 + signal.SIGINT
_WAIT_S = 2.0  # for the rank that writes: whoever starts ranks may end all when one has ended


class Stopping(RunFeature):
    """What a host tells of its run.

    Attributes: `stopped`: the user asked for the end. `saved`: step of the newest checkpoint that
        is complete; None: there is none.
    """

    def __init__(self) -> None:
        self.stopped, self.saved = False, None  # type: bool, int | None
        self._step: Callable[[], int] | None = None
        self._folder, self._how = "", ""

    def resume(self, step: Callable[[], int], saved: int | None, folder: str | None,
              how: str) -> None:
        """Training begins, or goes on.

        Args:
            step: how many steps are done.
            saved: step of the checkpoint in `folder` that it goes on from; None: none.
            folder: of checkpoints; None: nothing is saved.
            how: what goes on from the folder's newest one, e.g. "the same command".
        """
        self._step, self.saved, self._folder, self._how = step, saved, folder or "", how

    def around_step(self, step: StepInput) -> AbstractContextManager[None]:
        """`KeyboardInterrupt` if the user asked for the end."""
        if self.stopped:
            raise KeyboardInterrupt
        return nullcontext()

    def line(self) -> str:
        """Where it stopped and what was kept."""
        if self._step is None:
            return "stopped"
        at = f"stopped at step {self._step()}"
        if not self._folder:
            return f"{at}; nothing was to be saved"
        if self.saved is None:
            return f"{at}, before the first checkpoint in {self._folder}"
        return f"{at}, last checkpoint {self.saved} in {self._folder}; {self._how} goes on"


RUN = Stopping()


@contextmanager
def stops_in_one_line() -> Iterator[None]:
    """For a whole run in the main thread: see the module. The process ends with `STATUS`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, ended = signal.signal(signal.SIGINT, _stop), signal.getsignal(signal.SIGTERM)
    try:
        yield
    except BaseException:
        if not RUN.stopped:
            raise
        _end()
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, ended)


def _stop(*_: Any) -> None:
    if not RUN.stopped:  # further signals would interrupt the end
        RUN.stopped = True
        # whoever started the ranks ends the others when one has ended: not before the line is said
        signal.signal(signal.SIGTERM, lambda *_: _end())
        raise KeyboardInterrupt


def _end() -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is said once
    first = not dist.get_rank() if dist.is_initialized() else first_process()
    if first:
        sys.stderr.write(f"{RUN.line()}\n")
    else:
        time.sleep(_WAIT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STATUS)  # process groups cannot be ended in order: other ranks may be gone
