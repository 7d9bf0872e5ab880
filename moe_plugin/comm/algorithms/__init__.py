"""All-to-all algorithms by name, each an `Exchange` with the result of `Comm.all_to_all`."""

from importlib import import_module
from pkgutil import iter_modules

from moe_plugin.comm.exchange import algorithms

for module in iter_modules(__path__, f"{__name__}."):
    import_module(module.name)  # it registers what it holds

__all__ = ["algorithms"]
