"""Caches that another user could have filled: no program from them is run."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_plugin.kernels.cpu.native import build
from moe_plugin.utils import machine, messages
from scripts.emulate.namespaces import build_switch, compiler

pytestmark = pytest.mark.fast
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")


def _open_to_all(folder: Path) -> None:
    folder.chmod(0o777)


def _open_to_the_group(folder: Path) -> None:
    folder.chmod(0o770)


def _of_another_user(folder: Path) -> None:
    os.chown(folder, 12345, 12345)


OPENED = [_open_to_all, _open_to_the_group, pytest.param(_of_another_user, marks=as_root)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home and the temporary folder of a user who has no cache yet."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(machine.atexit, "register", lambda work: None)
    machine.fresh_cache.cache_clear()
    messages.warn_once.cache_clear()
    (tmp_path / "home").mkdir()
    yield tmp_path / "home"
    machine.fresh_cache.cache_clear()
    build.library.cache_clear()


def _private(folder: Path) -> bool:
    found = folder.stat()
    return found.st_uid == os.getuid() and found.st_mode & 0o777 == 0o700


def test_a_new_cache_is_private_whatever_the_umask(home: Path) -> None:
    before = os.umask(0o002)
    try:
        assert machine.user_cache("it is not kept") == home / ".cache" / "moe-plugin"
    finally:
        os.umask(before)
    assert _private(home / ".cache") and _private(home / ".cache" / "moe-plugin")


@pytest.mark.parametrize("opened", OPENED)
def test_a_cache_that_others_can_write_is_not_used(
        opened: Callable[[Path], None], home: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = machine.user_cache("it is not kept")
    opened(folder)
    caplog.set_level(logging.WARNING)
    fresh = machine.user_cache("it is not kept")
    assert fresh != folder and _private(fresh)
    assert f"chmod 700 {folder}" in caplog.text and "not used" in caplog.text
    assert machine.user_cache("it is not kept") == fresh


@pytest.mark.parametrize("opened", OPENED)
def test_without_a_home_the_temporary_folder_of_somebody_else_is_not_used(
        opened: Callable[[Path], None], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".cache").write_text("so that no folder can be created there")
    known = Path(tempfile.gettempdir()) / f"moe-plugin-{os.getuid()}"
    assert machine.user_cache("it is not kept") == known and _private(known)
    opened(known)
    assert machine.user_cache("it is not kept") != known


def test_a_link_in_the_temporary_folder_is_not_followed(home: Path) -> None:
    (home / ".cache").write_text("so that no folder can be created there")
    (home / "elsewhere").mkdir(mode=0o700)
    known = Path(tempfile.gettempdir()) / f"moe-plugin-{os.getuid()}"
    known.symlink_to(home / "elsewhere")
    if os.getuid() == 0:
        os.chown(known, 12345, 12345, follow_symlinks=False)
        assert machine.user_cache("it is not kept") != known


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
def test_a_switch_that_others_may_have_built_is_not_run(home: Path) -> None:
    built = build_switch()
    assert build_switch() == built
    _open_to_all(built.parent)
    assert build_switch() != built and _private(build_switch().parent)


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
def test_functions_that_others_may_have_compiled_are_not_loaded(home: Path) -> None:
    folder = home / ".cache" / "moe-plugin" / "native"
    source = "router.c"
    build.library.cache_clear()
    there = build.why_not(source)
    [built] = folder.glob("*.so") if there is None else [None]
    if built is None:
        pytest.skip(f"not on this machine: {there}")
    built.write_bytes(b"what somebody else has written")
    _open_to_all(folder)
    build.library.cache_clear()
    assert build.why_not(source) is None
    assert built.read_bytes() == b"what somebody else has written"
