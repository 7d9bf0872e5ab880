"""Settings of Megatron and arguments of its training script, versions 0.15 to 0.19. Importing this
imports nothing of Megatron.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def setting(config: Any, name: str, default: Any = None) -> Any:
    """A setting of `TransformerConfig`; `default` in versions that do not have it."""
    return getattr(config, name, default)


def plain_name(value: Any) -> str:
    """Name of a choice, which is text in older versions and an enum in newer ones."""
    return str(getattr(value, "name", value))


def script_arguments() -> dict[str, Any]:
    """Parsed arguments of Megatron's own training script; empty where none runs.

    So it is where only megatron-core is installed.
    """
    state = sys.modules.get("megatron.training.global_vars")
    arguments = getattr(state, "_GLOBAL_ARGS", None)
    return {} if arguments is None else vars(arguments)


def script_config() -> Any:
    """`TransformerConfig` of the arguments of Megatron's own training script."""
    arguments = importlib.import_module("megatron.training.arguments")
    return arguments.core_transformer_config_from_args(argparse.Namespace(**script_arguments()))


def wrap_training(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap(function)` in place of a function that Megatron's `pretrain` calls by name.

    0.15 to 0.19: all of them are functions of `megatron.training.training`.
    """
    module = importlib.import_module("megatron.training.training")
    setattr(module, name, wrap(vars(module)[name]))


def extend_parse_args(ours: Callable[[Provider | None], Provider]) -> None:
    """Let Megatron's `parse_args` use `ours(provider)` in place of a script's provider.

    0.15 to 0.19: `pretrain` hands the provider on to `parse_args`, which lives in `arguments` and
    is imported into `initialize`.
    """
    modules = [
        importlib.import_module(f"megatron.training.{name}") for name in ("arguments", "initialize")
    ]
    original = modules[0].parse_args

    def parse_args(extra_args_provider: Provider | None = None, *args: Any,
                   **kwargs: Any) -> argparse.Namespace:
        return original(ours(extra_args_provider), *args, **kwargs)

    for module in modules:
        if vars(module).get("parse_args") is original:
            module.parse_args = parse_args
