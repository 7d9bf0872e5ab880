"""Start several fairseq processes without CUDA, either with torchrun or by spawning them.

This module also sets timeouts between processes and defines how processes end.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe_plugin.comm.watchdog import is_of_another_rank, says_why
from moe_plugin.config.flags import as_given
from moe_plugin.hosts.fairseq.compat.patching import replaces
from moe_plugin.training.resilience.stopping import STATUS as STATUS_OF_STOP
from moe_plugin.training.resilience.stopping import stops_in_one_line
from moe_plugin.utils.messages import printable, short

logger = logging.getLogger(__name__)
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


def _has_rank() -> bool:
    return all(name in os.environ for name in _TORCHRUN)


def started_by_torchrun() -> bool:
    """Return True if torchrun has started the current process and at least one other process."""
    return _has_rank() and int(os.environ["WORLD_SIZE"]) > 1


@replaces("distributed.utils.call_main")
def call_main_without_cuda(original: Callable[..., Any], cfg: Any, main: Callable[..., Any],
                           **kwargs: Any) -> Any:
    """Start the configured number of processes on a machine without CUDA.

    fairseq <= 0.12.3 computes the number of processes from the number of CUDA devices, and uses
    NCCL. On CPU, fairseq <= 0.12.3 fails with an assertion error, or it starts no process and
    trains nothing.
    """
    settings = cfg.distributed_training
    if cfg.common.tpu or (torch.cuda.is_available() and not cfg.common.cpu):
        return original(cfg, main, **kwargs)
    if settings.distributed_backend == "nccl":
        settings.distributed_backend = "gloo"
    alone = settings.distributed_world_size <= 1 and settings.distributed_init_method is None
    if _has_rank() or settings.distributed_no_spawn or alone:
        return original(cfg, main, **kwargs)
    return _spawn(cfg, main, kwargs)


@replaces("distributed.utils.distributed_main")
def close_groups_at_the_end(original: Callable[..., None], index: int, main: Callable[..., Any],
                            cfg: Any, kwargs: dict[str, Any]) -> None:
    """Destroy the process groups when `main` ends.

    fairseq <= 0.12.3 never destroys the process groups. If a process exits without destroying its
    groups, the threads of these groups abort the process (observed with gloo in torch 2.13).
    """
    with stops_in_one_line(), errors_of_use_in_one_line(cfg), says_why():
        original(index, main, cfg, kwargs)
    if dist.is_initialized():
        dist.destroy_process_group()


@replaces("distributed.utils.call_main")
def end_errors_of_use(original: Callable[..., Any], cfg: Any, main: Callable[..., Any],
                      **kwargs: Any) -> Any:
    """If settings are invalid, exit with a one-line message and status 2.

    fairseq <= 0.12.3 prints a traceback for every error in `main`. The traceback is logged only
    with `LOGLEVEL=DEBUG`, an environment variable that fairseq reads. For spawned processes,
    `distributed_main` handles errors in the same way.
    """
    with stops_in_one_line(), errors_of_use_in_one_line(cfg):
        _check_common(cfg.common)
        try:
            return original(cfg, main, **kwargs)
        except torch.multiprocessing.ProcessExitedException as error:
            if error.exit_code in (STATUS_OF_USE, STATUS_OF_STOP):
                raise SystemExit(error.exit_code) from None
            raise


STATUS_OF_USE = 2


def _check_common(common: Any) -> None:
    """Create the folder of `--log-file`, and reject settings that need fairseq's submodules."""
    log_file, size = getattr(common, "log_file", None), getattr(common, "model_parallel_size", 1)
    if log_file is not None:
        try:
            Path(log_file).absolute().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"the folder of --log-file {short(log_file)} cannot be created "
                             f"({error.strerror}). Use a file in a folder that you can write to"
                             ) from error
    import fairseq

    submodule = Path(fairseq.__file__).parent / "model_parallel" / "megatron" / "mpu"
    if size > 1 and not submodule.is_dir():
        raise ValueError(
            f"--model-parallel-size {size} needs fairseq's submodule megatron, which no package of "
            "fairseq contains. Use --model-parallel-size 1, or train with Megatron-core and "
            f"--tensor-model-parallel-size {size}")


@contextmanager
def errors_of_use_in_one_line(cfg: Any = None) -> Iterator[None]:
    """If this package raises an error inside the block, exit with a one-line message. See
    `end_errors_of_use`.

    cfg: all settings of fairseq, or None if they are not known yet.
    """
    try:
        yield
    except Exception as error:
        if not is_ours(error) and not is_of_another_rank(error):
            raise
        logger.debug("origin of the error below", exc_info=True)
        many = dist.is_initialized() and dist.get_world_size() > 1
        where = f"rank {dist.get_rank()}: " if many and is_ours(error) else ""
        if dist.is_initialized():
            dist.destroy_process_group()
        from moe_plugin.hosts.fairseq.translate import flag_values

        text = printable(as_given(str(error), flag_values(cfg and cfg.model)))
        sys.stderr.write(f"{os.path.basename(sys.argv[0])}: error: {where}{text}\n")
        raise SystemExit(STATUS_OF_USE if is_ours(error) else 1) from error


def is_ours(error: BaseException | None) -> bool:
    """Return True if an error is a `ValueError` raised by this package."""
    if not isinstance(error, ValueError):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).split(".")[0] == "moe_plugin"


def _spawn(cfg: Any, main: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    settings = cfg.distributed_training
    processes = settings.distributed_num_procs or 1
    if settings.distributed_init_method is None:  # all processes run on this machine
        settings.distributed_init_method = f"tcp://127.0.0.1:{_free_port()}"
        processes = settings.distributed_num_procs = settings.distributed_world_size
    kwargs["start_rank"] = settings.distributed_rank
    settings.distributed_rank = None  # each process computes start_rank + its index
    before = signal.signal(signal.SIGINT, lambda *_: None)  # the child processes end by themselves
    try:
        torch.multiprocessing.spawn(spawned, args=(main, cfg, kwargs), nprocs=processes, join=True)
    finally:
        signal.signal(signal.SIGINT, before)


def spawned(index: int, main: Callable[..., Any], cfg: Any, kwargs: dict[str, Any]) -> None:
    """Run `main` in a spawned process. Only module-level functions can be pickled."""
    from fairseq import utils
    from fairseq.distributed import utils as distributed

    utils.import_user_module(cfg.common)
    distributed.distributed_main(index, main, cfg, kwargs)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shorten_timeouts(timeout_s: float) -> None:
    """Limit the timeout of every process group that fairseq uses.

    All ranks must call this function after the default process group has been initialized.

    fairseq <= 0.12.3 has no setting for timeouts. fairseq passes no timeout when it creates the
    default group with `init_process_group`, and the group for gradients with `new_group`. Both
    groups therefore have torch's default timeout of 30 minutes (10 minutes with NCCL). In torch 2.6
    to 2.13, the timeout of an existing group can be changed only with `_set_pg_timeout`.
    """
    from fairseq.distributed import utils

    wanted = timedelta(seconds=timeout_s)
    for group in (dist.group.WORLD, utils.get_global_group()):
        if isinstance(group, dist.ProcessGroup) and wanted < _timeout(group):
            distributed_c10d._set_pg_timeout(wanted, group)


def _timeout(group: dist.ProcessGroup) -> timedelta:
    device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    return group._get_backend(device).options._timeout
