"""The table of statistics: records, readers, charts, comparisons, the host's log and the page
follow from it, and an entry is all that a new statistic needs.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.comm import run_simulated
from moe_plugin.config import ObserveConfig, from_dict
from moe_plugin.observe import StatsRecorder, history
from moe_plugin.observe.history import LayerRecord, RunRecord, StepRecord, read_run
from moe_plugin.observe.recorder import summary
from moe_plugin.observe.report.content import sections
from moe_plugin.observe.report.page import PLOTS, comparison, render
from moe_plugin.utils import statistics as table
from moe_plugin.utils.statistics import Chart, Statistic, statistics
from tests.seeds import seeded

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("generate_docs")


def layer(comm: Any = None) -> MoELayer:
    return MoELayer(from_dict({"model_dim": 4, "num_experts": 4, "losses": {"gshard": 0.1}}), comm)


def new(name: str, reduce: str, **more: Any) -> Statistic:
    chart = Chart(id=f"chart-{name}", title=f"Title of {name}", about="A new chart.",
                  section="A new section", compared="A new comparison.")
    return table.add(Statistic(name=name, meaning=f"the meaning of {name}", reduce=reduce,
                               charts=(chart,), **more,
                               logged={} if reduce == "names" else {f"moe_{name}": "max"}))


def recorded(folder: Path, steps: int = 3) -> tuple[RunRecord, list[list[Any]], dict[str, float]]:
    """A run of two ranks: its records, the tokens' largest weights, and the host's last metrics."""
    def rank(comm: Any) -> tuple[list[float], dict[str, float]]:
        draw = torch.Generator().manual_seed(comm.rank)
        with seeded(0):
            made = layer(comm)
        recorder, largest = StatsRecorder(
            ObserveConfig(interval=1, jsonl=str(folder / "stats.jsonl")), comm), []
        for step in range(steps):
            x_TD = torch.randn(5 + comm.rank, 4, generator=draw)
            largest.append(made.router(x_TD).weights_TK.max().item())
            recorder.add("layer0", made(x_TD).stats)
            logs = recorder.step(step)
        recorder.close()
        return largest, logs

    found = run_simulated(2, rank)
    return read_run(folder), [largest for largest, _ in found], found[0][1]


def test_one_entry_is_all_that_a_new_statistic_needs(own_entries: None, tmp_path: Path,
                                                     generator: ModuleType) -> None:
    """Measured in the layer, reduced over ranks, recorded, read, drawn, compared and listed."""
    new("largest", "max", on_device=True, measure=lambda call: call.kept.routing.weights_TK.max())
    new("mean_largest", "mean", on_device=True,
        measure=lambda call: call.kept.routing.weights_TK.max())
    new("rows_squared", "count", measure=lambda call: int(call.rows)**2)
    new("odd_rows", "names", measure=lambda call: "odd" if int(call.rows) % 2 else "even")
    new("rows_of_largest", "derived", derive=lambda record: record["rows"] / record["largest"])
    run, largest, logs = recorded(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "stats.jsonl").read_text().splitlines()]
    for step, row in enumerate(rows):
        of_ranks = [one[step] for one in largest]
        assert row["largest"] == pytest.approx(max(of_ranks))
        assert row["mean_largest"] == pytest.approx(sum(of_ranks) / 2)
        assert row["rows_of_largest"] == row["rows"] / row["largest"]
        assert row["rows_squared"] >= row["rows"]**2 / 2 and sum(row["odd_rows"].values()) == 1
    names = {"largest", "mean_largest", "rows_squared", "odd_rows", "rows_of_largest"}
    [records] = run.layers.values()
    assert [r.value("largest") for r in records] == [row["largest"] for row in rows]
    assert logs["moe_largest"] == rows[-1]["largest"]
    page, side_by_side = render(run), comparison([run, dataclasses.replace(run, name="b")])
    for name in names - {"odd_rows"}:
        assert f'id="chart-{name}"' in page or f"Title of {name}" in page
    compared = {figure.id for section in side_by_side for figure in section.figures}
    assert {f"chart-{name}" for name in names - {"odd_rows"}} <= compared
    text = generator.statistics_page()
    assert [name for name in names if f"| `{name}` | the meaning of {name} |" not in text] == []


def test_what_is_not_measured_costs_nothing(own_entries: None) -> None:
    """No layer evaluates more than it did, and statistics without a value are null."""
    out = layer()(torch.randn(5, 4))
    assert out.stats.more == {} and not any(s.measure for s in statistics.values())
    new("later", "mean", on_device=True, measure=lambda call: torch.ones(()))
    new("never", "max", measure=lambda call: None)
    recorder = StatsRecorder(ObserveConfig())
    recorder.add("a", out.stats)
    record = recorder.reduce()["a"]
    assert record["later"] is record["never"] is None and "moe_later" not in summary({"a": record})
    assert layer()(torch.randn(5, 4)).stats.as_dict()["later"] == 1.0


def test_ranks_without_a_value_do_not_count(own_entries: None) -> None:
    new("of_rank_1", "max", measure=lambda call: None)
    new("mean_of_rank_1", "mean", measure=lambda call: None)

    def rank(comm: Any) -> dict[str, Any]:
        recorder, stats = StatsRecorder(ObserveConfig(), comm), layer()(torch.randn(5, 4)).stats
        more = {"of_rank_1": -2.0, "mean_of_rank_1": 3.0} if comm.rank == 1 else {}
        recorder.add("a", dataclasses.replace(stats, more=more))
        return recorder.reduce()["a"]

    for record in run_simulated(3, rank):
        assert record["of_rank_1"] == -2.0 and record["mean_of_rank_1"] == 3.0


def test_records_have_the_fields_of_the_table(tmp_path: Path) -> None:
    names = [statistic.name for statistic in statistics.values()]
    recorded(tmp_path, 1)
    [row] = map(json.loads, (tmp_path / "stats.jsonl").read_text().splitlines())
    assert list(row) == ["step", "time", "host", "layer", *names]
    assert list(layer()(torch.randn(5, 4)).stats.as_dict()) == names
    read = {f.name for f in dataclasses.fields(LayerRecord)}
    assert read - {"step", "time", "layer", "more", "choices"} <= set(names)
    logged = [metric for statistic in statistics.values() for metric in statistic.logged]
    assert len(logged) == len(set(logged)) and {*summary({"a": row})} >= {
        name for name in logged if name != "moe_loss"} | {"moe_loss_gshard"}


def test_every_chart_is_in_the_report() -> None:
    """Of records in which every statistic that has a chart changes."""
    fields = {f.name for f in dataclasses.fields(LayerRecord)}

    def record(step: int) -> LayerRecord:
        counts = {f: 10.0 + step for f in ("hits", "misses", "wasted", "stalls", "bytes",
                                           "resident_bytes")}
        return LayerRecord(
            step=step, layer="a", load=(5 + step, 20), tokens=20.0, calls=2.0 + step,
            max_over_mean=1.0 + step, drop_fraction=step / 10, unused_experts=float(step),
            entropy=float(step), bytes_sent=9.0 * step, rows_sent=5.0 + step, rows_between=step,
            store=counts | {"hits": 10.0 + step**2},
            more={s.name: float(step) for s in statistics.values()
                  if s.name not in fields and s.reduce not in ("names", "list") and not s.by_name},
            **{s.name: {f"name{step}": 1.0} for s in statistics.values() if s.reduce == "names"})

    run = RunRecord(name="a", host="pytorch", steps=[StepRecord(step=1, loss=1.0)],
                    layers={"a": [record(step) for step in (1, 2, 3)]})
    drawn = {figure.id: (section.title, figure.title) for section in sections(run)
             for figure in section.figures}
    charts = [chart for statistic in statistics.values() for chart in statistic.charts]
    assert len({chart.id for chart in charts}) == len(charts) >= 17
    for chart in charts:
        assert drawn.get(chart.id) == (chart.section, chart.title), chart.id
    compared = {f.id for section in comparison([run, dataclasses.replace(run, name="b")])
                for f in section.figures}
    assert compared >= {chart.id for chart in charts if chart.compared}
    findings = {id for ids in PLOTS.values() for id in ids}
    others = {"loss", "drops-valid", "timeline-0", "decisions", "speed"}
    assert findings - others <= {chart.id for chart in charts}


def test_the_page_lists_every_statistic(generator: ModuleType) -> None:
    page = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    assert page == generator.statistics_page()
    listed = re.findall(r"^\| `(\w+)` \|", page.split("## Fields of a record")[1], re.MULTILINE)
    assert listed == [statistic.name for statistic in statistics.values()]


def test_old_records_are_read(tmp_path: Path) -> None:
    """Fields that are not in the table any more, or that the record lacks."""
    (tmp_path / "stats.jsonl").write_text(json.dumps(
        {"step": 1, "layer": "a", "load": [1, 2], "gone": 3.0}) + "\n")
    [[record]] = history.read_run(tmp_path).layers.values()
    assert record.value("entropy") is None and record.value("gone") is None and not record.more


def test_entries_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="'a' has reduce='average'. Use one of count, sum, mean"):
        Statistic(name="a", meaning="", reduce="average", of_call=len)
    for wrong in ({"reduce": "derived", "of_call": len}, {"reduce": "sum"},
                  {"reduce": "sum", "derive": len}):
        with pytest.raises(ValueError, match="'a' has no value. Pass derive=... for"):
            Statistic(name="a", meaning="", **wrong)
    with pytest.raises(ValueError, match="values with reduce='names' are not numbers"):
        Statistic(name="a", meaning="", reduce="names", of_call=len, logged={"moe_a": "mean"})
    with pytest.raises(ValueError, match="statistic 'load' is already registered"):
        table.add(statistics.get("load"))
