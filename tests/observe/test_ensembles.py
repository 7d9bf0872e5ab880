"""Errors and confidences of ensembles: read from the logs, drawn in the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_plugin.observe.history import read_run
from moe_plugin.observe.history.host_logs import parse_step
from moe_plugin.observe.report.figure_records import HeatMap, LineChart, ensemble
from moe_plugin.observe.report.page import render

pytestmark = pytest.mark.fast

ROWS = [
    {"iteration": 10, "lm_loss": 2.0, "oracle_error": 0.4, "top1_error": 0.6},
    {"iteration": 10, "lm_loss": None, "valid_loss": 2.1, "oracle_error": 0.3, "top1_error": 0.5,
     "member_error": 0.7, "confidence": {"responsible": [0, 1, 1, 2], "other": [4, 0, 0, 0]}},
    {"iteration": 20, "lm_loss": None, "valid_loss": 1.9, "oracle_error": 0.2, "top1_error": 0.4,
     "member_error": 0.6, "confidence": {"responsible": [0, 0, 0, 4], "other": [0, 0, 0, 0]}},
]


def test_errors_and_confidences_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    run = read_run(tmp_path)
    errors, sure, unsure = ensemble(run)
    assert isinstance(errors, LineChart) and {one.name: one.y for one in errors.lines} == {
        "oracle": (0.4,), "top-1": (0.6,), "oracle, validation": (0.3, 0.2),
        "top-1, validation": (0.5, 0.4), "mean member, validation": (0.7, 0.6)}
    assert isinstance(sure, HeatMap) and sure.steps == (10, 20)
    # a half of four, then all, are in the highest range, which is the first row
    assert sure.values == ((2.0, 4.0), (1.0, 0.0), (1.0, 0.0), (0.0, 0.0))
    assert sure.rows[0] == "0.75 to 1"
    assert isinstance(unsure, HeatMap) and [row[0] for row in unsure.values] == [0, 0, 0, 4]
    assert all(row[1] != row[1] for row in unsure.values)  # none were counted
    assert "Confidence of members that are not responsible" in render(run)


def test_a_run_without_an_ensemble_has_no_such_section(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"iteration": 1, "lm_loss": 2.0}) + "\n")
    assert ensemble(read_run(tmp_path)) == []


def test_lists_that_are_none_are_said(tmp_path: Path) -> None:
    bad = {**ROWS[1], "confidence": {"other": 3}}
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*ROWS, bad)))
    run = read_run(tmp_path)
    assert "1 line of log.jsonl could not be read" in run.notes[0] and len(ensemble(run)) == 3


def test_fairseqs_validation_has_errors_of_its_own() -> None:
    text = ('2024 | INFO | valid | {"epoch": 1, "valid_loss": "3.5", "valid_num_updates": "4", '
            '"valid_oracle_error": "0.25", "valid_top1_error": "0.5"}')
    found = parse_step(text)
    assert found and found[1].extra == {"valid oracle_error": 0.25, "valid top1_error": 0.5}
