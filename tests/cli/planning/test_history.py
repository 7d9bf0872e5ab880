"""`plan --history`: errors by hand, pairs in the right order, files that hold other things."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from moe_plugin.cli.main import main
from moe_plugin.cli.planning.history import as_dict, explain, mean_errors, pairs
from moe_plugin.observe.history import read_run
from moe_plugin.observe.history.predictions import PredictionRecord, prediction_record
from moe_plugin.observe.history.reader import read_predictions
from moe_plugin.planner.prediction import Prediction

pytestmark = pytest.mark.fast


def record(plan: str, predicted: float, measured: float, **values: object) -> PredictionRecord:
    """Half of each is products; the exchange is predicted twice as long as it is."""
    made = Prediction(task="a model", plan=plan, memory_bytes=1e9, parts={
        "products": [0.9 * predicted / 2, predicted / 2, predicted / 2],
        "exchange": [predicted / 2] * 3})
    return dataclasses.replace(PredictionRecord(
        step=15, host="fairseq", predicted=made, machine="one", steps=10, seconds=measured,
        parts={"products": measured - predicted / 4, "exchange": predicted / 4,
               "optimizer": 0.0}, memory_bytes=8e8), **values)


def test_errors_are_those_by_hand() -> None:
    one, other = record("a", 1.0, 0.8), record("b", 1.0, 1.25)
    assert (one.error, other.error) == pytest.approx((0.25, -0.2))
    assert not one.inside and not other.inside and record("a", 1.0, 0.96).inside
    found = mean_errors([one, other])
    assert found["step"] == pytest.approx({"mape": 0.225, "bias": 0.025, "runs": 2})
    assert found["exchange"] == pytest.approx({"mape": 1.0, "bias": 1.0, "runs": 2})
    # 0.5 s of 0.55 s and of 1 s
    assert found["products"]["mape"] == pytest.approx((1 - 0.5 / 0.55 + 0.5) / 2)
    assert found["memory"]["mape"] == pytest.approx(0.25)
    assert "optimizer" not in found  # it was not predicted, and takes nothing


def test_pairs_are_of_one_task_and_machine() -> None:
    runs = [record("a", 1.0, 1.0), record("b", 2.0, 1.02), record("c", 0.5, 3.0)]
    assert pairs(runs) == (1, 3)
    assert pairs(runs, 0.05) == (0, 2)
    alone = [record("a", 1.0, 1.0), record("b", 2.0, 3.0, machine="two"), record("a", 1.0, 2.0)]
    assert pairs(alone) == (0, 0)
    other = record("b", 2.0, 3.0)
    other = dataclasses.replace(other, predicted=dataclasses.replace(
        other.predicted, machine="another network"))
    assert pairs([record("a", 1.0, 1.0), other]) == (0, 0)


def test_the_command_joins_what_runs_wrote(tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    for name, one in (("first", record("a", 1.0, 0.8)), ("second", record("b", 1.0, 1.25))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "measured.jsonl").write_text(json.dumps(one.as_row()) + "\n")
    (tmp_path / "first" / "measured.jsonl").open("a").write('{"step": 1, "predicted": 1, '
                                                            '"measured": 2}\n')
    found = read_predictions(tmp_path)
    assert found == [("first", record("a", 1.0, 0.8)), ("second", record("b", 1.0, 1.25))]
    assert main(["plan", "--history", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.rstrip() == explain(found)
    assert "one: 2 runs, 0 inside their interval" in said and "mean absolute error 22.5%" in said
    assert main(["plan", "--history", str(tmp_path), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["machines"] == json.loads(json.dumps(as_dict(found)["machines"]))
    assert [run["run"] for run in values["runs"]] == ["first", "second"]


def test_a_report_says_it_and_a_run_alone_is_no_run(tmp_path: Path) -> None:
    from moe_plugin.observe.report.content import summary

    one = record("a", 1.0, 0.8)
    (tmp_path / "measured.jsonl").write_text(json.dumps(one.as_row()) + "\n")
    with pytest.raises(ValueError, match="holds no record of a run"):
        read_run(tmp_path)
    (tmp_path / "stats.jsonl").write_text(json.dumps(
        {"step": 1, "training": {"loss": 1.0}}) + "\n")
    assert dict(summary(read_run(tmp_path)))["Against its prediction"] == one.line()


@pytest.mark.parametrize("change", [
    lambda row: row["measured"].pop("seconds"), lambda row: row.update(predicted=[]),
    lambda row: row["measured"].update(seconds=float("nan")),
    lambda row: row["measured"].update(seconds=0), lambda row: row["predicted"].update(parts=3),
    lambda row: row["predicted"]["parts"].update(products=["x"] * 3),
    lambda row: row["measured"].update(parts={"products": True})])
def test_other_lines_are_refused(change) -> None:
    row = record("a", 1.0, 0.8).as_row()
    assert prediction_record(row) == record("a", 1.0, 0.8)
    change(row)
    with pytest.raises((ValueError, TypeError)):
        prediction_record(row)
