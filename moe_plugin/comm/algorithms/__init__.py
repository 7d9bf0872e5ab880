"""A registry of named all-to-all algorithms. Each algorithm is an `Exchange` that returns the same
tensor as `Comm.all_to_all`.
"""

from importlib import import_module
from pkgutil import iter_modules

from moe_plugin.comm.exchange import algorithms

for module in iter_modules(__path__, f"{__name__}."):
    import_module(module.name)  # importing a module registers its algorithms

__all__ = ["algorithms"]
