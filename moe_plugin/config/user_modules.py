"""Import user modules, which may register routers, losses, dispatchers and experts."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys

from moe_plugin.utils.messages import short


def import_user_modules(names: str | None) -> None:
    """Import each module (a dotted name, or a path of a `.py` file) of a comma-separated list once.

    Raises: ValueError: If importing a module raises any exception, which the message contains.
    """
    for name in (part.strip() for part in (names or "").split(",")):
        if not name:
            continue
        try:
            _import_file(name) if name.endswith(".py") else importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            raise ValueError(
                f"imports={short(name)} cannot be imported: {type(error).__name__}: "
                f"{short(error)}; give a module that Python finds (PYTHONPATH), or the path of a "
                ".py file") from error


def _import_file(path: str) -> None:
    whole = os.path.realpath(path)
    name = f"moe_plugin_user_{hashlib.sha256(whole.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, whole)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
