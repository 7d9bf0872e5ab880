"""Imported once by the server that forks Megatron's ranks (tests/preloaded.py)."""

import argparse
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
    # wheels below 0.17 have no training code, and 0.15 describes its flags in another way
    with contextlib.suppress(ValueError, ImportError):
        training_module("training")
        _remember_flags()
    import moe_plugin.hosts.megatron as host

    for module in pkgutil.iter_modules(host.__path__, f"{host.__name__}."):
        importlib.import_module(module.name)
    for name in ("megatron.core.datasets.gpt_dataset", "torch.profiler._cupti_monitor",
                 "megatron.core.datasets.blended_megatron_dataset_builder",
                 "megatron.core.dist_checkpointing.strategies.filesystem_async",
                 "megatron.core.models.mimo.optimizer", "megatron.core.tokenizers.text.models",
                 "tests.hosts.megatron.layers", "tests.hosts.megatron.training",
                 "tests.hosts.megatron.whole"):
        with contextlib.suppress(ImportError):  # of other versions
            importlib.import_module(name)


def _remember_flags() -> None:
    """What Megatron reads out of the source of its classes for the help of its flags: a second in
    each rank.
    """
    from megatron.training import argument_utils, arguments

    factory = getattr(argument_utils, "ArgumentGroupFactory", None)  # from 0.18 on
    if hasattr(factory, "_get_field_docstrings"):
        read, known = factory._get_field_docstrings, dict[type, dict[str, str]]()

        def remembered(self: object, kind: type) -> dict[str, str]:
            if kind not in known:
                known[kind] = read(self, kind)
            return dict(known[kind])

        factory._get_field_docstrings = remembered
        arguments.add_megatron_arguments(argparse.ArgumentParser())


if importlib.util.find_spec("megatron") is not None and importlib.util.find_spec(
        "megatron.core") is not None:
    _preload()
