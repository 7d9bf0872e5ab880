r"""Run Megatron's own training script with additional arguments from this package.

    torchrun --nproc_per_node 8 -m moe_plugin.hosts.megatron.launch pretrain_gpt.py \
        --spec moe_plugin.hosts.megatron.spec moe_layer --moe-config settings.yaml --num-experts 64
        ...

The launcher does not modify the script. If the name `pretrain_gpt_moe` is given without a path, the
launcher runs the example script with this name in `examples`. This package's arguments are added
through Megatron's `extra_args_provider`, which is meant for arguments of scripts. The layers read
the arguments from the namespace that Megatron parsed. Megatron's arguments can also be written in
the `--moe-config` file (see `file_arguments`). The script runs on the CPU if no GPU is found, or if
`--moe-cpu` precedes the script's name.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import re
import runpy
import socket
import sys
from pathlib import Path

import torch

from moe_plugin.config.flags import add_arguments, setting_specs
from moe_plugin.hosts.megatron import ensemble, replicas
from moe_plugin.hosts.megatron import file_arguments as own_flags
from moe_plugin.hosts.megatron.compat import script_cpu
from moe_plugin.hosts.megatron.compat.cpu import engine_installed
from moe_plugin.hosts.megatron.compat.loaders import refuse_empty_splits
from moe_plugin.hosts.megatron.compat.optimizer import mend_loading_of_all_optimizers
from moe_plugin.hosts.megatron.compat.settings import (
    Provider,
    extend_parse_args,
    keep_compiled_helpers,
    mend_config_warning,
    script_arguments,
)
from moe_plugin.hosts.megatron.endings import end_process, status_of
from moe_plugin.hosts.megatron.file_arguments import file_arguments, reads_file
from moe_plugin.hosts.megatron.script import observe_script
from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS
from moe_plugin.utils.data_workers import report_lost_batches
from moe_plugin.utils.messages import Parser, first_process, removed, short

logger = logging.getLogger("moe_plugin.megatron")
_LIST = re.compile(r"argument --moe-layer-freq: invalid .* '([01](?:, ?[01])+)'")
CPU = "--moe-cpu"
EXAMPLES = Path(__file__).with_name("examples")


def extra_args_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the generated flags to a parser, and make the parser read the `--moe-config` file.

    A flag is left out if Megatron has an equivalent flag. The flags in `own_flags` and the flags of
    ensembles and replicas are also added. A script that calls Megatron's `pretrain` directly can
    pass this function as the argument provider.
    """
    for name, options in (*own_flags.ALL, *ensemble.FLAGS, *replicas.FLAGS):
        parser.add_argument("--" + name, **options)
    add_arguments(parser, NATIVE_ARGUMENTS)
    for action in parser._actions:
        if action.dest == "moe_router_score_function":
            # a user's module may register more names after parsing, see `refuse_unknown_score`
            action.choices, action.metavar = None, "NAME"
    return reads_file(parser)


class ScriptParser(Parser):
    """A parser for training scripts that adds advice to Megatron's error messages."""

    def remedies(self, message: str) -> list[str]:
        """Return advice on how to fix the error that a message describes. See `Parser`."""
        if match := _LIST.match(message):
            return [f"write the list of layers as '[{match[1]}]'"]
        native = _replaced_flags()
        replaced = [f"use {native[flag]} instead of {flag}"
                    for flag in super().unknown() if flag in native]
        return [*replaced, *super().remedies(message)]

    def unknown(self) -> list[str]:
        """Return the unknown flags, without flags for which Megatron has its own argument."""
        native = _replaced_flags()
        return [flag for flag in super().unknown() if flag not in native]


def _replaced_flags() -> dict[str, str]:
    """Return the flags of this package that Megatron's own arguments replace, with these arguments.
    """
    return {spec.flag: NATIVE_ARGUMENTS[spec.path] for spec in setting_specs()
            if NATIVE_ARGUMENTS.get(spec.path, spec.flag) != spec.flag}


