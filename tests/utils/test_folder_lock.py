"""Locks of folders and logs, without other processes; with them: tests/faults/test_folders.py."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_plugin.observe.sinks import JsonlSink
from moe_plugin.training.resilience.swarm.trainer import Swarm
from moe_plugin.utils import folder_lock
from moe_plugin.utils.folder_lock import (
    GONE_AFTER_S,
    LOCK,
    hold_folder,
    hold_log,
    hold_saved,
    release_all,
)

pytestmark = pytest.mark.fast


def left(folder: Path, host: str | None = None, age_s: float = 0.0, **values: object) -> Path:
    """The lock that a run left in a folder. host: another one's name. values: of the holder."""
    lock = hold_folder(folder)
    text = json.loads(lock.path.read_text())
    lock.release()
    lock.path.write_text(json.dumps({**text, **({"host": host} if host else {}), **values}))
    modified = lock.path.stat().st_mtime - age_s
    os.utime(lock.path, (modified, modified))
    return lock.path


def holder(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())


def until(true: Callable[[], bool]) -> None:
    ticks = threading.Event()
    while not true():
        ticks.wait(0.005)


def test_a_folder_is_kept_until_it_is_released(tmp_path: Path) -> None:
    lock = hold_folder(tmp_path / "run")
    assert holder(lock.path)["process"] == os.getpid()
    assert holder(lock.path)["host"] == socket.gethostname()
    again = hold_folder(tmp_path / "run")  # the same run
    lock.release()
    assert lock.path.exists()
    again.release()
    assert not list((tmp_path / "run").iterdir())


def test_the_end_of_the_process_releases_all(tmp_path: Path) -> None:
    hold_folder(tmp_path / "run")
    hold_folder(tmp_path / "run")
    hold_log(tmp_path / "log.jsonl")
    release_all()
    assert not list((tmp_path / "run").iterdir()) and not (tmp_path / "log.jsonl.lock").exists()


def test_a_live_process_of_this_host_keeps_it(tmp_path: Path) -> None:
    path = left(tmp_path, since="2026-01-02 03:04:05 UTC", age_s=10 * GONE_AFTER_S)
    with pytest.raises(ValueError, match=(
            rf"folder {tmp_path} is in use by another run \(process {os.getpid()} on host "
            rf"{socket.gethostname()}, since 2026-01-02 03:04:05 UTC\).*--take-over-folder .*"
            rf"remove {path}")):
        hold_folder(tmp_path)


def test_a_process_that_is_gone_keeps_nothing(tmp_path: Path) -> None:
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    for values in ({"process": most + 1}, {"begun": "1"}):  # the number is another process's now
        path = left(tmp_path, **values)
        lock = hold_folder(tmp_path)
        assert holder(path)["token"] == lock.holder.token
        lock.release()


@pytest.mark.parametrize("values", [
    {}, {"machine": ""}, {"process": "no number"}, {"machine": "another boot"}])
def test_another_host_keeps_it_while_it_is_refreshed(values: dict[str, object],
                                                     tmp_path: Path) -> None:
    values = {"begun": "1", **values}  # of a process that is not here
    host = None if "machine" in values else "elsewhere"
    path = left(tmp_path, host, GONE_AFTER_S / 2, **values)
    with pytest.raises(ValueError, match="is in use by another run"):
        hold_folder(tmp_path)
    modified = path.stat().st_mtime - GONE_AFTER_S
    os.utime(path, (modified, modified))
    hold_folder(tmp_path).release()


def test_this_host_by_a_name_that_another_host_has(tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "first")
    left(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "second")
    with pytest.raises(ValueError, match="on host first"):
        hold_folder(tmp_path)


def test_another_run_is_overruled(tmp_path: Path) -> None:
    path = left(tmp_path, "elsewhere")
    lock = hold_folder(tmp_path, take_over=True)
    assert holder(path)["token"] == lock.holder.token
    lock.release()
    assert not path.exists()


