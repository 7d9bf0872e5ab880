"""Checkpoints that are evaluated, and rows that do not fit in training and in evaluation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hosts.common.host import Host, records
from tests.hosts.slow_hardware import slow_hardware

BOUNDED = "--moe-dispatch bounded --moe-parallel fixed --moe-max-rows-factor 0.4"
REPEAT = f"{BOUNDED} --moe-on-overflow repeat"
RAISED = "the row limit was raised, and the step is repeated"
PIECES = r"evaluation of about \d+ tokens on each rank: .*\d pieces.*; predicted"
# one rank of experts has nothing to bound
STAGES = {"fairseq": [], "megatron": [
    (f"{REPEAT} --pipeline-model-parallel-size 2 --expert-model-parallel-size 1", "")]}


def test_several_ranks_have_the_loss_of_one_however_experts_are_computed(host: Host,
                                                                         tmp_path: Path) -> None:
    """With pieces that follow the load, on slow hardware (EPS-MoE); with more room for rows that do
    not fit, or with an error: nothing is lost.
    """
    host.train(tmp_path, 2, save=2).ok()
    device, cluster = slow_hardware(tmp_path)
    pieces = (f"--moe-parallel fixed --moe-prefill-pieces true --moe-parallel-device {device} "
              f"--moe-cluster {cluster}")
    [wanted] = host.evaluate(tmp_path, "--moe-parallel fixed", ranks=1).ok().rows
    for more, said in (("--moe-parallel fixed", ""), (pieces, PIECES), (REPEAT, RAISED),
                       *STAGES[host.name]):
        found = host.evaluate(tmp_path, more).ok()
        assert found.rows and re.search(said, found.log), more
        assert all(row == pytest.approx(wanted, **host.near) for row in found.rows), more
        assert bool(re.search(PIECES, found.log)) == (more == pieces)
    ended = host.evaluate(tmp_path, BOUNDED)
    ended.failed_with("Raise dispatch.max_rows_factor")
    assert not ended.late


def test_rows_that_do_not_fit_repeat_the_step(host: Host, tmp_path: Path) -> None:
    """The same curve with a bound below an even load; as an error, on every rank."""
    wanted, found = (host.train(
        tmp_path / name, 6, f"{more} --moe-stats-jsonl {tmp_path / name / 'stats.jsonl'} "
        "--moe-stats-interval 1") for name, more in (("wanted", ""), ("found", REPEAT)))
    assert RAISED in found.log and found.numbers == [*range(1, 7)]
    host.same(found, wanted)
    calls = [{row["calls"] for row in records(tmp_path / name / "stats.jsonl") if "layer" in row}
             for name in ("wanted", "found")]
    assert calls[0] == calls[1] and len(calls[0]) == 1, "a repeated step counts once"
    ended = host.train(tmp_path / "ended", 2, BOUNDED)
    ended.failed_with("Raise dispatch.max_rows_factor")
    assert not ended.rows and not ended.late
