"""What the pages of streamed weights claim is what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.fast

PAGES = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "data"


def test_a_model_of_three_times_its_limit_trained_to_the_same_losses():
    """Under the limit, with the copies behind the computation where they overlap."""
    seen = json.loads((PAGES / "weights.json").read_text())["plain"]
    streamed = check_rows(seen["rows"])
    assert len(streamed) >= 2
    for row in streamed:
        assert row["limit"] <= row["model_bytes"] / 3
    overlapped, waiting = streamed[:2]
    assert overlapped["stalled_s"] < 0.2 * waiting["stalled_s"]


def test_megatron_trained_to_the_same_losses_within_its_limit():
    """In a fraction of the memory that the resident model took."""
    rows = json.loads((PAGES / "weights.json").read_text())["megatron"]["rows"]
    streamed = check_rows(rows)
    assert streamed
    for row in streamed:
        assert row["cgroup_peak_bytes"] < 0.2 * rows[0]["cgroup_peak_bytes"]


def check_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The streamed ones: losses of the resident one, which had no limit, within their own."""
    resident, *streamed = rows
    assert resident["limit"] is None
    for row in streamed:
        assert row["losses"] == resident["losses"]
        assert row["cgroup_peak_bytes"] <= row["limit"]
        assert row["anonymous_bytes"] <= row["limit"]
    return streamed


def test_two_peers_beat_a_pipeline_over_a_slow_link():
    """By a factor that grows as the link becomes slower, and that was predicted."""
    rows = json.loads((PAGES / "peers.json").read_text())["rows"]
    assert [row["rate_mbit_s"] for row in rows] == [50, 20, 10]
    assert rows[0]["factor"] >= 1.5
    assert rows[0]["factor"] < rows[1]["factor"] < rows[2]["factor"]
    for row in rows:
        assert 2 / 3 < row["predicted"] / row["factor"] < 3 / 2
