"""Peers from a command: each a run whose weights stream, averaged over those that live."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.common.host import Host

pytest.importorskip("torchft.coordination")
from tests.hosts.averaging import EVERY, Peer, kill_and_return


class HostPeer(Peer):
    def __init__(self, host: Host, home: Path, number: int, lighthouse: str) -> None:
        super().__init__(home, number)
        self.folder.mkdir()
        self.host, self.environment = host, host.environment()
        more = (f"{host.streams} --seed {number + 1} --moe-lighthouse {lighthouse} --moe-replica "
                f"{number} --moe-timeout 30 --moe-average-every {EVERY} --moe-outer-lr 0.7")
        program = host.program(host.words(self.folder, 100_000, more, 1, EVERY, None, 0))
        self.words = [*([sys.executable] if program[0] == "-m" else []), *program]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.host.rows(self.folder, self.text)

    @property
    def saved(self) -> dict[int, Path]:
        return self.host.streamed(self.folder)


def test_a_killed_peer_is_missed_and_comes_back(host: Host, tmp_path: Path) -> None:
    peers = kill_and_return(partial(HostPeer, host, tmp_path))
    second = peers[1]
    again = second.steps[second.begun]["step"]
    assert again > 1
    # the last may be half written
    mine, theirs = ({step: host.digest(peer.saved[step]) for step in sorted(peer.saved)[:-1]}
                    for peer in (second, peers[0]))
    # other data between two averages, and the same weights after each
    for before in (True, False):
        assert {digest for step, digest in mine.items() if (step < again) == before} & {
            *theirs.values()}
    if host.counts_together:  # otherwise a peer that joins goes on at its own step
        common = mine.keys() & theirs.keys()
        assert common and not any(step % EVERY for step in common)
        assert [step for step in common if mine[step] != theirs[step]] == []
