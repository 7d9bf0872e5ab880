"""Each host as the tests of this folder use it: to train, resume, evaluate and read records."""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import free_port
from tests.hosts import kills
from tests.preloaded import ROOT, Finished, Server

Attack = Callable[[], Any]


@dataclass(frozen=True)
class Ran:
    """What a run left.

    code: its exit status. log: what all ranks printed. rows: the host's records of the steps that
    it trained, in which `step` is the number of a step, `loss` its loss and `norm` that of its
    gradient. late: ranks that did not end in time after another one had failed.
    """

    code: int
    log: str
    rows: list[dict[str, Any]]
    late: Sequence[int] = ()

    @property
    def numbers(self) -> list[int]:
        """The number of each step."""
        return [row["step"] for row in self.rows]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [row["loss"] for row in self.rows]

    def ok(self) -> Ran:
        """This run, which must have succeeded."""
        assert self.code == 0, self.log[-6000:]
        return self

    def failed_with(self, *texts: str) -> None:
        """Check that the run failed, and that its log has these texts."""
        assert self.code != 0, "the run succeeded:\n" + self.log[-3000:]
        for text in texts:
            assert text in self.log, f"{text!r} is not in:\n{self.log[-6000:]}"


def in_rank(attack: Attack | None, kind: type[Host], words: Sequence[str]) -> None:
    """A rank of a run: what an attack changes, then the host's command."""
    if attack is not None:
        attack()
    kind.main(words)


