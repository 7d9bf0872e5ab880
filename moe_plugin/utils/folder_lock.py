"""Locks that let only one run at a time write to a folder or a log.

A lock is a small file, created with `O_EXCL`: network file systems support that, and often lack
`flock`. The file names the host and the process of the run, and since when it runs. A run that was
killed leaves the file behind. On the same host the next run asks the system whether the process
still exists; on another host it looks at the file's modification time, which a thread of the
running process refreshes.
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
LOCK = "moe_plugin.lock"  # in a folder; the lock of a file has the file's name and `.lock`
FLAG, SETTING = "--take-over-folder", "observe.take_over_folder"
BEAT_S = 5.0
# many beats: a thread cannot run while another one keeps Python's lock, e.g. in a long call of C
GONE_AFTER_S = 60.0
_WATCHED_BEATS = 3
_TRIES = 20
_held: dict[str, FolderLock] = {}


@dataclass(frozen=True)
class Holder:
    """The run that has a lock.

    Attributes:
        host: name of its machine.
        machine: the machine's boot and process table, see `_machine`; empty: not known.
        process: number of the process.
        begun: when the process started, in ticks after the boot: a number that is used again for
            another process comes with another start.
        since: when the lock was taken, UTC.
        job: the launcher's number of the job; empty: none.
        token: a random name of the lock.
    """

    host: str
    machine: str
    process: int
    begun: str
    since: str
    job: str
    token: str


class FolderLock:
    """A lock that this process has, see the module; `release` ends it."""

    def __init__(self, path: Path) -> None:
        self.path, self.holder = path, _myself()
        self._shares, self._ended = 1, threading.Event()

    @property
    def is_mine(self) -> bool:
        """Whether this process took it, not the one from which it was forked."""
        return self.holder.process == os.getpid()

    def acquire(self, what: str, take_over: bool) -> None:
        """Create the file, and begin to refresh it. Raises `ValueError`, see `hold_folder`."""
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
        raise ValueError(f"{what}: {self.path} is taken and given back by other runs all the time; "
                         "start one run at a time there")

    def _created(self) -> bool:
        """Whether the file was not there, and is now ours."""
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
        """Whether the run that created the file has ended."""
        other = seen.holder
        if other is not None and other.machine and (other.host, other.machine) == (
                self.holder.host, self.holder.machine):
            return not _exists(other)
        if _now_in(self.path.parent) - seen.modified > GONE_AFTER_S:
            return True
        if other is None or not other.job or other.job != self.holder.job:
            return False
        # a launcher that starts a job again has ended its processes, perhaps on another host
        time.sleep(_WATCHED_BEATS * BEAT_S)
        return _read(self.path) == seen

    def _remove(self, seen: _Seen) -> None:
        """Remove the file of a run that is gone, unless yet another run has replaced it."""
        aside, now = self.path.with_name(f"{self.path.name}.{self.holder.token}"), _read(self.path)
        if now is None or now.text != seen.text:
            return
        try:
            os.rename(self.path, aside)  # of several runs that want to remove it, one does
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
            except OSError:  # the file system may answer later
                continue
            if seen is None or seen.holder in (None, self.holder):
                continue
            logger.warning("%s", _in_use(f"the folder or log of this run ({self.path})", seen,
                                         self.path) + ". End one of the two runs")
            return

    def share(self) -> FolderLock:
        """The lock, for another user in this process; each calls `release`."""
        self._shares += 1
        return self

    def release(self) -> None:
        """Remove the file, once all who share the lock have released it."""
        self._shares -= 1
        if self._shares <= 0:
            self.end()

    def end(self) -> None:
        """Remove the file, whoever shares the lock."""
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
    """Keep other runs from a folder, until the lock is released or the process ends.

    Args:
        folder: of checkpoints and logs of a run; made where it is missing.
        take_over: also if another run seems to have it.
    Raises:
        ValueError: another run has it; the message names its host and process, and since when. Or
            the folder cannot be written.
    """
    return _hold(make_folder(folder) / LOCK, f"folder {os.fspath(folder)}", take_over)


def hold_saved(folder: str | os.PathLike[str]) -> FolderLock | None:
    """Keep other runs from a folder that every save replaces, so that no lock can be inside; see
    `hold_log`.
    """
    make_folder(Path(folder).parent)
    return hold_log(folder, what="folder")


def hold_log(path: str | os.PathLike[str], take_over: bool = False,
             what: str = "log") -> FolderLock | None:
    """Keep other runs from a log, see `hold_folder`. None: this process has the log's folder."""
    path = Path(path)
    folder = _held.get(os.path.realpath(path.parent / LOCK))
    if folder is not None and folder.is_mine:
        return None
    return _hold(path.with_name(path.name + ".lock"), f"{what} {path}", take_over)


@atexit.register
def release_all() -> None:
    """Release every lock of this process."""
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
    """What is in a lock's file, and when it was refreshed. holder: None where it is not whole."""

    text: str
    modified: float
    holder: Holder | None


def _read(path: Path) -> _Seen | None:
    """None: the file is gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            # of the open file: network file systems ask the server when a file is opened
            modified, text = os.fstat(stream.fileno()).st_mtime, stream.read(10_000)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text)
        holder = Holder(**{field.name: found[field.name] for field in fields(Holder)})
        return _Seen(text, modified, holder if isinstance(holder.process, int) else None)
    except (ValueError, LookupError, TypeError):  # it is being written, or was cut
        return _Seen(text, modified, None)


def _in_use(what: str, seen: _Seen, path: Path) -> str:
    other = seen.holder
    who = ("it does not say of which process" if other is None else
           f"process {other.process} on host {other.host}, since {other.since}")
    return (f"{what} is in use by another run ({who}). Wait until that run has ended, or use "
            f"another folder. If it is gone, add {FLAG} ({SETTING}: true), or remove {path}")


def _myself() -> Holder:
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if job == "none":
        job = os.environ.get("SLURM_JOB_ID", "")
    _, begun = _stat(os.getpid()) or ("", "")
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Holder(socket.gethostname(), _machine(), os.getpid(), begun, since, job,
                  secrets.token_hex(8))


def _machine() -> str:
    """What processes share that can see each other: the boot and the table of processes, which
    containers have of their own. Empty where the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(process: int) -> tuple[str, str] | None:
    """State and start of a process; None: the system does not tell."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    values = text.rpartition(")")[2].split()
    return values[0], values[19]


def _exists(holder: Holder) -> bool:
    """Whether a process of this machine is still there, and is the same one."""
    try:
        os.kill(holder.process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # of another user
    found = _stat(holder.process)
    return found is None or (found[0] not in "ZX" and found[1] == holder.begun)


def _now_in(folder: Path) -> float:
    """The time by the clock that a folder's file system has, which may be another machine's."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=LOCK) as file:
            file.write(b"0")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError as error:
        refuse_output(folder / LOCK, error)
