"""A module seen through another one: some names replaced, the rest as it is."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class Overlay(ModuleType):
    """Stands for `module` inside one other module's namespace.

    A name replaced in it is replaced there alone.
    """

    def __init__(self, module: Any, **names: Any) -> None:
        super().__init__(getattr(module, "__name__", type(module).__name__))
        self.__dict__["_module"] = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)
