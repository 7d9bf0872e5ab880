"""How a run ends: one-line messages for usage errors, and the exit status.

If a rank fails, all ranks report the same reason and exit with the same status.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_plugin.comm.watchdog import claim_first_report, is_of_another_rank, leave, says_why
from moe_plugin.config.flags import as_given
from moe_plugin.dispatch.rows_limit import RowsOverflow
from moe_plugin.hosts.megatron.translate import NATIVE_ARGUMENTS
from moe_plugin.memory.tiers import TierError
from moe_plugin.training.resilience.stopping import stops_in_one_line
from moe_plugin.training.resilience.twins import WrongResultError
from moe_plugin.utils.messages import printable, short
from moe_plugin.utils.quiet import MEGATRON, hidden

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
