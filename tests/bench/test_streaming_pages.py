"""What the pages of streamed weights claim is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

PAGES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def test_a_model_of_three_times_its_limit_trained_to_the_same_losses():
    """Under the limit, with the copies behind the computation where they overlap."""
    seen = json.loads((PAGES / "weights.json").read_text())
    resident, *streamed = seen["rows"]
    assert resident["limit"] is None and len(streamed) >= 2
    for row in streamed:
        assert row["losses"] == resident["losses"]
        assert row["cgroup_peak_bytes"] <= row["limit"] <= row["model_bytes"] / 3
        assert row["anonymous_bytes"] <= row["limit"]
    overlapped, waiting = streamed[:2]
    assert overlapped["stalled_s"] < 0.2 * waiting["stalled_s"]


def test_two_peers_beat_a_pipeline_over_a_slow_link():
    """By a factor that grows as the link becomes slower, and that was predicted."""
    rows = json.loads((PAGES / "peers.json").read_text())["rows"]
    assert [row["rate_mbit_s"] for row in rows] == [50, 20, 10]
    assert rows[0]["factor"] >= 1.5
    assert rows[0]["factor"] < rows[1]["factor"] < rows[2]["factor"]
    for row in rows:
        assert 2 / 3 < row["predicted"] / row["factor"] < 3 / 2
