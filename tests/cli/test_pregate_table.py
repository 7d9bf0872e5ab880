"""The committed curves of pre-gates: within 1 % of ordinary gates after fine-tuning, in each host.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

TABLE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "data" / "pregate.json"


@pytest.mark.parametrize("host", ["fairseq", "megatron"])
def test_pre_gates_reach_the_loss_of_ordinary_gates(host: str) -> None:
    found = json.loads(TABLE.read_text(encoding="utf-8"))
    rows = {row["gates"]: row for row in found["rows"] if row["host"] == host}
    last = {gates: row["valid"][-1][1] for gates, row in rows.items()}
    assert last["pre-gates"] <= 1.01 * last["ordinary"] < rows["ordinary"]["before"]
    assert rows["pre-gates"]["before"] == rows["ordinary"]["before"]  # one checkpoint
    assert {row["valid"][-1][0] for row in rows.values()} == {found["steps"] + found["more"]}
    assert f"| {host}" in TABLE.parents[1].joinpath("pregate.md").read_text(encoding="utf-8")
