"""Locks that prevent two runs from writing to the same folder or log at the same time.

A lock is a small file that is created with `O_EXCL`. `O_EXCL` is used because network file systems
support it, whereas many of them do not support `flock`. The lock file contains the host and the
process id of the run, and the time at which the run acquired the lock. If a run is killed, its lock
file remains. The next run on the same host asks the operating system whether the process of the
killed run still exists. A run on a different host checks the modification time of the lock file,
which a thread of a live run updates regularly.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from moe_plugin.utils.regular_files import check_output, make_folder, refuse_output

logger = logging.getLogger(__name__)
LOCK = "moe_plugin.lock"  # name in a folder; the lock of a file is called FILE.lock
FLAG, SETTING = "--take-over-folder", "observe.take_over_folder"
BEAT_S = 5.0
# Many beats, because a thread cannot run while another thread holds Python's global lock, e.g. in a
# long call of C code.
GONE_AFTER_S = 60.0
_WATCHED_BEATS = 3
_TRIES = 20
_held: dict[str, FolderLock] = {}


@dataclass(frozen=True)
class Holder:
    """The run that has acquired a lock.

    Attributes:
        host: name of the machine.
        machine: identifier of the machine's boot and of its process table (see `_machine`).
            `machine` is empty if the identifier is unknown.
        process: process id.
        begun: start time of the process, in clock ticks since the boot. The start time shows
            whether a process id has been reused.
        since: UTC time at which the lock was acquired.
        job: identifier of the job that the launcher started, or an empty string.
        token: random string that identifies the lock.
    """

    host: str
    machine: str
    process: int
    begun: str
    since: str
    job: str
    token: str


class FolderLock:
    """A lock that this process has acquired (see the module docstring). `release` releases the
    lock. `release` ends it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.holder = path, _myself()
        self._shares, self._ended = 1, threading.Event()

    @property
    def is_mine(self) -> bool:
        """True if this process acquired the lock. False in a process that was forked after the lock
        was acquired.
        """
        return self.holder.process == os.getpid()

    def acquire(self, what: str, take_over: bool) -> None:
        """Create the lock file, and start a thread that updates its modification time. Raises a
        `ValueError` if the lock cannot be acquired, as in `hold_folder`.
        """
        for _ in range(_TRIES):
            if self._created():
                threading.Thread(target=self._beat, name="folder-lock", daemon=True).start()
                return
            try:
                seen = _read(check_output(self.path))
            except OSError as error:
                refuse_output(self.path, error)
            if seen is not None:
                if not take_over and not self._is_gone(seen):
                    raise ValueError(_in_use(what, seen, self.path))
                self._remove(seen)
        raise ValueError(f"{what}: other runs repeatedly acquire and release {self.path}; start "
                         "only one run at a time there")

    def _created(self) -> bool:
        """Try to create the lock file. Returns False if the file already exists."""
        try:
            file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        except OSError as error:
            refuse_output(self.path, error)
        try:
            os.write(file, json.dumps(asdict(self.holder)).encode())
        except OSError as error:
            self.path.unlink(missing_ok=True)
            refuse_output(self.path, error)
        finally:
            os.close(file)
        return True

    def _is_gone(self, seen: _Seen) -> bool:
        """Return whether the run that created the lock file has ended."""
        other = seen.holder
        if other is not None and other.machine and (other.host, other.machine) == (
                self.holder.host, self.holder.machine):
            return not _exists(other)
        if _now_in(self.path.parent) - seen.modified > GONE_AFTER_S:
            return True
        if other is None or not other.job or other.job != self.holder.job:
            return False
        # A launcher that restarts a job has ended the previous processes, perhaps on another host.
        # If they have ended, the file is no longer updated.
        time.sleep(_WATCHED_BEATS * BEAT_S)
        return _read(self.path) == seen

    def _remove(self, seen: _Seen) -> None:
        """Remove the lock file of a run that has ended, unless another run has replaced the file in
        the meantime.
        """
        aside, now = self.path.with_name(f"{self.path.name}.{self.holder.token}"), _read(self.path)
        if now is None or now.text != seen.text:
            return
        try:
            os.rename(self.path, aside)  # if several runs try to remove it, only one succeeds
        except FileNotFoundError:
            return
        moved = _read(aside)
        if moved is not None and moved.text != seen.text:
            os.rename(aside, self.path)
        else:
            aside.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                seen = _read(self.path)
                if seen is not None and seen.holder == self.holder:
                    os.utime(self.path)
            except OSError:  # the file system may respond again later
                continue
            if seen is None or seen.holder in (None, self.holder):
                continue
            logger.warning("%s", _in_use(f"the folder or log of this run ({self.path})", seen,
                                         self.path) + ". End one of the two runs")
            return

    def share(self) -> FolderLock:
        """Return this lock for another user in the same process. Each user must call `release`."""
        self._shares += 1
        return self

    def release(self) -> None:
        """Release the lock for one of its users. The lock file is removed when all users have
        released the lock.
        """
        self._shares -= 1
        if self._shares <= 0:
            self.end()

    def end(self) -> None:
        """Remove the lock file, even if some users have not released the lock."""
        self._ended.set()
        if not self.is_mine or _held.get(os.path.realpath(self.path)) is not self:
            return
        del _held[os.path.realpath(self.path)]
        try:
            seen = _read(self.path)
            if seen is not None and seen.holder == self.holder:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            logger.debug("%s stays: %s", self.path, error)


