"""What a run on Megatron's own loop shows: our lines, what the script itself prints, errors. What
Megatron and torch print, log and warn of goes to a file: hundreds of lines before the first step.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Mapping
from types import FrameType
from typing import Any, TextIO

from moe_plugin.messages import first_process
from moe_plugin.regular_files import make_folder, refuse_output

logger = logging.getLogger("moe_plugin.megatron")
_LIBRARIES = "megatron", "torch"
_SHOWN = 20  # lines, where Megatron ends before the first step


def log_of_first_rank() -> None:
    """Of our own lines other ranks say errors alone."""
    logging.getLogger("moe_plugin").setLevel(logging.INFO if first_process() else logging.ERROR)


class RunOutput:
    """See the module. Made before Megatron is imported, for the life of the process; what comes
    before `open` is kept until then.

    Only the first and the last rank have a file: Megatron prints on these.
    """

    def __init__(self) -> None:
        self._file: TextIO = io.StringIO()
        self._last = deque[str](maxlen=_SHOWN)
        self._rank = int(os.environ.get("RANK", "0"))
        self._writes = self._rank in (0, int(os.environ.get("WORLD_SIZE", "1")) - 1)
        screen = logging.StreamHandler(sys.stdout)
        screen.setFormatter(logging.Formatter("%(message)s"))
        screen.addFilter(_shown)
        whole = logging.StreamHandler(self)  # type: ignore[type-var]
        whole.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
        # before Megatron, which then adds no handler of its own
        logging.basicConfig(level=logging.INFO, handlers=[screen, whole])
        sys.stdout = _Stdout(sys.stdout, self)  # type: ignore[assignment]
        if not sys.warnoptions:  # else the user asks for them
            self._show, warnings.showwarning = warnings.showwarning, self._warn

    def open(self, args: Mapping[str, Any]) -> None:
        """Open the file: run.log in `--save`, or one of the folder for temporary files."""
        if not self._writes or not isinstance(self._file, io.StringIO):
            return
        kept, folder = self._file.getvalue(), args.get("save")
        suffix = f".rank{self._rank}.log" if self._rank else ".log"
        if folder:
            path = make_folder(folder) / f"run{suffix}"
            try:
                self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                refuse_output(path, error)
        else:
            self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115
                "w", prefix="megatron-", suffix=suffix, delete=False, encoding="utf-8")
        self.write(kept)
        logger.info("Megatron's own lines: %s (--moe-verbose, before the script's name, shows "
                    "them)", self._file.name)

    def write(self, text: str) -> int:
        """Into the file."""
        self._last.extend(text.splitlines())
        if self._writes:
            try:
                self._file.write(text)
                self._file.flush()
            except OSError as error:  # a full disk: the training itself can go on
                self._writes = False
                if sys.__stderr__ is not None:
                    sys.__stderr__.write("Megatron's own lines are no longer written to "
                                         f"{self._file.name}: {error}\n")
        return len(text)

    def show_last(self) -> None:
        """Show the last lines that went to the file alone."""
        lines = [line for line in self._last if line.strip()]
        if lines and sys.__stderr__ is not None:
            sys.__stderr__.write("Megatron ended before the first step; its last lines:\n"
                                 + "".join(f"  {line}\n" for line in lines))
            sys.__stderr__.flush()

    def flush(self) -> None:
        """Every write does."""

    def _warn(self, message: Warning | str, category: type[Warning], filename: str, lineno: int,
              file: TextIO | None = None, line: str | None = None) -> None:
        if file is None and any(f"{os.sep}{name}{os.sep}" in filename for name in _LIBRARIES):
            self.write(warnings.formatwarning(message, category, filename, lineno, line))
        else:
            self._show(message, category, filename, lineno, file, line)


def _shown(record: logging.LogRecord) -> bool:
    name = record.name.split(".")[0]
    if name == "moe_plugin":
        return True
    return record.levelno >= (logging.ERROR if name in _LIBRARIES else logging.WARNING)


class _Stdout:
    """Standard output whose lines go elsewhere where a library prints them."""

    def __init__(self, stream: TextIO, elsewhere: RunOutput) -> None:
        self._stream, self._elsewhere = stream, elsewhere

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        to: Any = self._elsewhere if _printing(sys._getframe(1)) in _LIBRARIES else self._stream
        return int(to.write(text))


def _printing(frame: FrameType | None) -> str:
    """The package whose code prints: `print` itself has no frame, and wandb wraps `write`."""
    name = "wandb"
    while frame is not None and name == "wandb":
        name, frame = str(frame.f_globals.get("__name__", "")).split(".")[0], frame.f_back
    return name
