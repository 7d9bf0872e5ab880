"""Peers from a command: each a `fairseq-train` whose weights stream, averaged over those that live.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.faults.meeting import until
from tests.hosts.fairseq.conftest import (
    DROPLESS,
    LANGUAGE_MODEL,
    MOE,
    Corpus,
    Result,
    command,
    environment,
)

coordination = pytest.importorskip("torchft.coordination")
pytestmark = pytest.mark.distributed
EVERY = 3


class Peer:
    """A command, its log and its folder."""

    def __init__(self, corpus: Corpus, home: Path, number: int, lighthouse: str) -> None:
        self.folder, self.log = home / str(number), home / f"{number}.log"
        self._words = command(
            "fairseq-train", f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --weights-on host "
            f"--seed {number + 1} --moe-lighthouse {lighthouse} --moe-replica {number} "
            f"--moe-timeout 30 --moe-average-every {EVERY} --moe-outer-lr 0.7 "
            f"--save-interval-updates {EVERY} --no-epoch-checkpoints --disable-validation "
            f"--max-update 100000 --save-dir {self.folder}")
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        self.begun = len(self.steps)
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(self._words, stdout=out, stderr=subprocess.STDOUT,
                                            env=environment())
        return self.process

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    @property
    def steps(self) -> list[dict[str, float]]:
        return Result(0, self.text).steps

    def averaged_over(self, peers: int, times: int = 2) -> bool:
        """Whether so many averages since it was started were over so many peers, one after the
        other at the end.
        """
        now = self.steps[self.begun:][-times * EVERY:]
        return len(now) == times * EVERY and all(step["replicas"] == peers for step in now)

    @property
    def saved(self) -> dict[int, Path]:
        """Files by update."""
        found = {re.fullmatch(r"checkpoint_\d+_(\d+)\.pt", path.name): path
                 for path in self.folder.glob("checkpoint_*.pt")}
        return {int(match[1]): path for match, path in found.items() if match}


def test_a_killed_peer_is_missed_and_comes_back(corpus: Corpus, tmp_path: Path) -> None:
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1,
                                               join_timeout_ms=2000, heartbeat_timeout_ms=2000)
    peers = [Peer(corpus, tmp_path, number, lighthouse.address()) for number in range(2)]
    first, second = peers

    def wait(peer: Peer, over: int) -> None:
        until(lambda: peer.averaged_over(over) or peer.process.poll() is not None,
              lambda: "\n".join(each.text[-3000:] for each in peers))
        assert peer.process.poll() is None, peer.text[-3000:]

    try:
        wait(second, 2)
        second.process.kill()
        second.process.wait()
        updates = len(first.steps)
        wait(first, 1)
        assert len(first.steps) > updates
        second.start()
        wait(second, 2)
        assert first.process.poll() is None
    finally:
        for peer in peers:
            peer.process.kill()
            peer.process.wait()
        lighthouse.shutdown()
    assert "momentum begins at zero" not in second.text
    assert second.steps[second.begun]["num_updates"] > 1
    common = sorted(first.saved.keys() & second.saved.keys())[:-1]
    assert common and not any(update % EVERY for update in common)
    for update in common:  # other data between two averages, and the same weights after each
        mine, theirs = (torch.load(peer.saved[update], weights_only=False) for peer in peers)
        for part in (mine, theirs):  # fairseq leaves its value open
            del part["model"]["decoder.embed_positions._float_tensor"]
        assert [name for name, x in mine["model"].items() if isinstance(x, torch.Tensor)
                and not torch.equal(x, theirs["model"][name])] == []
        assert mine["extra_state"]["moe_peers"][1]["momentum"]
