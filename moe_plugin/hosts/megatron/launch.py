r"""Run Megatron's own training script with additional arguments from this package.

    torchrun --nproc_per_node 8 -m moe_plugin.hosts.megatron.launch pretrain_gpt.py \
        --spec moe_plugin.hosts.megatron.spec moe_layer --moe-config settings.yaml --num-experts 64
        ...

The launcher does not modify the script. If the name `pretrain_gpt_moe` is given without a path, the
launcher runs the example script with this name in `examples`. This package's arguments are added
through Megatron's `extra_args_provider`, which is meant for arguments of scripts. The layers read
the arguments from the namespace that Megatron parsed. Megatron's arguments can also be written in
the `--moe-config` file (see `file_arguments`). The script runs on the CPU if no GPU is found, or if
`--moe-cpu` precedes the script's name. Usage errors are reported in one line. If a rank fails, all
ranks report the same reason and exit with the same status.
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
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.comm.watchdog import claim_first_report, is_of_another_rank, leave, says_why
from moe_plugin.config.flags import add_arguments, as_given, setting_specs
from moe_plugin.dispatch.rows_limit import RowsOverflow
from moe_plugin.hosts.megatron import ensemble
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
from moe_plugin.hosts.megatron.file_arguments import file_arguments, reads_file
from moe_plugin.hosts.megatron.script import observe_script
from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS
from moe_plugin.memory.tiers import TierError
from moe_plugin.training.resilience.stopping import stops_in_one_line
from moe_plugin.training.resilience.twins import WrongResultError
from moe_plugin.utils.data_workers import report_lost_batches
from moe_plugin.utils.messages import Parser, first_process, printable, removed, short
from moe_plugin.utils.quiet import MEGATRON, hidden

logger = logging.getLogger("moe_plugin.megatron")
_LIST = re.compile(r"argument --moe-layer-freq: invalid .* '([01](?:, ?[01])+)'")
CPU = "--moe-cpu"
EXAMPLES = Path(__file__).with_name("examples")
# errors whose message is complete without a traceback
_SAY_ALL = ValueError, FloatingPointError, RowsOverflow, WrongResultError, TierError
# seconds for which other ranks let the first rank print its message: a launcher ends all ranks
# as soon as one rank has ended
WAIT_S = 5.0
_OURS = str(Path(__file__).parents[2])
# files in which Megatron checks arguments, also against the arguments stored in a checkpoint
_CHECKS = tuple(str(Path("megatron", *parts)) for parts in (
    ("training", "arguments.py"), ("training", "argument_utils.py"),
    ("training", "checkpointing.py"), ("core", "optimizer_param_scheduler.py"),
    ("core", "model_parallel_config.py"), ("core", "transformer", "transformer_config.py"),
    ("core", "num_microbatches_calculator.py"), ("core", "parallel_state.py")))
# types of errors that Megatron's checks raise for invalid arguments
_OF_USE = ValueError, AssertionError, RuntimeError, NotImplementedError, ImportError


def extra_args_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the generated flags to a parser, and make the parser read the `--moe-config` file.

    A flag is left out if Megatron has an equivalent flag. The flags in `own_flags` and the flags of
    ensembles are also added. A script that calls Megatron's `pretrain` directly can pass this
    function as the argument provider.
    """
    for name, options in (*own_flags.ALL, *ensemble.FLAGS):
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
    from moe_plugin.hosts.megatron.compat.checkpointing import saves_whose_writers_end, wrap
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


def status_of(prog: str, work: Callable[[], object], given: Callable[[], Mapping[str, Any]]) -> int:
    """Call the main function of a process and return the exit status of the process.

    After a usage error, the status is 2. The status is 1 on every rank if non-finite values
    persist, a rank computes wrong results, the disk is full, or another rank has exited. The first
    rank that has an error message then prints it in one line, without a traceback.

    Args:
        prog: name of the program, which is printed at the start of the message.
        work: main function to call.
        given: function that returns a dict of the parsed arguments. The message uses these
            arguments to name each setting as the user wrote it.
    """
    status = 0
    try:
        with stops_in_one_line(), hidden(MEGATRON), says_why():
            work()
    except Exception as error:
        text = of_a_script(error)
        if text is None:
            raise
        logging.getLogger().setLevel(logging.ERROR)
        rank = os.environ.get("RANK", "0")
        if not dist.is_initialized() and rank != "0":
            time.sleep(WAIT_S)
        # without a process group the ranks cannot agree on who reports: every rank prints its
        # own error, because the error may have happened on this rank only
        if not dist.is_initialized() or claim_first_report(text):
            where = "" if rank == "0" else f" (rank {rank})"
            text = printable(as_given(text, given(), NATIVE_ARGUMENTS))
            sys.stderr.write(f"{prog}: error: {text}{where}\n")
            sys.stderr.flush()
        leave()
        status = 2 if isinstance(error, ValueError) or _of_megatrons_checks(error) else 1
    finally:
        # after an error the group is not destroyed: that could wait for ranks that still work;
        # `end_process` ends the process without it
        failed = isinstance(sys.exc_info()[1], Exception) or status
        if dist.is_initialized() and not failed:
            dist.destroy_process_group()
    return status


def end_process(main: Callable[[], int]) -> None:
    """Run the main function and exit the process with the status that the function returns.

    After an error, the process exits immediately. The process does not wait for the threads of its
    process groups, because other ranks may still be using these groups.
    """
    try:
        status = main()
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    if status:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def of_a_script(error: Exception) -> str | None:
    """Return the message of an error that is reported without a traceback, or None if the error
    must be reported with a traceback.

    A `ValueError` raised by user code is reported with a traceback. A `ValueError` raised by this
    package is reported without a traceback. Errors raised while Megatron checks its arguments are
    also reported without a traceback.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    if _of_megatrons_checks(error):
        checked = (last.line or "").removeprefix("assert ")
        said = short(error, 600) if str(error) else f"this condition must be true: {checked}"
        return f"Megatron refuses these arguments: {said}{_remedy(last, said)}"
    ours = last.filename.startswith(_OURS) or type(error).__module__.startswith("moe_plugin.")
    if isinstance(error, (ValueError, FloatingPointError)) and not ours:
        return None
    return str(error) if isinstance(error, _SAY_ALL) or is_of_another_rank(error) else None


def _of_megatrons_checks(error: Exception) -> bool:
    """Return True if Megatron raised the error while checking arguments and parallel sizes."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, _OF_USE) and last.filename.endswith(_CHECKS)


def _remedy(last: traceback.FrameSummary, said: str) -> str:
    """Return advice to append to Megatron's error message, or "" if no advice is known."""
    if last.name == "_check_and_set":  # compares the checkpoint's schedule with the arguments
        return "; add --override-opt_param-scheduler to use the values of this run"
    if "scheduler" in last.filename and "decay_steps" in said:
        return ("; the learning rate must decay over more steps than it warms up. Increase "
                "--train-iters (or --lr-decay-iters), or reduce --lr-warmup-iters.")
    if last.filename.endswith("parallel_state.py") and "divisible" in said:
        return (f"; this run has {os.environ.get('WORLD_SIZE', '1')} ranks. The number of ranks "
                "must be a multiple of tensor x pipeline x context parallel size and of "
                "expert-tensor x expert x pipeline parallel size. Start more ranks, or reduce "
                "--expert-model-parallel-size or another of these sizes.")
    return ""


if __name__ == "__main__":
    end_process(main)
