"""Peers from a command: each a `fairseq-train` whose weights stream, averaged over those that live.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.hosts.fairseq.conftest import (
    DROPLESS,
    LANGUAGE_MODEL,
    MOE,
    Corpus,
    Result,
    command,
    environment,
)

pytest.importorskip("torchft.coordination")
from tests.hosts.averaging import EVERY, Peer, kill_and_return

pytestmark = pytest.mark.distributed


class FairseqPeer(Peer):
    def __init__(self, corpus: Corpus, home: Path, number: int, lighthouse: str) -> None:
        super().__init__(home, number)
        self.environment = environment()
        self.words = command(
            "fairseq-train", f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --weights-on host "
            f"--seed {number + 1} --moe-lighthouse {lighthouse} --moe-replica {number} "
            f"--moe-timeout 30 --moe-average-every {EVERY} --moe-outer-lr 0.7 "
            f"--save-interval-updates {EVERY} --no-epoch-checkpoints --disable-validation "
            f"--max-update 100000 --save-dir {self.folder}")

    @property
    def steps(self) -> list[dict[str, float]]:
        return Result(0, self.text).steps

    @property
    def saved(self) -> dict[int, Path]:
        found = {re.fullmatch(r"checkpoint_\d+_(\d+)\.pt", path.name): path
                 for path in self.folder.glob("checkpoint_*.pt")}
        return {int(match[1]): path for match, path in found.items() if match}


def test_a_killed_peer_is_missed_and_comes_back(corpus: Corpus, tmp_path: Path) -> None:
    peers = kill_and_return(partial(FairseqPeer, corpus, tmp_path))
    second = peers[1]
    assert second.steps[second.begun]["num_updates"] > 1
    # the last may be half written
    common = sorted(peers[0].saved.keys() & peers[1].saved.keys())[:-1]
    assert common and not any(update % EVERY for update in common)
    for update in common:  # other data between two averages, and the same weights after each
        mine, theirs = (torch.load(peer.saved[update], weights_only=False) for peer in peers)
        for part in (mine, theirs):  # fairseq leaves its value open
            del part["model"]["decoder.embed_positions._float_tensor"]
        assert [name for name, x in mine["model"].items() if isinstance(x, torch.Tensor)
                and not torch.equal(x, theirs["model"][name])] == []
        assert mine["extra_state"]["moe_peers"][1]["momentum"]
