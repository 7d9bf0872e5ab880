"""Finds what lies next to the package in a checkout: `moe_plugin.kernels` and `moe_plugin.configs`,
and the laboratory in `scripts`.

An installed package has the first two inside it, where pyproject.toml maps them when the wheel is
built, and no laboratory.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

FOLDERS = ("kernels", "configs")
ROOT = Path(__file__).resolve().parents[2]  # of a checkout


class CheckoutFinder:
    """A finder for `sys.meta_path`. It is the last one asked and answers for `FOLDERS` alone."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        package, _, folder = name.rpartition(".")
        if package != "moe_plugin" or folder not in FOLDERS:
            return None
        place = self.root / folder
        if (place / "__init__.py").is_file():
            return spec_from_file_location(name, place / "__init__.py",
                                           submodule_search_locations=[str(place)])
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec


def install(package: Path) -> None:
    """Add the finder where `package`, the folder of `moe_plugin`, does not hold `FOLDERS`."""
    installed = any(isinstance(finder, CheckoutFinder) for finder in sys.meta_path)
    if not installed and not (package / FOLDERS[0]).is_dir():
        sys.meta_path.append(CheckoutFinder(package.parent))  # type: ignore[arg-type]


def laboratory(module: str) -> ModuleType:
    """A module of the laboratory, which measures, emulates and audits.

    Args:
        module: below `scripts`, such as `bench.studies`.
    Raises: ValueError: this package is installed without a checkout.
    """
    if not (ROOT / "scripts" / "bench" / "__init__.py").is_file():
        raise ValueError("this needs the repository, which an installed package leaves out; run "
                         "`git clone URL moe-plugin && pip install -e moe-plugin`")
    sys.path.insert(0, str(ROOT))  # before a package of that name, of the folder it is started in
    try:
        importlib.import_module("scripts")
    finally:
        del sys.path[0]
    if str(ROOT) not in sys.path:  # for its processes; at the end, where it hides nothing
        sys.path.append(str(ROOT))
    return importlib.import_module(f"scripts.{module}")