def chained(first: Provider | None) -> Provider:
    """Return an argument provider that runs the script's own provider first, and then the provider
    of this package.

    The script's parser is also changed so that it prints short error messages.
    """

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if type(parser) is argparse.ArgumentParser:
            parser.__class__ = ScriptParser  # safe, because its constructor adds no attributes
        return extra_args_provider(first(parser) if first is not None else parser)

    return provide


def main(argv: list[str] | None = None) -> int:
    """Run `launch [--moe-cpu] SCRIPT ARGUMENTS...` and return the exit status of the process."""
    argv = list(sys.argv[1:] if argv is None else argv)
    asked = argv[:1] == [CPU]
    argv = argv[asked:]
    script = _found(argv[0] if argv else "")
    _alone()
    # Megatron adds its own log handlers only if the root logger has none, so these are kept
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("moe_plugin").setLevel(logging.INFO if first_process() else logging.ERROR)
    on_cpu = asked or not torch.cuda.is_available()
    if on_cpu and not asked:
        logger.info("no GPU found: training on CPU")
    return status_of(os.path.basename(script), lambda: run(script, argv[1:], on_cpu),
                     script_arguments)


def _found(name: str) -> str:
    example_paths = {path.stem: str(path) for path in EXAMPLES.glob("[!_]*.py")}
    if said := removed(name):
        raise SystemExit(said)
    if not os.path.isfile(name) and name not in example_paths:
        raise SystemExit(
            f"usage: python -m moe_plugin.hosts.megatron.launch [{CPU}] SCRIPT ARGUMENTS...\n"
            f"Script {short(name)} not found. Pass the path of Megatron-LM's pretrain_gpt.py, or "
            f"the name of a script of this package: {', '.join(sorted(example_paths))}")
    return os.path.abspath(name) if os.path.isfile(name) else example_paths[name]


def _alone() -> None:
    """Without torchrun, set the environment variables for a single process.

    Megatron reads the number of ranks only from these environment variables.
    """
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))


def run(script: str, arguments: list[str], on_cpu: bool) -> None:
    """Run a script in the current process with the given arguments."""
    file_arguments(arguments)  # reports errors in the file before the slow import of Megatron
    sys.argv = [script, *arguments]
    # The script imports modules from its own folder. A source checkout also contains Megatron
    # there: the path must be set before Megatron is imported, so that megatron.core and
    # megatron.training come from the same source tree.
    sys.path.insert(0, os.path.dirname(script))
    if on_cpu:
        script_cpu.enable()
        extend_parse_args(functools.partial(script_cpu.with_defaults, script_cpu.DEFAULTS),
                          script_cpu.leave_out)
    elif not engine_installed():
        extend_parse_args(functools.partial(script_cpu.with_defaults, script_cpu.WITHOUT_ENGINE))
    keep_compiled_helpers()
    mend_config_warning()
    extend_parse_args(chained)
    mend_loading_of_all_optimizers()
    refuse_empty_splits()
    report_lost_batches()
    # imported late: these modules import Megatron, which may be located next to the script
    from moe_plugin.hosts.megatron import restricted
    from moe_plugin.hosts.megatron.compat.checkpointing import wrap
    from moe_plugin.hosts.megatron.compat.writers import saves_whose_writers_end
    from moe_plugin.hosts.megatron.script_checkpoint import readable_loads, whole_saves
    from moe_plugin.hosts.megatron.state import load_without_missing

    restricted.restrict_loads()
    wrap("save", saves_whose_writers_end)
    wrap("save", whole_saves)
    wrap("load", load_without_missing)
    wrap("load", readable_loads)
    wrap("load_common_state_dict", readable_loads)
    with contextlib.closing(observe_script()) as seen:
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            if restricted.refused and not seen.stepped:
                raise restricted.refused[0] from None
            raise


if __name__ == "__main__":
    end_process(main)
