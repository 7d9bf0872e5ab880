"""How `--user-dir` finds this package, whoever imported it first."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any


def own_user_dir() -> None:
    """Import the `models` of a user dir even if the package was imported before.

    fairseq <= 0.12.3 imports them only if it was not.

    With this, `--user-dir moe_plugin` and a path to the installed package both work, in spawned
    processes and in programs that already imported the package. A path to another copy is refused.
    """
    from fairseq import utils
    from fairseq.models import import_models

    original = utils.import_user_module

    def import_user_module(args: Any) -> None:
        given = getattr(args, "user_dir", None)
        if given is None or os.path.basename(os.path.abspath(given)) != "moe_plugin":
            return original(args)
        home = _checked_home(given)
        original(argparse.Namespace(user_dir=home))
        import_models(os.path.join(home, "models"), "moe_plugin.models")

    utils.import_user_module = import_user_module


def _checked_home(given: str) -> str:
    import moe_plugin

    home = os.path.dirname(os.path.abspath(moe_plugin.__file__))
    if os.path.exists(given) and os.path.realpath(given) != os.path.realpath(home):
        raise ValueError(
            f"--user-dir {given!r} is another copy of moe_plugin than the installed one at "
            f"{home!r}; "
            "use --user-dir moe_plugin, or install that copy with pip install -e")
    return home


def user_dir_before_defaults() -> None:
    """Import the user dir before model defaults are filled in.

    `fairseq-hydra-train` (<= 0.12.3) fills them in before it imports the user dir that brings the
    models.
    """
    from fairseq import utils
    from fairseq.dataclass import initialize

    original = initialize.add_defaults

    def add_defaults(cfg: Any) -> None:
        common = cfg.get("common")
        if common is not None and common.get("user_dir"):
            utils.import_user_module(argparse.Namespace(user_dir=common.user_dir))
        original(cfg)

    initialize.add_defaults = add_defaults
    train = sys.modules.get("fairseq_cli.train")
    if train is not None:
        train.add_defaults = add_defaults


SHIMS: tuple[Callable[[], None], ...] = (own_user_dir, user_dir_before_defaults)
