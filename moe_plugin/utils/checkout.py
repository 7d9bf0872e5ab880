"""Give access to files of a checkout that are outside the package folder.

These files are `moe_plugin.kernels`, `moe_plugin.configs`, and the benchmark scripts in `scripts`.
An installed package also contains `moe_plugin.kernels` and `moe_plugin.configs`, because
pyproject.toml maps these folders into the wheel. An installed package does not contain the scripts.
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
ROOT = Path(__file__).resolve().parents[2]  # root of the checkout


class CheckoutFinder:
    """An import finder for `sys.meta_path` that finds only the packages listed in `FOLDERS`. The
    finder is used after all other finders.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        package, _, folder = name.rpartition(".")
        if package != "moe_plugin" or folder not in FOLDERS:
            return None
        package_path = self.root / folder
        if (package_path / "__init__.py").is_file():
            return spec_from_file_location(name, package_path / "__init__.py",
                                           submodule_search_locations=[str(package_path)])
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(package_path)]
        return spec


def install(package: Path) -> None:
    """Add a `CheckoutFinder` to `sys.meta_path` if the package folder `package` does not contain
    the packages listed in `FOLDERS`.
    """
    installed = any(isinstance(finder, CheckoutFinder) for finder in sys.meta_path)
    if not installed and not (package / FOLDERS[0]).is_dir():
        sys.meta_path.append(CheckoutFinder(package.parent))  # type: ignore[arg-type]


def laboratory(module: str) -> ModuleType:
    """Import a module from `scripts`, such as a benchmark.

    Args:
        module: name of the module relative to `scripts`, such as `bench.studies`.
    Raises:
        ValueError: If this package was installed without a checkout of the repository.
    """
    if not (ROOT / "scripts" / "bench" / "__init__.py").is_file():
        raise ValueError("this command needs the repository, which is not part of an installed "
                         "package; run `git clone URL moe-plugin && pip install -e moe-plugin`")
    sys.path.insert(0, str(ROOT))  # precedes a `scripts` package in the working directory
    try:
        importlib.import_module("scripts")
    finally:
        del sys.path[0]
    if str(ROOT) not in sys.path:  # for child processes; last, to hide no other module
        sys.path.append(str(ROOT))
    return importlib.import_module(f"scripts.{module}")
