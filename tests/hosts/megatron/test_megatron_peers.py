"""Peers from a command: each a Megatron run whose weights stream, averaged over those that live."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
pytest.importorskip("torchft.coordination")

from tests.distributed import free_port
from tests.hosts.averaging import EVERY, Peer, kill_and_return
from tests.hosts.megatron.training import MODEL, QUICK, TRAIN, own_loop

pytestmark = [pytest.mark.megatron, pytest.mark.distributed, own_loop]


class MegatronPeer(Peer):
    def __init__(self, data: str, home: Path, number: int, lighthouse: str) -> None:
        super().__init__(home, number)
        self.records = home / f"{number}.jsonl"
        self.environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
                            "MASTER_PORT": str(free_port())}
        self.words = [
            sys.executable, "-m", TRAIN, "--cpu", *QUICK, *MODEL,
            "--untie-embeddings-and-output-weights", "--data-path", data, "--train-iters", "20000",
            "--seed", str(number + 1), "--weights-on", "host", "--moe-lighthouse", lighthouse,
            "--moe-replica", str(number), "--moe-timeout", "30", "--moe-average-every", str(EVERY),
            "--moe-outer-lr", "0.7", "--save-interval", str(EVERY), "--save", str(self.folder),
            "--load", str(self.folder), "--log-file", str(self.records), "--eval-iters", "0",
            "--lr-decay-style", "constant"]

    @property
    def steps(self) -> list[dict[str, Any]]:
        lines = self.records.read_text().splitlines() if self.records.exists() else []
        return [row for row in map(_record, lines) if "lm_loss" in row]

    @property
    def saved(self) -> dict[int, Path]:
        return {int(path.parent.name.removeprefix("iter_")): path.parent
                for path in self.folder.glob("iter_*/streamed.json")}


def _record(line: str) -> dict[str, Any]:
    """Of a line; empty: it is half written."""
    try:
        return json.loads(line)
    except ValueError:
        return {}


def test_a_killed_peer_is_missed_and_comes_back(data: str, tmp_path: Path) -> None:
    peers = kill_and_return(partial(MegatronPeer, data, tmp_path))
    second = peers[1]
    assert second.steps[second.begun]["iteration"] > 1
    # a peer that joins has the others' weights and goes on at its own iteration, with its own data
    found = [{number: _digest(folder) for number, folder in peer.saved.items()} for peer in peers]
    again = second.steps[second.begun]["iteration"]
    for before in (True, False):
        assert {digest for number, digest in found[1].items() if (number < again) == before} & set(
            found[0].values())


def _digest(folder: Path) -> str:
    """Of the parameters of all parts, and of the outer optimizer's state."""
    found = sha256()
    for path in sorted(folder.glob("*.safetensors")):
        for name, x in sorted(load_file(path).items()):
            if name.startswith(("weight", "beside")):
                found.update(name.encode() + x.numpy().tobytes())
    return found.hexdigest()