def hold_folder(folder: str | os.PathLike[str], take_over: bool = False) -> FolderLock:
    """Prevent other runs from using a folder until the lock is released or this process ends.

    Args:
        folder: folder in which a run stores checkpoints and logs. Created if missing.
        take_over: whether to acquire the lock even if another run seems to have it.
    Raises:
        ValueError: If another run has acquired the lock, or if the folder is not writable. The
            message contains the host, the process id and the start time of the other run.
    """
    return _hold(make_folder(folder) / LOCK, f"folder {os.fspath(folder)}", take_over)


def hold_saved(folder: str | os.PathLike[str]) -> FolderLock | None:
    """Prevent other runs from using a folder that every save replaces (see `hold_log`).

    The lock file is created next to the folder, because a save would replace a lock file inside the
    folder.
    """
    make_folder(Path(folder).parent)
    return hold_log(folder, what="folder")


def hold_log(path: str | os.PathLike[str], take_over: bool = False,
             what: str = "log") -> FolderLock | None:
    """Prevent other runs from writing to a log (see `hold_folder`).

    Returns: The lock, or None if this process has already locked the folder of the log.
    """
    path = Path(path)
    folder = _held.get(os.path.realpath(path.parent / LOCK))
    if folder is not None and folder.is_mine:
        return None
    return _hold(path.with_name(path.name + ".lock"), f"{what} {path}", take_over)


@atexit.register
def release_all() -> None:
    """Release all locks that this process has acquired."""
    for lock in list(_held.values()):
        lock.end()


def _hold(path: Path, what: str, take_over: bool) -> FolderLock:
    name = os.path.realpath(path)
    lock = _held.get(name)
    if lock is not None and lock.is_mine:
        return lock.share()
    lock = FolderLock(path)
    lock.acquire(what, take_over)
    _held[name] = lock
    return lock


@dataclass(frozen=True)
class _Seen:
    """The data read from a lock file.

    Attributes:
        text: text of the lock file.
        modified: modification time of the lock file, in seconds since 1970.
        holder: the run that created the lock file, or None if the file is incomplete.
    """

    text: str
    modified: float
    holder: Holder | None


def _read(path: Path) -> _Seen | None:
    """Read a lock file. Returns None if the file does not exist."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            # fstat of the open file, because network file systems refresh attributes on open
            modified, text = os.fstat(stream.fileno()).st_mtime, stream.read(10_000)
    except FileNotFoundError:
        return None
    try:
        values = json.loads(text)
        holder = Holder(**{field.name: values[field.name] for field in fields(Holder)})
        return _Seen(text, modified, holder if isinstance(holder.process, int) else None)
    except (ValueError, LookupError, TypeError):  # the file is incomplete
        return _Seen(text, modified, None)


def _in_use(what: str, seen: _Seen, path: Path) -> str:
    other = seen.holder
    who = ("the lock file does not name its process" if other is None else
           f"process {other.process} on host {other.host}, since {other.since}")
    return (f"{what} is in use by another run ({who}). Wait until that run has ended, or use "
            f"another folder. If it has ended, add {FLAG} ({SETTING}: true) or remove {path}")


def _myself() -> Holder:
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if job == "none":
        job = os.environ.get("SLURM_JOB_ID", "")
    _, begun = _stat(os.getpid()) or ("", "")
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Holder(socket.gethostname(), _machine(), os.getpid(), begun, since, job,
                  secrets.token_hex(8))


def _machine() -> str:
    """Return an identifier of the boot and the process table, which is the same for processes that
    can see each other.

    Containers have separate process tables. Returns an empty string if the operating system does
    not provide this information.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(process: int) -> tuple[str, str] | None:
    """Return the state and the start time of a process, or None if the operating system does not
    provide them.
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    values = text.rpartition(")")[2].split()
    return values[0], values[19]


def _exists(holder: Holder) -> bool:
    """Return whether the process of a run on this machine still exists and is not a different
    process with the same id.
    """
    try:
        os.kill(holder.process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # the process belongs to another user
    status = _stat(holder.process)
    return status is None or (status[0] not in "ZX" and status[1] == holder.begun)


def _now_in(folder: Path) -> float:
    """Return the current time according to the clock of a folder's file system, which may be the
    clock of another machine.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=LOCK) as file:
            file.write(b"0")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError as error:
        refuse_output(folder / LOCK, error)
