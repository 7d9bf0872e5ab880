"""ATOM by fairseq's command: in 16 bits and with tied embeddings, a model whose weights stream
trains as one on the device does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.fairseq.conftest import Corpus, Result, make_corpus
from tests.hosts.fairseq.test_streamed import _ADAM, _SGD, numbers, same_states, train

# the first step overflows with this scale, and a later one
SCALE = "--fp16 --fp16-init-scale 2097152 --fp16-scale-window 2"
TIED = "--share-decoder-input-output-embed --update-freq 1"
KINDS = {
    "fp16": f"{_ADAM} {SCALE} --clip-norm 0.1", "fp16, sgd": f"{_SGD} {SCALE}",
    "bf16": f"{_ADAM} --bf16 --clip-norm 0.1", "bf16, tied": f"{_ADAM} --bf16 {TIED}",
    "tied, sgd": f"{_SGD} {TIED}",
    "memory-efficient fp16": f"{_ADAM} {SCALE} --memory-efficient-fp16 --clip-norm 0.1",
    "memory-efficient bf16": f"{_ADAM} --memory-efficient-bf16",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def same_runs(corpus: Corpus, folder: Path, flags: str, updates: int) -> Result:
    """Of the streamed run, whose numbers and files are those of the resident one."""
    device, host = (train(corpus, folder / where, f"{flags} --weights-on {where}", updates)
                    for where in ("device", "host"))
    assert "streamed in 4 parts" in host.log
    assert numbers(host) == numbers(device) and host.steps[-1]["num_updates"] == updates
    names = {path.name for path in (folder / "host").glob("*.pt")}
    assert names == {path.name for path in (folder / "device").glob("*.pt")} and len(names) > 1
    for name in names:
        same_states(folder / "host" / name, folder / "device" / name)
    return host


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[] if kind in ("fp16", "tied, sgd") else pytest.mark.slow)
    for kind in KINDS])
def test_a_run_has_the_bits_of_the_resident_one(kind: str, corpus: Corpus, tmp_path: Path) -> None:
    """Step by step; with fp16 a step that overflows is skipped and the scale halves in it."""
    host = same_runs(corpus, tmp_path, KINDS[kind], 5)
    overflows = host.log.count("gradient overflow detected")
    assert overflows if "fp16" in kind else not overflows


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_the_resident_one(corpus: Corpus, tmp_path: Path) -> None:
    """fairseq saves 16-bit weights and the loss scale: both begin with main weights of those."""
    same_runs(corpus, tmp_path, f"{_ADAM} {SCALE}", 3)
    second = same_runs(corpus, tmp_path, f"{_ADAM} {SCALE}", 6)
    assert second.steps[0]["num_updates"] == 4


@pytest.mark.slow
def test_a_lone_peer_of_16_bits_has_the_bits_of_a_run_without_peers(corpus: Corpus, tmp_path: Path
                                                                    ) -> None:
    """The average of main weights over one peer changes none of them."""
    coordination = pytest.importorskip("torchft.coordination")
    flags = f"{KINDS['bf16, tied']} --weights-on host"
    alone = train(corpus, tmp_path / "alone", flags, 4)
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    try:
        peer = train(corpus, tmp_path / "peer", f"{flags} --moe-average-every 2 --moe-lighthouse "
                     f"{lighthouse.address()}", 4)
    finally:
        lighthouse.shutdown()
    assert [step["replicas"] for step in peer.steps] == [1] * 4
    assert [step["loss"] for step in peer.steps] == [step["loss"] for step in alone.steps]
    same_states(tmp_path / "peer" / "checkpoint_last.pt", tmp_path / "alone" / "checkpoint_last.pt")
