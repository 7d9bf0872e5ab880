"""Python imports this where the folder is in PYTHONPATH. Replicas of real programs then record
their steps, and are kept from their end, as `tests.faults.recorded` says.

Environment: `RECORDS`: folder of records.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "moe_plugin.training.resilience.elastic"


class _Finder:
    """Finds one module, whose `ElasticReplica` it replaces."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            from tests.faults import recorded  # takes the class as it is

            def replica(lighthouse: str, number: int, *args: Any, **kwargs: Any) -> Any:
                kind = recorded.recorded(Path(os.environ["RECORDS"], str(number)), number,
                                         int(os.environ.get("RANK", "0")))
                return kind(lighthouse, number, *args, **kwargs)

            module.ElasticReplica = replica

        spec.loader.exec_module = loaded
        return spec


if "RECORDS" in os.environ:
    sys.meta_path.insert(0, _Finder())
