"""Run Megatron's own training script with our arguments beside its own.

    torchrun --nproc_per_node 8 -m moe_plugin.hosts.megatron.launch pretrain_gpt.py \
        --spec moe_plugin.hosts.megatron.spec moe_layer --moe-config settings.yaml --num-experts 64
        ...

The script is run unchanged. Our arguments go in through the seam that Megatron has for a script's
own, `extra_args_provider`; the layer reads them from Megatron's parsed arguments. `--moe-cpu`,
before the script's name, runs it without CUDA.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from moe_plugin.config.flags import add_arguments
from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def extra_args_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds our generated flags, without those that have a native equivalent. For scripts that call
    Megatron's `pretrain` themselves.
    """
    add_arguments(parser, frozenset(NATIVE_ARGUMENTS))
    return parser


def chained(first: Provider | None) -> Provider:
    """Our provider after the script's own."""
    return lambda parser: extra_args_provider(first(parser) if first is not None else parser)


def install() -> None:
    """Make Megatron's `parse_args` add our arguments, whatever provider the script gives it.

    0.15 to 0.19: `pretrain` hands the provider on to `parse_args`, which lives in `arguments` and
    is imported into `initialize`.
    """
    modules = [
        importlib.import_module(f"megatron.training.{name}") for name in ("arguments", "initialize")
    ]
    original = modules[0].parse_args

    def parse_args(extra_args_provider: Provider | None = None, *args: Any,
                   **kwargs: Any) -> argparse.Namespace:
        return original(chained(extra_args_provider), *args, **kwargs)

    for module in modules:
        if getattr(module, "parse_args", None) is original:
            module.parse_args = parse_args


def main(argv: list[str] | None = None) -> None:
    """`launch [--moe-cpu] SCRIPT ARGUMENTS...`"""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["--moe-cpu"]:
        from moe_plugin.hosts.megatron import cpu

        cpu.enable(force=True)
        argv = argv[1:]
    if not argv or not os.path.isfile(argv[0]):
        raise SystemExit(
            f"usage: python -m moe_plugin.hosts.megatron.launch [--moe-cpu] SCRIPT ARGUMENTS...\n"
            f"script {argv[0] if argv else ''!r} not found; give the path of Megatron-LM's "
            "pretrain_gpt.py"
        )
    script = os.path.abspath(argv[0])
    sys.argv = [script, *argv[1:]]
    # its own modules; a source checkout also has megatron.training there
    sys.path.insert(0, os.path.dirname(script))
    install()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
