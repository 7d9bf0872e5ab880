"""Shared by all tests."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from moe_plugin.kernels import kernels
from moe_plugin.utils.registry import KINDS

# The same examples in every run, however busy the machine; `HYPOTHESIS_PROFILE=random` looks
# for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None,
                          max_examples=25)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

FAST_MARK = "pytest.mark.fast"
ALL_FAST = re.compile(rf"^pytestmark = .*{re.escape(FAST_MARK)}\b", re.M)
# by mark: the file that lists further tests with it
LISTS = {mark: Path(__file__).with_name(f"{name}.txt")
         for mark, name in (("fast", "fast"), ("slow", "longer"), ("most", "most"))}


def listed(mark: str) -> dict[str, int]:
    """Return the files, tests and cases (`file`, `file::test`, `file::test[case]`) that have a
    mark. A number N behind a test exempts every N-th of its cases.
    """
    lines = LISTS[mark].read_text(encoding="utf-8").splitlines()
    parts = (re.fullmatch(r"(.+?)(?: (\d+))?", line) for line in lines if line[:1] not in ("", "#"))
    return {part[1]: int(part[2] or 0) for part in parts if part}


# A forked rank must not collect what is garbage in the process of the tests: the end of a process
# group joins threads that no fork has, and hangs.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true",
                     help="only tests marked `fast`; other files are not even imported")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        config.option.markexpr = "fast and not slow and not most"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--fast` no file without fast tests is imported: to import all takes every worker 20 s.
    """
    if not config.getoption("--fast") or not collection_path.name.startswith("test_"):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    some = FAST_MARK in collection_path.read_text(encoding="utf-8") or any(
        line.split("::")[0] == path for line in listed("fast"))
    return None if some else True


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lists = {mark: listed(mark) for mark in LISTS}
    cases: Counter[str] = Counter()
    for item in items:
        names = (item.nodeid, item.nodeid.split("[")[0], item.nodeid.split("::")[0])
        for mark, lines in lists.items():
            exempt = next((lines[name] for name in names if name in lines), 1)
            if not exempt or cases[names[1]] % exempt:
                item.add_marker(mark)
        cases[names[1]] += item.get_closest_marker("slow") is None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """A test that selects `experts.compute=grouped` is skipped where torch is too old for it."""
    try:
        return (yield)
    except Exception as error:
        if hasattr(torch.nn.functional, "grouped_mm") or "has no grouped_mm" not in str(error):
            raise
        pytest.skip(str(error).splitlines()[-1])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    """What makes Megatron run on CPU changes every torch call of a process for good, and
    compiled graphs with them: tests do it in processes of their own.
    """
    before = torch._C._len_torch_function_stack()
    yield
    assert torch._C._len_torch_function_stack() == before


@pytest.fixture(autouse=True)
def _loggers_are_as_before() -> Iterator[None]:
    """A test that turns our lines off hides them from all later ones of its process."""
    yield
    off = [name for name in [*logging.root.manager.loggerDict, "moe_plugin.any"]
           if name.split(".")[0] == "moe_plugin"
           and not logging.getLogger(name).isEnabledFor(logging.WARNING)]
    assert not off, f"turned off: {off}"


@pytest.fixture
def own_entries() -> Iterator[None]:
    """What the test registers, adds to a kernel or forgets is undone at its end."""
    with ExitStack() as stack:
        for registry in [*KINDS.values(), *(entry.value for entry in kernels)]:
            stack.enter_context(registry.temporary())
        yield


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """apex is installed and a CUDA device is there, as far as anybody can see: its stand-in
    computes on CPU. The names of the functions that are called.
    """
    from moe_plugin.training.gradients import fused

    folder = str(Path(__file__).with_name("fake_apex"))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(fused, "APEX_DEVICES", ("cpu",))
    fused.imported.cache_clear()
    import amp_C

    amp_C.calls.clear()
    yield amp_C.calls
    fused.imported.cache_clear()
    for name in list(sys.modules):
        if folder in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def pytest_collection_finish() -> None:
    """What was imported stays: neither garbage collections nor forked ranks need touch it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At its end Python clears modules, and some report what they find alive."""
    gc.unfreeze()
