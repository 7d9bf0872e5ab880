"""Imported once by the server that forks Megatron's ranks (tests/preloaded.py)."""

import importlib
import importlib.util
import os
import pkgutil
import warnings

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles small functions: 15 s for the first
warnings.filterwarnings("ignore")


def _preload() -> None:
    from moe_plugin.hosts.megatron.compat import cpu
    from moe_plugin.hosts.megatron.compat.settings import mend_config_warning

    cpu.enable()
    mend_config_warning()
    import moe_plugin.hosts.megatron as host

    for module in pkgutil.iter_modules(host.__path__, f"{host.__name__}."):
        importlib.import_module(module.name)
    importlib.import_module(f"{host.__name__}.trainer.train")

if importlib.util.find_spec("megatron") is not None and importlib.util.find_spec(
        "megatron.core") is not None:
    _preload()
