"""The folder of `--save-dir`: one run at a time writes there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from moe_plugin.hosts.fairseq.compat.patching import replaces
from moe_plugin.utils.folder_lock import hold_folder, release_all

_SETTINGS: ContextVar[Any] = ContextVar("all settings of the command", default=None)


@replaces("distributed.utils.call_main")
def settings_are_known(original: Callable[..., Any], cfg: Any, main: Callable[..., Any],
                       **kwargs: Any) -> Any:
    """fairseq <= 0.12.3 does not pass its settings to `verify_checkpoint_directory`."""
    return original(cfg, functools.partial(_with_settings, main), **kwargs)


def _with_settings(main: Callable[..., Any], cfg: Any, **kwargs: Any) -> Any:
    _SETTINGS.set(cfg)
    try:
        return main(cfg, **kwargs)
    finally:
        _SETTINGS.set(None)
        release_all()


@replaces("checkpoint_utils.verify_checkpoint_directory")
def folder_of_one_run(original: Callable[..., None], save_dir: str) -> None:
    """fairseq <= 0.12.3 lets several runs write into one folder. It tries whether it can write
    there with a file of one name, so that runs which start together remove each other's.

    The first rank calls it before training, and keeps the folder until the command ends.
    """
    from moe_plugin.checkpoint.formats.fairseq.translate import flag_values
    from moe_plugin.config.flags import run_from_flags

    cfg = _SETTINGS.get()
    if cfg is None:
        hold_folder(save_dir)
    elif cfg.checkpoint.no_save:
        original(save_dir)
    else:
        settings = run_from_flags(flag_values(cfg.model))
        hold_folder(save_dir, settings.observe.take_over_folder)