class Host(ABC):
    """A host. data: what it trains with.

    Attributes:
        server: forks its ranks. near: how far equal values of two runs may be from each other, for
            `pytest.approx`; near_16: the same where weights have 16 bits. compared: names of the
            values that are equal where losses are. layers: names of the MoE layers in records.
        adam, sgd, bf16, dropout, recompute, deterministic: words for these. twice: words with
            which one rank trains what two ranks train together.
        plain: words for a wrapper that adds up gradients as votes do. ep_flag: the setting of the
            ranks that share experts. streams: words for weights that stream. counts_together:
            whether peers count the same steps. warning: a word of the warnings of the host's
            packages.
    """

    name: str
    server: Server
    near: dict[str, float]
    near_16: dict[str, float]
    compared: tuple[str, ...]
    layers: tuple[str, ...]
    adam: str
    sgd: str
    bf16: str
    dropout: str
    recompute: str
    deterministic: str
    twice: str
    plain: str
    ep_flag: str
    streams: str
    counts_together: bool
    warning: str

    def __init__(self, data: Any) -> None:
        self.data = data

    @staticmethod
    @abstractmethod
    def main(words: Sequence[str]) -> None:
        """Run a command of the host in this process."""

    @staticmethod
    @abstractmethod
    def around_steps(begin: Callable[[torch.nn.Module], None], jump: int = 0) -> None:
        """Call `begin` with the model before each training step of this process. jump: the number
        at which the run goes on after its first step, together with `jumps`.
        """

    @staticmethod
    @abstractmethod
    def attack_votes() -> None:
        """Send other gradients than this rank has computed."""

    @abstractmethod
    def program(self, words: Sequence[str]) -> list[str]:
        """The same command for torchrun."""

    def torchrun(self, words: Sequence[str], ranks: int = 2) -> list[str]:
        """The same command as a user starts it on these ranks."""
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                str(ranks), *self.program(words)]

    @staticmethod
    @abstractmethod
    def shows(step: int) -> str:
        """What the log has when this step is done."""

    @staticmethod
    @abstractmethod
    def shown(log: str) -> list[int]:
        """The steps that a log has."""

    @staticmethod
    @abstractmethod
    def finished(home: Path, step: int, steps: int) -> str:
        """What a run says that has no further step."""

    @staticmethod
    @abstractmethod
    def weights(home: Path) -> list[Path]:
        """All files of checkpoints."""

    @abstractmethod
    def words(self, home: Path, steps: int, more: str, ep: int, save: int, load: Path | None,
              validate: int) -> list[str]:
        """The command of `train`."""

    @abstractmethod
    def evaluate(self, home: Path, more: str = "", ranks: int = 2) -> Ran:
        """Evaluate the newest checkpoint of a run, whose rows are the numbers of each rank that
        logs them. more: settings that differ from those of the training.
        """

    @abstractmethod
    def rows(self, home: Path, log: str) -> list[dict[str, Any]]:
        """The records of all steps of a run, also of those before it was resumed."""

    @staticmethod
    @abstractmethod
    def tokens(row: Mapping[str, Any]) -> int:
        """The tokens of the step of a record."""

    @abstractmethod
    def checkpoint(self, home: Path, step: int) -> Path:
        """The checkpoint of a step, for `load`."""

    @abstractmethod
    def files(self, home: Path, step: int) -> list[Path]:
        """The files of one rank with the weights of a step."""

    @staticmethod
    @abstractmethod
    def streamed(home: Path) -> dict[int, Path]:
        """The checkpoints of a run whose weights stream, by step."""

    @staticmethod
    @abstractmethod
    def digest(path: Path) -> str:
        """A digest of the parameters of such a checkpoint."""

    @abstractmethod
    def saved(self, home: Path, log: str) -> int:
        """The step of the newest checkpoint of a run; 0 without one."""

    def environment(self) -> dict[str, str]:
        """Variables of a run, with a port of its own."""
        path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**kills.environment(), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()), "PYTHONPATH": path}

    def train(self, home: Path, steps: int, more: str = "", *, ranks: int = 2, ep: int = 0,
              save: int = 0, load: Path | None = None, validate: int = 0,
              attack: Attack | None = None) -> Ran:
        """Train, or go on with the run in this folder.

        Args:
            steps: the last one. more: words of the command. ep: ranks that share the experts, by
                default all. save: the interval of checkpoints; 0: none is written.
            load: the checkpoint where the run begins. validate: the interval of validations.
            attack: called in each rank before the host's command.
        """
        home.mkdir(parents=True, exist_ok=True)
        before = len(self.rows(home, ""))
        words = self.words(home, steps, more, ep or ranks, save, load, validate)
        done = self.run(home, words, ranks, attack)
        return Ran(done.code, done.log, self.rows(home, done.log)[before:], done.late)

    def run(self, cwd: Path, words: Sequence[str], ranks: int, attack: Attack | None = None
            ) -> Finished:
        """A command of the host on these ranks."""
        return self.server.run(ranks, in_rank, attack, type(self), words, cwd=cwd,
                               environment=self.environment())

    def job(self, home: Path, out: Path, steps: int, more: str) -> kills.Job:
        """The same run as a job whose ranks are killed; it writes to `out`."""
        words = self.words(home, steps, more, kills.RANKS, kills.SAVE_EVERY, None, 0)
        unfinished = ("*.tmp", "*.new", "iter_*.part")

        def log() -> str:
            return out.read_text() if out.exists() else ""

        return kills.Job(self.program(words), home, out,
                         lambda: [(row["step"], row["loss"]) for row in self.rows(home, log())],
                         lambda: self.saved(home, log()), unfinished)

    def same(self, found: Ran, wanted: Ran, near: Mapping[str, float] | None = None,
             names: Sequence[str] = ()) -> None:
        """Check that every step of a run has the values of that step in another one: by default
        all that are `compared`.
        """
        steps = {row["step"]: row for row in wanted.ok().rows}
        assert found.ok().rows
        for row in found.rows:
            for name in names or self.compared:
                assert row[name] == pytest.approx(steps[row["step"]][name],
                                                  **(near or self.near)), (name, row["step"])

    def tensors(self, home: Path) -> dict[str, torch.Tensor]:
        """The parameters and buffers of the newest checkpoint of all ranks."""
        import moe_plugin.checkpoint.formats.all  # noqa: F401 - registers them
        from moe_plugin.checkpoint.formats.base import open_source
        from moe_plugin.checkpoint.source import MODEL

        unfilled = "_float_tensor"  # a buffer that fairseq saves and never fills
        with open_source(home) as source:
            return {name: source.read((field, name)) for field, name in source.entries
                    if field == MODEL and not name.endswith(unfilled)}


def records(path: Path) -> list[dict[str, Any]]:
    """Lines of a file of statistics, which each pipeline stage has."""
    return [json.loads(line) for file in sorted(path.parent.glob(f"{path.name}*"))
            for line in file.read_text().splitlines()]


def flip_one_bit(path: Path) -> None:
    """In the middle, where the weights are."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
