"""Changes to `fairseq-hydra-train`. The command finds the bundled settings from any folder, and
reports errors in one line.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from moe_plugin.hosts.fairseq.compat.launch import STATUS_OF_USE, is_ours
from moe_plugin.hosts.fairseq.compat.patching import patch
from moe_plugin.utils.messages import did_you_mean, short, similar_names
from moe_plugin.utils.yaml_file import bundled

_FOLDER = ("--config-dir", "-cd")
_FULL = "HYDRA_FULL_ERROR"


@patch
def hydra_sees_fields() -> None:
    """Register fairseq's dataclasses with Hydra again, with the fields that this package adds.

    fairseq registers its dataclasses when it is imported, before the fields are added.
    """
    from fairseq.dataclass.initialize import hydra_init

    hydra_init()


@patch
def settings_by_hydra() -> None:
    """Report invalid settings in one line. Make `--config-dir configs/fairseq` work in any folder.

    If settings are invalid, fairseq <= 0.12.3 exits with status 1 and prints a message of hydra or
    a traceback. fairseq <= 0.12.3 searches for `configs/fairseq` only in the current folder.
    """
    from fairseq.dataclass import initialize

    original = initialize.hydra_init

    def hydra_init(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        caller = sys._getframe(1).f_globals
        if "hydra_main" in caller:  # the caller is the command, which calls hydra_main next
            sys.argv[1:] = _with_bundled(sys.argv[1:])
            name = str(args[0] if args else "config")
            caller["hydra_main"] = _short(caller["hydra_main"], name)

    initialize.hydra_init = hydra_init


def _with_bundled(words: list[str]) -> list[str]:
    """Replace the path of a settings folder that does not exist with the path of the settings
    folder that is installed with this package.
    """
    replaced = list(words)
    for i, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag in _FOLDER and value:
            replaced[i] = f"{flag}={bundled(value)}"
        elif flag in _FOLDER and i + 1 < len(words):
            replaced[i + 1] = str(bundled(words[i + 1]))
    return replaced


def _check_name(name: str) -> None:
    """Raise a `ValueError` if the settings folder has no file with this name. Without this check,
    fairseq would silently train with its default settings.
    """
    import fairseq
    from hydra._internal.utils import get_args

    here = [get_args().config_dir, os.path.join(os.path.dirname(fairseq.__file__), "config")]
    files = [(folder, file.removesuffix(".yaml")) for folder in here
             if folder and os.path.isdir(folder) for file in sorted(os.listdir(folder))]
    if not any(os.path.exists(os.path.join(folder, f"{name.removesuffix('.yaml')}.yaml"))
               for folder in here if folder):
        known = [file for _, file in files]
        raise ValueError(f"--config-name {short(name)} is not in {', '.join(filter(None, here))}; "
                         f"{did_you_mean(similar_names(name, known))}use the name of a file in "
                         "this folder")


def _short(main: Callable[..., Any], name: str) -> Callable[..., Any]:
    from hydra._internal.utils import run_and_report
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    @functools.wraps(main)
    def hydra_main(*args: Any, **kwargs: Any) -> Any:
        whole = os.environ.get(_FULL) == "1"
        try:
            with _raised():
                _check_name(name)
                return main(*args, **kwargs)
        except Exception as error:
            if whole:
                raise
            caught = error
        if isinstance(caught, (HydraException, OmegaConfBaseException)) or is_ours(caught):
            if os.environ.get("LOCAL_RANK", "0") == "0":
                sys.stderr.write(f"{os.path.basename(sys.argv[0])}: error: {_text(caught)}\n")
            raise SystemExit(STATUS_OF_USE) from None
        # hydra hides its own frames, which it finds only at the beginning of the traceback
        return run_and_report(functools.partial(_raise, caught.with_traceback(_of_job(caught))))

    return hydra_main


@contextmanager
def _raised() -> Iterator[None]:
    """Make hydra raise errors instead of printing them."""
    before = os.environ.get(_FULL)
    os.environ[_FULL] = "1"
    try:
        yield
    finally:
        os.environ.pop(_FULL)
        if before is not None:
            os.environ[_FULL] = before


def _of_job(error: BaseException) -> TracebackType | None:
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_name != "run_job":
        at = at.tb_next
    return at or error.__traceback__


def _raise(error: Exception) -> None:
    raise error


def _text(error: BaseException) -> str:
    text = short(error, 600)
    if error.__cause__ is not None and not is_ours(error):
        text += f": {short(error.__cause__, 600)}"
    return text + _near(text)


def _near(text: str) -> str:
    """Return this package's error message for an MoE setting that hydra does not know."""
    from moe_plugin.config.tree import unread

    match = re.search(r"full_key: moe\.([\w.]+)", text)
    nested: Any = None
    for name in reversed(match[1].split(".") if match else []):
        nested = {name: nested}
    try:
        unread(nested or {})
    except ValueError as error:
        return f"; {error}" if "unknown key" in str(error) else ""
    return ""
