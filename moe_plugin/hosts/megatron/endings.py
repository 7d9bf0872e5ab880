"""How a run ends: errors of use in one line, the reason of a rank that failed on all ranks, and a
status that says which.
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

# errors whose message says all
_SAY_ALL = ValueError, FloatingPointError, RowsOverflow, WrongResultError, TierError
WAIT_S = 5.0  # for the first rank: whoever starts ranks ends all when one has ended
_OURS = str(Path(__file__).parents[2])
# where Megatron checks arguments, also against those of a checkpoint
_CHECKS = tuple(str(Path("megatron", *parts)) for parts in (
    ("training", "arguments.py"), ("training", "argument_utils.py"),
    ("training", "checkpointing.py"), ("core", "optimizer_param_scheduler.py"),
    ("core", "model_parallel_config.py"), ("core", "transformer", "transformer_config.py"),
    ("core", "num_microbatches_calculator.py"), ("core", "parallel_state.py")))
# types that Megatron's checks raise for arguments that do not fit
_OF_USE = ValueError, AssertionError, RuntimeError, NotImplementedError, ImportError


def status_of(prog: str, work: Callable[[], object], given: Callable[[], Mapping[str, Any]]) -> int:
    """Do the work of a whole run; the status with which the process ends.

    Errors of use end with a message and status 2, numbers that stay not finite or are wrong on a
    rank, a full disk and the end of another rank, with status 1, on every rank. The first rank that
    has a message says it: others may have none.

    Args:
        prog: begins the message.
        given: the parsed arguments by name, for the names by which the user knows settings.
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
        # without a group nobody can be asked: the error may be this rank's alone
        if not dist.is_initialized() or claim_first_report(text):
            where = "" if rank == "0" else f" (rank {rank})"
            text = printable(as_given(text, given(), NATIVE_ARGUMENTS))
            sys.stderr.write(f"{prog}: error: {text}{where}\n")
            sys.stderr.flush()
        leave()
        status = 2 if isinstance(error, ValueError) or _of_megatrons_checks(error) else 1
    finally:
        # after an error the group stays: its end may wait for ranks that still work, and
        # the process ends without (`end_process`)
        failed = isinstance(sys.exc_info()[1], Exception) or status
        if dist.is_initialized() and not failed:
            dist.destroy_process_group()
    return status


def end_process(main: Callable[[], int]) -> None:
    """Run the whole of a process; after an error it ends at once, without waiting for threads of
    groups whose other ranks still work.
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
    """The message of an error that needs no traceback; None: it needs one. A `ValueError` of a
    user's code does, ours and what Megatron says of arguments do not.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    if _of_megatrons_checks(error):
        checked = (last.line or "").removeprefix("assert ")
        said = short(error, 600) if str(error) else f"must be true: {checked}"
        return f"Megatron refuses these arguments: {said}{_remedy(last, said)}"
    ours = last.filename.startswith(_OURS) or type(error).__module__.startswith("moe_plugin.")
    if isinstance(error, (ValueError, FloatingPointError)) and not ours:
        return None
    return str(error) if isinstance(error, _SAY_ALL) or is_of_another_rank(error) else None


def _of_megatrons_checks(error: Exception) -> bool:
    """Whether Megatron raised the error where it checks arguments and parallel sizes."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, _OF_USE) and last.filename.endswith(_CHECKS)


def _remedy(last: traceback.FrameSummary, said: str) -> str:
    """What to change, where Megatron's message does not say it; empty if it does."""
    if last.name == "_check_and_set":  # compares the checkpoint's schedule with the arguments
        return "; --override-opt_param-scheduler takes those of this run"
    if "scheduler" in last.filename and "decay_steps" in said:
        return ("; the learning rate must decay over more steps than it warms up: use more "
                "--train-iters (or --lr-decay-iters), or fewer --lr-warmup-iters")
    if last.filename.endswith("parallel_state.py") and "divisible" in said:
        return (f"; this run has {os.environ.get('WORLD_SIZE', '1')} ranks, which must be a "
                "multiple of tensor x pipeline x context parallel size and of expert-tensor x "
                "expert x pipeline parallel size: start more ranks, or reduce "
                "--expert-model-parallel-size or another of these sizes")
    return ""
