"""The quick start's model, which the checkout's script trains in both hosts."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from types import ModuleType

from moe_plugin.lab.bench.study import ROOT

HOSTS = ("fairseq", "megatron")


@cache
def quickstart() -> ModuleType:
    """The module `scripts/quickstart.py`."""
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "scripts" / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module
