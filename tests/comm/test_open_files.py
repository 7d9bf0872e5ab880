"""A process that may open no more files says what to do."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from moe_plugin.comm import CommError, LocalComm, TorchComm
from moe_plugin.comm.new_group import too_many
from moe_plugin.comm.watchdog import says_why
from tests.distributed import run_gloo

GLOO = RuntimeError("[enforce fail at loop.cc:48] rv != -1. -1 vs -1. pipe: Too many open files")
FULL = OSError(errno.EMFILE, "no more")


@pytest.mark.parametrize("error", [GLOO, FULL])
def test_what_it_says(error: Exception) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert f"may open {soft} files at once (`ulimit -n`" in too_many(error)
    assert "Run `ulimit -n 4096`" in too_many(error)


@pytest.mark.parametrize("error", [RuntimeError("connection reset"), OSError(errno.ENOSPC, "full")])
def test_other_errors(error: Exception) -> None:
    assert too_many(error) == ""
    with pytest.raises(type(error), match=str(error.args[-1])), says_why():
        raise error


def test_a_whole_run_ends_by_a_short_error() -> None:
    with pytest.raises(ValueError, match="ulimit -n 4096") as caught, says_why():
        raise GLOO
    assert caught.value.__cause__ is GLOO


def test_a_collective_names_the_remedy() -> None:
    with (pytest.raises(CommError, match="all_to_all failed: .*Too many open files; .*ulimit"),
          LocalComm().error_context(lambda: "all_to_all")):
        raise GLOO


def _subgroups() -> str:
    comm = TorchComm()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, hard))
    try:
        comm.contiguous_subgroup(1)
    except CommError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return ""


@pytest.mark.distributed
def test_a_group_that_cannot_be_made() -> None:
    assert all("ulimit -n 4096" in said for said in run_gloo(2, _subgroups))
