"""Small training runs of each host on two ranks, in processes forked with everything imported."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.emulate.faults import Fault
from tests.distributed import free_port
from tests.faults.recorded import read
from tests.hosts.fairseq.commands import run_command
from tests.preloaded import Server

RANKS, STEPS, SAVE_EVERY, TIMEOUT_S = 2, 8, 3, 5.0
CHECK_EVERY = 2  # steps, where ranks check each other
JOB_S = 300.0  # a job that takes longer hangs
GRACE_S = 2 * TIMEOUT_S + 4


@dataclass(frozen=True)
class Ran:
    """What a job left.

    losses: by step, of a step that ran twice the last one. fault: when it happened, None if it did
    not; ends: when each rank ended on its own, by rank; seconds: of the whole job.
    """

    code: int
    late: list[int]
    log: str
    losses: dict[int, float]
    fault: float | None
    ends: dict[int, float]
    seconds: float


def with_fault(fault: Fault | None, ends: str, module: str, argv: list[str]) -> None:
    """A rank: the program, in which the fault happens; when it ends on its own is noted."""
    rank = int(os.environ.get("RANK", "0"))  # alone there is none
    faulthandler.dump_traceback_later(JOB_S / 2)  # where a rank hangs
    if fault is not None:
        fault.arm(rank)
    try:
        if module.endswith(".train") and "megatron" in module:
            from tests.hosts.megatron import ranks

            ranks.command(module, argv)
        run_command(module, argv)
    finally:
        with open(ends, "a", encoding="utf-8") as stream:
            stream.write(f"{rank} {time.time()}\n")


def times(path: Path) -> dict[int, float]:
    """Lines "RANK TIME"; the first of each rank."""
    found: dict[int, float] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        rank, when = line.split()
        found.setdefault(int(rank), float(when))
    return found


class Host(ABC):
    """A host. home: folder for data and runs. tolerance: of losses that must be equal. ranks: of a
    run.
    """

    name = module = preload = ""
    tolerance, ranks = 1e-6, RANKS

    def __init__(self, home: Path) -> None:
        self.home, self._server = home, None
        home.mkdir(parents=True, exist_ok=True)
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Set the attributes of the class, and make the data."""

    @abstractmethod
    def arguments(self, folder: Path, steps: int) -> list[str]:
        """Of a run in a folder that is saved and resumed there."""

    @abstractmethod
    def losses(self, folder: Path, log: str) -> dict[int, float]:
        """Loss by step."""

    @abstractmethod
    def saved(self, folder: Path) -> int:
        """The step of the newest complete checkpoint; 0 without one."""

    @property
    def server(self) -> Server:
        """What forks the ranks."""
        if self._server is None:
            self._server = Server(self.preload)
        return self._server

    def train(self, folder: Path, fault: Fault | None = None, steps: int = STEPS,
              more: Sequence[str] = (), job_s: float = JOB_S) -> Ran:
        """Start a run, or go on with the one that is in this folder. more: arguments. job_s: how
        long it may take; collectives are compared only where that is `JOB_S`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        record, ends = folder / "fault", folder / "ends"
        for path in (record, ends):
            path.unlink(missing_ok=True)
        fault = fault and replace(fault, record=str(record))
        begin = time.time()
        done = self.server.run(self.ranks, with_fault, fault, str(ends), self.module,
                               [*self.arguments(folder, steps), *more],
                               environment=self.environment(), cwd=self.home,
                               timeout_s=job_s, grace_s=GRACE_S, compare=job_s <= JOB_S)
        happened = times(record)
        return Ran(done.code, done.late, done.log, self.losses(folder, done.log),
                   min(happened.values()) if happened else None, times(ends),
                   time.time() - begin)

    def environment(self) -> dict[str, str]:
        """Variables of a job, with a port of its own."""
        kept = {name: value for name, value in os.environ.items()
                if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        return {**kept, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


class Plain(Host):
    """scripts/train_plain.py."""

    def prepare(self) -> None:
        root = Path(__file__).resolve().parents[2]
        self.name, self.module = "plain PyTorch", str(root / "scripts" / "train_plain.py")
        self.preload = "tests.faults.preload"

    def arguments(self, folder: Path, steps: int) -> list[str]:
        return [str(folder), "--steps", str(steps), "--save-every", str(SAVE_EVERY),
                "--timeout", str(TIMEOUT_S)]

    def losses(self, folder: Path, log: str) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in read(folder / "log.jsonl")}

    def saved(self, folder: Path) -> int:
        for name in ("checkpoint", "checkpoint.old"):
            with contextlib.suppress(OSError, ValueError):
                return json.loads((folder / name / "index.json").read_text())["extra"]["step"]
        return 0


class Checked(Plain):
    """Ranks that have all experts each, and check each other."""

    def prepare(self) -> None:
        super().prepare()
        self.name, self.ranks = "plain PyTorch, 3 replicas", 3

    def arguments(self, folder: Path, steps: int) -> list[str]:
        return [*super().arguments(folder, steps), "--batch", "9", "--expert-parallel", "1",
                "--check-twins", str(CHECK_EVERY)]


class Fairseq(Host):
    """`fairseq-train`."""

    def prepare(self) -> None:
        from tests.hosts.fairseq import conftest

        self.name, self.module, self.tolerance = "fairseq", "fairseq-train", 1.1e-3  # last digit
        self.preload = "tests.hosts.fairseq.preload"
        self.flags, self.result = (f"{conftest.LANGUAGE_MODEL} {conftest.MOE} {conftest.DROPLESS}",
                                   conftest.Result)
        self._server = conftest.server
        self.corpus = self.home / "lm"
        if not self.corpus.exists():
            conftest.make_corpus(self.home)

    def arguments(self, folder: Path, steps: int) -> list[str]:
        return (f"{self.corpus} {self.flags} --max-update {steps} --save-interval-updates "
                f"{SAVE_EVERY} --keep-interval-updates 2 --no-epoch-checkpoints "
                f"--disable-validation --moe-timeout {TIMEOUT_S} --save-dir {folder}").split()

    def losses(self, folder: Path, log: str) -> dict[int, float]:
        return {int(entry["num_updates"]): entry["loss"]
                for entry in self.result(0, log).steps if "loss" in entry}

    def saved(self, folder: Path) -> int:
        found = [int(match[1]) for path in folder.glob("checkpoint_*_*.pt")
                 if (match := re.search(r"_(\d+)(-rank-0)?\.pt$", path.name))]
        return max(found, default=0)


class Megatron(Host):
    """Our command on Megatron's own loop, with EP 2."""

    def prepare(self) -> None:
        from tests.hosts.megatron import conftest, ranks, training

        self.name, self.module = "Megatron", training.TRAIN
        self.preload, self.flags = "tests.hosts.megatron.ranks_preload", training.MODEL
        self._server = ranks.server
        self.data = str(self.home / "corpus")
        if not Path(f"{self.data}.idx").exists():
            conftest.make_data(self.home)

    def arguments(self, folder: Path, steps: int) -> list[str]:
        # the same rank count: EP 2 with two ranks
        return [*self.flags, "--expert-model-parallel-size", str(RANKS), "--data-path", self.data,
                "--train-iters", str(steps), "--cpu", "--num-workers", "0", "--moe-timeout",
                str(TIMEOUT_S), "--save", str(folder), "--load", str(folder), "--save-interval",
                str(SAVE_EVERY)]

    def losses(self, folder: Path, log: str) -> dict[int, float]:
        return {line["iteration"]: line["lm_loss"] for line in read(folder / "log.jsonl")
                if line.get("lm_loss") is not None}

    def saved(self, folder: Path) -> int:
        path = folder / "latest_checkpointed_iteration.txt"
        return int(path.read_text()) if path.exists() else 0


HOSTS = {"plain": Plain, "checked": Checked, "fairseq": Fairseq, "megatron": Megatron}

# (fault, outcome): of every run of the tests
AT_ONCE = [(Fault("kill", (1,), 5, "exchange"), "resumes"),
           (Fault("disk-full", (0,), 5, "update"), "resumes"),
           (Fault("nan-gradient", (0,), 5), "skips"), (Fault("nan-gradient", (1,), 5), "skips"),
           (Fault("slow", (0,), 5, "exchange", seconds=0.05), "goes on")]
