"""What counts of the time of runs that fail, and the committed page of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import effective
from tests.faults.time_lost import Ended, Lane, spent, stays, young_daly


def _line(step: int, at: float, life: int, made: bool = True) -> dict[str, object]:
    return {"step": step, "at": at, "life": life, "made": made}


def test_a_run_that_goes_on_from_a_checkpoint() -> None:
    """Steps of 1 s, a checkpoint of 0.5 s after every second one, killed 0.25 s after step 3."""
    times = [_line(1, 10, 7), _line(2, 11, 7), _line(3, 12.5, 7), _line(3, 20, 8), _line(4, 21, 8),
             _line(5, 22.5, 8)]
    found = spent([Lane(stays(times), starts=[5, 13.75], kills=[12.75])], save_every=2)
    assert (found.wall_s, found.step_s, found.useful_s) == (12.5, 1, 4)
    # step 3 was made in vain, with the checkpoint before it; then a quarter of step 4
    assert found.redone == 1 and found.saves == 1
    assert found.lost == {"detection": 1, "restart": 5.25, "redone": 1.75, "writing": 0.5,
                          "other": 0}
    assert found.useful_s + sum(found.lost.values()) == found.wall_s


def test_replicas_of_which_one_is_lost() -> None:
    """Steps of 1 s. Replica 1 is killed 0.5 s after step 2; the other one notices after 4 s, makes
    the lost step again and goes on alone, until replica 1 has taken its state in step 5.
    """
    others = [_line(1, 10, 7), _line(2, 11, 7), _line(3, 15.5, 7, made=False), _line(3, 16.5, 7),
              _line(4, 17.5, 7), _line(5, 19.5, 7), _line(6, 20.5, 7)]
    victims = [_line(1, 10, 3), _line(2, 11, 3), _line(5, 19.5, 4), _line(6, 20.5, 4)]
    members = {1: [0, 1], 2: [0, 1], 3: [0], 4: [0], 5: [0], 6: [0, 1]}
    found = spent([Lane(stays(others, members, 0), [1], []),
                   Lane(stays(victims, members, 1), [1, 12.5], [11.5])], save_every=0)
    assert (found.wall_s, found.step_s, found.redone) == (10.5, 1, 2)
    assert found.useful_s == 3.5  # five steps of one, two of the other
    assert found.lost == {"detection": (4.5 + 1) / 2, "restart": (1 + 7) / 2, "redone": 0.25,
                          "writing": 0, "other": 0}
    assert found.useful_s + sum(found.lost.values()) == found.wall_s


def test_a_step_that_was_made_again_stays_once() -> None:
    times = [_line(1, 1, 7), _line(2, 2, 7), _line(2, 9, 8), _line(3, 10, 8)]
    assert stays(times) == [Ended(1, 1, 7, True), Ended(2, 2, 7, False), Ended(2, 9, 8, True),
                            Ended(3, 10, 8, True)]


def test_checkpoints_that_lose_least() -> None:
    save_s, mtbf_s = 0.5, 600.0

    def lost(every_s: float) -> float:
        return save_s / every_s + every_s / 2 / mtbf_s

    best = young_daly(save_s, mtbf_s)
    assert best == pytest.approx(24.49, abs=0.01)
    assert lost(best) < min(lost(0.9 * best), lost(1.1 * best))


def test_the_page_is_made_from_its_numbers_and_no_run_differs_from_its_reference() -> None:
    rows = effective.load(effective.PAGE.parent / "data" / "effective.jsonl")
    assert {(row.host, row.replicas > 0) for row in rows} == {
        (host, replicas) for host in effective.HOSTS for replicas in (False, True)}
    assert effective.page(rows) == effective.PAGE.read_text(encoding="utf-8")
    for row in rows:
        assert row.failures and row.passes and not row.others
        assert row.loss <= effective.TOLERANCE
    shares = {(row.host, row.replicas > 0): f"{row.hour():.0%}".replace("%", " %") for row in rows}
    said = " ".join((effective.ROOT / "docs" / "replicas.md").read_text(encoding="utf-8").split())
    assert shares["fairseq", True] == shares["megatron", True]
    assert (f"every 10 minutes, {shares['fairseq', True]} of the time is spent on useful steps in "
            "fairseq and in Megatron. With checkpoints instead of replicas, the fraction is "
            f"{shares['fairseq', False]} in fairseq and {shares['megatron', False]} in Megatron"
            ) in said


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("host", list(effective.HOSTS))
def test_a_run_with_kills_equals_the_one_without(host: str, tmp_path: Path) -> None:
    pytest.importorskip("fairseq" if host == "fairseq" else "megatron.core")
    (tmp_path / "data").mkdir()
    assert effective.main(["--hosts", host, "--replicas", "without", "--steps", "120", "--every",
                           "3", "--out", str(tmp_path / "effective.md")]) == 0
    [row] = effective.load(tmp_path / "data" / "effective.jsonl")
    assert row.failures and row.passes
