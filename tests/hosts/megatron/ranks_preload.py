"""Imported once by the server that forks Megatron's ranks (tests/preloaded.py)."""

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import warnings

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles small functions: 15 s for the first
warnings.filterwarnings("ignore")


def _preload() -> None:
    from moe_plugin.hosts.megatron.compat import cpu
    from moe_plugin.hosts.megatron.compat.settings import mend_config_warning, training_module

    cpu.enable()
    mend_config_warning()
    with contextlib.suppress(ValueError):  # below 0.17 there is none
        training_module("training")
    import moe_plugin.hosts.megatron as host

    for folder in (host.__name__, f"{host.__name__}.trainer"):
        package = importlib.import_module(folder)
        for module in pkgutil.iter_modules(package.__path__, f"{folder}."):
            importlib.import_module(module.name)
    for name in ("megatron.core.datasets.gpt_dataset", "torch.profiler._cupti_monitor",
                 "megatron.core.dist_checkpointing.strategies.filesystem_async"):
        with contextlib.suppress(ImportError):  # of other versions
            importlib.import_module(name)


if importlib.util.find_spec("megatron") is not None and importlib.util.find_spec(
        "megatron.core") is not None:
    _preload()
