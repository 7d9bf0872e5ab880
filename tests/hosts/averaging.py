"""Two peers of a host, each a command whose weights stream and are averaged: one is killed, and
comes back.
"""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torchft.coordination import LighthouseServer

from tests.faults.meeting import until

EVERY = 3
Kind = TypeVar("Kind", bound="Peer")


class Peer(ABC):
    """A command, its log and its folder of checkpoints."""

    words: Sequence[str]
    environment: Mapping[str, str]

    def __init__(self, home: Path, number: int) -> None:
        self.folder, self.log = home / str(number), home / f"{number}.log"

    def start(self) -> None:
        self.begun = len(self.steps)
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(self.words, stdout=out, stderr=subprocess.STDOUT,
                                            env=self.environment)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    @property
    @abstractmethod
    def steps(self) -> list[dict[str, Any]]:
        """What it logged of its steps, in all its lives."""

    @property
    @abstractmethod
    def saved(self) -> dict[int, Path]:
        """Checkpoints by step."""

    def averaged_over(self, peers: int, times: int = 2) -> bool:
        """Whether so many averages since it was started were over so many peers, one after the
        other at the end.
        """
        now = self.steps[self.begun:][-times * EVERY:]
        return len(now) == times * EVERY and all(step["replicas"] == peers for step in now)


def kill_and_return(make: Callable[[int, str], Kind]) -> tuple[Kind, Kind]:
    """Two peers; the second is killed and comes back; both are killed then.

    make: the peer of a number, with the address of a lighthouse.
    """
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000,
                                  heartbeat_timeout_ms=2000)
    peers = first, second = make(0, lighthouse.address()), make(1, lighthouse.address())

    def wait(peer: Peer, over: int) -> None:
        until(lambda: peer.averaged_over(over) or peer.process.poll() is not None,
              lambda: "\n".join(each.text[-3000:] for each in peers))
        assert peer.process.poll() is None, peer.text[-3000:]

    try:
        for peer in peers:
            peer.start()
        wait(second, 2)
        second.kill()
        before = len(first.steps)
        wait(first, 1)
        assert len(first.steps) > before
        second.start()
        wait(second, 2)
        assert first.process.poll() is None
    finally:
        for peer in peers:
            peer.kill()
        lighthouse.shutdown()
    assert "momentum starts at zero" not in second.text
    return peers
