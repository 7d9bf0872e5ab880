"""Damaged checkpoints give way to older ones, or are refused."""

from __future__ import annotations

from pathlib import Path

from tests.hosts.common.adapters import cases
from tests.hosts.common.host import Host, flip_one_bit

NEWEST = "latest_checkpointed_iteration.txt"


@cases({"fairseq": {"named": ""}, "megatron": {"named": "", "the name is lost": NEWEST}})
def test_a_damaged_checkpoint_gives_way_to_an_older_one_or_is_refused(host: Host, case: str,
                                                                      tmp_path: Path) -> None:
    """Also where the file that names the newest is lost."""
    whole = host.train(tmp_path, 8, save=2).ok()
    for path in host.files(tmp_path, 8):
        flip_one_bit(path)
    if case:
        (tmp_path / case).unlink()
    resumed = host.train(tmp_path, 8, save=2)
    host.same(resumed, whole)
    assert resumed.numbers == [7, 8] and "damaged" in resumed.log
    assert host.files(tmp_path, 8)[-1].name in resumed.log
    for step in (2, 4, 6, 8):
        for path in host.files(tmp_path, step):
            flip_one_bit(path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    ended = host.train(tmp_path, 10, save=2)
    ended.failed_with(host.files(tmp_path, 8)[-1].name, "damaged")
    assert not ended.rows
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert {path for path in before if after.get(path) != before[path]} == set()
