"""Handle a run that the user stops (SIGINT, Ctrl-C).

Only one rank prints a message. The message is a single line that states the step, the last
checkpoint, and how to resume. The process may receive the signal twice: from the terminal and from
a launcher. Python may also drop the `KeyboardInterrupt` that it raises, for example in a
destructor. If another rank terminates first, this rank may detect a broken connection before it
receives the signal. Any error that terminates a run after the signal is therefore treated as a stop
by the user. In addition, loops check in each step whether the signal was received
(`Stopping.around_step`).
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
_WAIT_S = 2.0  # gives the first rank time to print: a launcher may end all ranks when one has ended


class Stopping(RunFeature):
    """The state of a run that is needed to report the step at which the run stopped.

    Attributes:
        stopped: whether the user has requested to stop the run.
        saved: step of the newest complete checkpoint, or None if there is none.
    """

    def __init__(self) -> None:
        self.stopped, self.saved = False, None  # type: bool, int | None
        self._step: Callable[[], int] | None = None
        self._folder, self._how = "", ""

    def resume(self, step: Callable[[], int], saved: int | None, folder: str | None,
              how: str) -> None:
        """Record that training starts or resumes.

        Args:
            step: function that returns the number of completed steps.
            saved: step of the checkpoint from which the run resumes, or None if the run does not
                resume.
            folder: folder of the checkpoints, or None if the run saves no checkpoints.
            how: instruction for resuming from the newest checkpoint in `folder`, such as "the same
                command".
        """
        self._step, self.saved, self._folder, self._how = step, saved, folder or "", how

    def around_step(self, step: StepInput) -> AbstractContextManager[None]:
        """Raise a `KeyboardInterrupt` if the user has requested to stop the run."""
        if self.stopped:
            raise KeyboardInterrupt
        return nullcontext()

    def line(self) -> str:
        """Return a line that states at which step the run stopped and the last saved checkpoint."""
        if self._step is None:
            return "stopped"
        at = f"stopped at step {self._step()}"
        if not self._folder:
            return f"{at}; no checkpoints were requested"
        if self.saved is None:
            return f"{at}, before the first checkpoint in {self._folder}"
        return f"{at}, last checkpoint {self.saved} in {self._folder}; {self._how} resumes the run"


RUN = Stopping()


@contextmanager
def stops_in_one_line() -> Iterator[None]:
    """Context manager that handles SIGINT in the main thread during a whole run; see the docstring
    of this module. After SIGINT, the process terminates with exit status `STATUS`.
    """
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
    if not RUN.stopped:  # further signals would interrupt the shutdown
        RUN.stopped = True
        # A launcher ends all ranks with SIGTERM when one has ended; print the line before ending.
        signal.signal(signal.SIGTERM, lambda *_: _end())
        raise KeyboardInterrupt


def _end() -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # print the line only once
    first = not dist.get_rank() if dist.is_initialized() else first_process()
    if first:
        sys.stderr.write(f"{RUN.line()}\n")
    else:
        time.sleep(_WAIT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STATUS)  # a regular shutdown of process groups could hang if other ranks are gone