def test_a_file_that_was_cut_counts_as_long_as_it_is_new(tmp_path: Path) -> None:
    path = tmp_path / LOCK
    path.touch()
    with pytest.raises(ValueError, match="does not name its process"):
        hold_folder(tmp_path)
    os.utime(path, (1, 1))
    hold_folder(tmp_path).release()


@pytest.mark.parametrize("refreshed", [False, True])
def test_a_launcher_goes_on_on_another_host(refreshed: bool, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Only once the first host's process is silent: another job may have the same name."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    path = left(tmp_path, "elsewhere")
    monkeypatch.setattr(folder_lock.time, "sleep",
                        lambda seconds: os.utime(path, (9, 9)) if refreshed else None)
    if refreshed:
        with pytest.raises(ValueError, match="elsewhere"):
            hold_folder(tmp_path)
    else:
        hold_folder(tmp_path).release()


def test_the_file_is_refreshed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.001)
    lock = hold_folder(tmp_path)
    os.utime(lock.path, (1, 1))
    until(lambda: lock.path.stat().st_mtime > 1)
    lock.release()


def test_a_run_that_is_overruled_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.001)
    lock = hold_folder(tmp_path)
    other = {**holder(lock.path), "host": "elsewhere", "token": "another"}
    lock.path.write_text(json.dumps(other))
    until(lambda: "End one of the two runs" in caplog.text)
    lock.release()
    assert holder(lock.path) == other


def test_a_forked_process_does_not_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = hold_folder(tmp_path)
    with monkeypatch.context() as context:
        context.setattr(os, "getpid", lambda: -1)
        release_all()
    assert lock.path.exists()
    lock.release()


def test_a_log_of_another_run(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.jsonl"
    sink = JsonlSink(str(path), take_over=False)
    lock = path.with_name("log.jsonl.lock")
    kept = {**holder(lock), "host": "elsewhere"}
    sink.close()
    assert not lock.exists()
    lock.write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=rf"observe.jsonl.*log {path} is in use.*elsewhere"):
        JsonlSink(str(path), take_over=False)
    JsonlSink(str(path), take_over=True).close()
    assert not lock.exists()


def test_a_log_in_a_folder_of_this_run_has_no_lock_of_its_own(tmp_path: Path) -> None:
    lock = hold_folder(tmp_path)
    assert hold_log(tmp_path / "log.jsonl") is None
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    lock.release()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/run cannot be written .*choose another folder"):
        hold_folder(tmp_path / "file" / "run")
    (tmp_path / LOCK).mkdir()
    with pytest.raises(ValueError, match=f"{LOCK} cannot be written .*folder"):
        hold_folder(tmp_path)


def test_a_swarm_keeps_the_folder_that_it_saved_to(tmp_path: Path) -> None:
    swarm = Swarm(1, timeout_s=0.5)
    swarm.stages = 0  # no peer is asked
    try:
        swarm.save(tmp_path / "saved")
        swarm.save(tmp_path / "saved")
        assert holder(tmp_path / "saved.lock")["process"] == os.getpid()
    finally:
        swarm.stages = 1
        swarm.close()
    assert not (tmp_path / "saved.lock").exists()
    (tmp_path / "saved.lock").write_text(left(tmp_path, host="elsewhere").read_text())
    other = Swarm(1, timeout_s=0.5)
    other.stages = 0
    with pytest.raises(ValueError, match="saved is in use by another run .* on host elsewhere"):
        other.save(tmp_path / "saved")
    other.stages = 1
    other.close()


def test_a_folder_that_each_save_replaces_has_its_lock_beside_it(tmp_path: Path) -> None:
    lock = hold_saved(tmp_path / "new" / "saved")
    assert lock is not None and lock.path == tmp_path / "new" / "saved.lock"
    lock.release()
    held = hold_folder(tmp_path / "new")  # of the whole run
    assert hold_saved(tmp_path / "new" / "saved") is None
    held.release()
