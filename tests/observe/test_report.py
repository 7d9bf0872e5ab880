"""The report: numbers are the records', hostile text stays text, it loads nothing, it is small."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch

from moe_plugin import MoEConfig, MoELayer
from moe_plugin.cli.main import main
from moe_plugin.config import ObserveConfig, RouterConfig, RunConfig
from moe_plugin.hosts.plain.run import TrainingSteps
from moe_plugin.observe import StatsRecorder
from moe_plugin.observe.history import (
    DecisionRecord,
    LayerRecord,
    RunRecord,
    SpanRecord,
    StepRecord,
    read_run,
)
from moe_plugin.observe.report.content import sections
from moe_plugin.observe.report.draw_svg import LEVELS, level, short_names, top_of
from moe_plugin.observe.report.figure_records import (
    Bands,
    HeatMap,
    LineChart,
    experts_map,
    line,
    thinned,
)
from moe_plugin.observe.report.page import (
    comparison,
    history,
    render,
    render_comparison,
    write_report,
)
from moe_plugin.observe.report.text import NAME, number, shortened, summary, ticks
from moe_plugin.planner.choice import LayoutChoice

pytestmark = pytest.mark.fast

DATA = Path(__file__).parent / "data"
HOSTILE = "</script><img src=x onerror=\"alert(1)\">&amp;\u2028'`${a}\x1b[31m"


class Page(HTMLParser):
    """Elements and text of a page; raises where elements do not nest."""

    VOID = {"meta", "link", "img", "br", "path", "rect"}

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


def embedded(page: str) -> dict[str, Any]:
    return json.loads(
        re.search(r'<script type="application/json" id="figures">(.*?)</script>', page,
                  re.DOTALL)[1])


def curves(page: str, figure: str) -> dict[str, dict[float, float]]:
    return {
        one["name"]: dict(zip(one["x"], one["y"], strict=True))
        for one in embedded(page)[figure]["lines"] if not one["dashed"]
    }


def made_run(layers: int = 2, experts: int = 4, records: int = 3, name: str = "made") -> RunRecord:
    found = {
        f"layer{i}": [
            LayerRecord(step=s, layer=f"layer{i}", load=tuple(1 + (e * 7 + s + i) % 5
                                                              for e in range(experts)),
                        max_over_mean=1.0 + i / 10 + s / 100, drop_fraction=0.01 * i, entropy=1.0,
                        unused_experts=0, losses={"gshard": 1.0 + s}, bytes_sent=1e6, calls=2)
            for s in range(1, records + 1)
        ] for i in range(layers)
    }
    return RunRecord(
        name=name, host="megatron", steps=[
            StepRecord(step=s, loss=5 / s, tokens_per_s=1000.0 + s) for s in range(1, records + 1)
        ], layers=found, files=["log.jsonl"])


def test_rows_of_a_token_and_those_between_nodes_are_drawn() -> None:
    run = made_run(layers=1)
    [(name, records)] = run.layers.items()
    run.layers[name] = [dataclasses.replace(r, tokens=4.0, rows_sent=3.0 + r.step,
                                            rows_between=1.0 + r.step) for r in records]
    page = render(run)
    assert curves(page, "rows-sent") == {name: {s: (3 + s) / 4 for s in (1, 2, 3)}}
    assert curves(page, "rows-between") == {name: {s: (1 + s) / 4 for s in (1, 2, 3)}}
    assert "rows-between" not in embedded(render(made_run()))


@pytest.mark.parametrize("host", ["fairseq", "megatron"])
def test_numbers_of_the_page_are_those_of_the_records(host: str) -> None:
    run = read_run(DATA / host)
    page = render(run)
    assert curves(
        page, "loss")["training"] == {r.step: pytest.approx(r.loss, rel=1e-5) for r in run.steps}
    assert curves(page, "loss")["validation"] == {
        r.step: pytest.approx(r.valid_loss, rel=1e-5) for r in run.steps if r.valid_loss is not None
    }
    assert curves(page, "speed") == {
        "tokens/s": {r.step: pytest.approx(r.tokens_per_s, rel=1e-5) for r in run.steps}
    }
    for figure, field in (("max-mean", "max_over_mean"), ("drops", "drop_fraction"),
                          ("entropy", "entropy"), ("unused", "unused_experts")):
        known = {name: {r.step: getattr(r, field) for r in records}
                 for name, records in run.layers.items()}
        if all(len(set(values.values())) == 1 for values in known.values()):
            assert figure not in embedded(page)  # the table of constants has it
        else:
            assert curves(page, figure) == {name: pytest.approx(values, rel=1e-5)
                                            for name, values in known.items()}
    sent = {
        name: {r.step: pytest.approx(r.bytes_sent / r.calls, rel=1e-5) for r in records}
        for name, records in run.layers.items()
    }
    assert curves(page, "bytes") == sent
    for i, records in enumerate(run.layers.values()):
        heat = embedded(page)[f"experts-{i}"]
        assert heat["steps"] == [r.step for r in records]
        for row, expert in zip(heat["values"], range(4), strict=True):
            assert row == [
                pytest.approx(r.load[expert] * 4 / sum(r.load), abs=1e-3) for r in records
            ]
    table = Page(page).text["td"]
    assert all(d.why in table and LayoutChoice.from_label(d.choice).words in table
                   for d in run.decisions)


def test_losses_by_name_are_drawn_whether_statistics_or_the_log_has_them() -> None:
    fairseq, megatron = render(read_run(DATA / "fairseq")), render(read_run(DATA / "megatron"))
    assert "Router loss: gshard" in fairseq and "Time in exchanges" in fairseq and (
        "Router loss: "
        "load_balancing_loss") in megatron
    first = json.loads(
        (DATA / "megatron" /
         "log.jsonl").read_text().splitlines()[0])["aux_losses"]["load_balancing_loss"]
    assert curves(megatron, "loss-0")["loss load_balancing_loss"][2] == pytest.approx(
        sum(first) / len(first), rel=1e-5)


def test_the_router_of_each_layer_is_drawn_where_several_take_turns() -> None:
    def run_of(routers: list[str]) -> RunRecord:
        records = [
            LayerRecord(step=s, layer="layer0", load=(1, 1), routers={router: 2})
            for s, router in enumerate(routers, 1)
        ]
        return RunRecord(name="made", host="megatron",
                         steps=[StepRecord(step=s, loss=1.0) for s in range(1, 4)],
                         layers={"layer0": records}, files=["log.jsonl"])

    page = render(run_of(["switch", "base", "switch"]))
    assert '<figure id="routers"' in page and "Router of each layer" in page and "base" in page
    assert '<figure id="routers"' not in render(run_of(["switch"] * 3))


def test_the_summary_says_what_the_run_was() -> None:
    rows = dict(summary(read_run(DATA / "fairseq")))
    assert rows["Host"] == "fairseq" and rows["Steps"] == "24" and rows[
        "Layers with experts"] == "2, 4 experts each" and "(step 24)" in rows["Loss, first and "
                                                                              "last"]
    half = made_run()
    half.settings["train-iters"] = "50"
    assert dict(summary(half))["Steps"] == "3 of 50"


def drawn_levels(page: str, figure: str, rows: int, columns: int) -> list[list[int | None]]:
    """What the paths of a heat map draw: signed levels by row and column."""
    block = re.search(rf'<figure id="{figure}".*?</figure>', page, re.DOTALL)[0]
    assert f'viewBox="0 0 {columns} {rows}"' in block
    cells: list[list[int | None]] = [[None] * columns for _ in range(rows)]
    for side, share, path in re.findall(
            r'<path class="(over|under)" style="--share:(\d+)%" d="([^"]*)"/>', block):
        value = round(int(share) * LEVELS / 100) * (1 if side == "over" else -1)
        for x, y, size in re.findall(r"M(\d+) (\d+)\.5h(\d+)", path):
            for column in range(int(x), int(x) + int(size)):
                assert cells[int(y)][column] is None
                cells[int(y)][column] = value
    return cells


@pytest.mark.parametrize("figure", ["layers", "experts-0", "experts-1"])
def test_heat_maps_draw_the_levels_of_the_values(figure: str) -> None:
    run = read_run(DATA / "fairseq")
    heats = {f.id: f for section in sections(run) for f in section.figures
             if isinstance(f, HeatMap)}
    heat, top = heats[figure], top_of([row for f in heats.values() for row in f.values])
    page = render(run)
    drawn = drawn_levels(page, figure, len(heat.rows), len(heat.steps))
    assert drawn == [[level(v, top) for v in row] for row in heat.values]
    # one scale for all, with one legend
    assert page.count('<p class="scale">') == 1 and f"{number(top)} or more" in page
    assert len({v for row in drawn for v in row}) > 4


def test_cells_of_a_heat_map_without_a_value_stay_empty() -> None:
    run = made_run(layers=1, experts=2, records=4)
    run.layers["layer0"][1] = LayerRecord(step=2, layer="layer0", load=(0, 0))
    run.layers["layer0"][2] = LayerRecord(step=3, layer="layer0", load=(0, 5))
    drawn = drawn_levels(render(run), "experts-0", 2, 4)
    assert [row[1] for row in drawn] == [None, None]
    assert [row[2] for row in drawn] == [-LEVELS, LEVELS]


def test_levels_grow_from_nothing_over_even_to_the_top() -> None:
    assert [level(v, 3.0) for v in (0.0, 1.0, 3.0, 99.0, math.nan)] == [
        -LEVELS, 0, LEVELS, LEVELS, None]
    levels = [level(v / 10, 3.0) for v in range(31)]
    assert levels == sorted(levels) and len(set(levels)) > 25


def hostile_run() -> RunRecord:
    decision = DecisionRecord(step=1, layer=HOSTILE, event=HOSTILE, choice=HOSTILE, why=HOSTILE)
    rows = [
        LayerRecord(step=s, layer=HOSTILE, load=(1, 2), max_over_mean=1.3, losses={HOSTILE: 1.0},
                    layouts={HOSTILE + str(s): 1}, decisions=(decision,)) for s in (1, 2)
    ]
    return RunRecord(name=HOSTILE, host=HOSTILE,
                     steps=[StepRecord(step=1, loss=1.0),
                            StepRecord(step=2, loss=math.nan)],
                     layers={HOSTILE: rows, "b": rows[:1]},
                     timelines={(1, 0): [SpanRecord(HOSTILE, HOSTILE, 0.0, 1.0)]},
                     settings={HOSTILE: HOSTILE},
                     notes=[HOSTILE], files=[HOSTILE])


def test_hostile_text_stays_text() -> None:
    page = render(hostile_run())
    parsed = Page(page)
    assert len(parsed.of("script")) == 2 and all(not name.startswith("on")
                                                 for _, attrs in parsed.elements for name in attrs)
    assert not parsed.of("img")
    assert HOSTILE in parsed.text["h1"] and HOSTILE in parsed.text["td"] and embedded(
        page)["max-mean"]["lines"][0]["name"] == shortened(HOSTILE, NAME)


@pytest.mark.parametrize("host", ["fairseq", "fairseq_simple", "megatron"])
def test_the_page_is_whole_and_loads_nothing(host: str) -> None:
    page = render(read_run(DATA / host))
    parsed = Page(page)
    links = [
        value for _, attrs in parsed.elements for name, value in attrs.items()
        if name in ("src", "href")
    ]
    policies = [attrs["content"] for attrs in parsed.of("meta") if "http-equiv" in attrs]
    assert links and all(value.startswith(("data:", "#")) for value in links)
    assert len(policies) == 1 and policies[0].startswith("default-src 'none'")
    assert not re.search(r"https?://|@import|url\(", page)
    ids = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    named = [attrs for _, attrs in parsed.elements if attrs.get("role") == "img"]
    charts = [
        f for section in sections(read_run(DATA / host)) for f in section.figures
        if isinstance(f, (LineChart, HeatMap, Bands))
    ]
    assert len(named) == len(charts) and all(
        attrs["aria-labelledby"] in ids and attrs["aria-describedby"] in ids for attrs in named)


def test_a_large_run_gives_a_page_of_bounded_size() -> None:
    assert len(render(made_run(layers=24, experts=64, records=400))) < 4_000_000


def test_long_curves_keep_ends_and_extremes() -> None:
    points = [(float(i), math.sin(i / 50)) for i in range(5000)]
    points[1234] = (1234.0, 50.0)
    points[4321] = (4321.0, -50.0)
    points[2000] = (2000.0, math.nan)
    few = [(x, y) for x, y, _ in thinned(points)]
    assert len(few) <= 400 and {points[0], points[-1], (1234.0, 50.0), (4321.0, -50.0)
                                } <= set(few) and [x for x, _ in few] == sorted(x for x, _ in few)
    assert any(math.isnan(y) for _, y in few) and [
        (x, y) for x, y, _ in thinned(points[:100])] == points[:100]


def test_a_column_of_a_heat_map_is_the_mean_of_its_records() -> None:
    """A record without a token, and one of another number of experts, do not count."""
    loads = [(1, 3), (2, 2), (0, 0), (5, 0), (1, 2, 3), (0, 4)]
    records = [LayerRecord(step=step, layer="a", load=load) for step, load in enumerate(loads)]
    found = experts_map("id", "a", records, 2)
    assert found.steps == (1, 5) and found.values == ((0.75, 1.0), (1.25, 1.0))
    assert experts_map("id", "a", records[2:3], 2).values == ((pytest.approx(
        math.nan, nan_ok=True),), ) * 2


def test_long_curves_keep_the_means_of_their_stretches() -> None:
    rising = line("rising", [(float(i), float(i % 2) + i / 1e4) for i in range(5000)])
    assert rising and rising.means and len(rising.means) == len(rising.y) <= 400
    assert all(m == pytest.approx(0.5 + x / 1e4, abs=0.03)
               for x, m in list(zip(rising.x, rising.means, strict=True))[1:-1])
    assert line("short", [(1.0, 2.0), (2.0, 3.0)]).means is None


@pytest.mark.parametrize(("run", "figures"), [
    (RunRecord(name="one", host="megatron", steps=[StepRecord(step=5, loss=math.inf)]), []),
    (RunRecord(name="one", host="unknown",
               layers={"a": [LayerRecord(step=5, layer="a", load=(0, 0))]}), []),
    (RunRecord(name="one", host="megatron", steps=[StepRecord(step=5, loss=2.0)],
               layers={"a": [LayerRecord(step=5, layer="a", load=(0, 3))]}), ["loss", "experts-0"]),
], ids=["infinite-loss", "nothing-routed", "one-record"])
def test_a_run_with_little_in_it_has_a_page_of_what_is_known(run: RunRecord,
                                                             figures: list[str]) -> None:
    parsed = Page(render(run))
    assert [attrs["id"] for attrs in parsed.of("figure")] == figures
    assert parsed.text["h1"] == ["one"] and "5" in parsed.text["dd"]


def test_names_of_rows_leave_out_what_all_have_in_common() -> None:
    assert short_names(["decoder.layers.1", "decoder.layers.13"]) == ["layers.1", "layers.13"]
    assert short_names(["decoder.layers.1.moe", "decoder.layers.2.moe"]) == [
        "layers.1.moe", "layers.2.moe"]
    assert short_names(["encoder.layers.1", "decoder.layers.1"]) == [
        "encoder.layers.1", "decoder.layers.1"]
    assert short_names(["layer1", "layer2"]) == ["layer1", "layer2"]
    assert short_names(["a.b.c"]) == ["a.b.c"] and short_names(["a.b", "a.b.c"]) == ["a.b", "a.b.c"]


def test_what_never_changes_is_a_table_and_no_plot() -> None:
    run = made_run()
    page = render(run)
    shown = [attrs["id"] for attrs in Page(page).of("figure")]
    assert "entropy" not in shown and "drops" not in shown and "loss" in shown
    assert {"max-mean", "drops-constant", "bytes-constant"} <= set(shown)
    rows = re.findall(r"<tr>(.*?)</tr>", re.search(
        r'<figure id="drops-constant".*?</figure>', page, re.DOTALL)[0])
    assert [re.findall(r"<td>(.*?)</td>", row) for row in rows[1:]] == [
        ["Dropped choices", "layer0", "0 %"], ["Dropped choices", "layer1", "1 %"],
        ["Unused experts", "all", "0"]]


def test_settings_that_differ_come_first_and_all_are_folded_away() -> None:
    run = made_run()
    run.settings = {"seed": "7", "lr": "0.1", "cpu": "True"}
    page = Page(render(run))
    assert [attrs.get("id") for attrs in page.of("details")[1:3]] == ["settings", None]
    run.changed = {"lr": ("1e-1", "0.25")}
    text = render(run)
    folded = {attrs.get("id"): "open" in attrs for attrs in Page(text).of("details")}
    assert not folded["changed"] and not folded["settings"], "the curves come first"
    block = re.search(r'<details id="changed".*?</details>', text, re.DOTALL)[0]
    assert Page(block).text["td"] == ["1e-1", "0.25"] and "seed" not in block


def test_links_open(tmp_path: Path) -> None:
    folder = tmp_path / "a run#1"
    shutil.copytree(DATA / "fairseq", folder)
    for place in (folder, tmp_path / "elsewhere"):
        place.mkdir(exist_ok=True)
        path = write_report(read_run(folder), place / "report.html")
        parsed = Page(path.read_text())
        links = [attrs["href"] for attrs in parsed.of("a")]
        ids = {attrs.get("id") for _, attrs in parsed.elements}
        inside = [link for link in links if link.startswith("#")]
        assert len(inside) > 5 and {link[1:] for link in inside} <= ids
        files = {(place / unquote(link)).resolve() for link in links if not link.startswith("#")}
        assert files == {(folder / name).resolve() for name in ("stats.jsonl", "train.log")}
    # a finding leads to the plot that shows it
    assert "#drops" in links and "#timeline-0" in links
    (folder / "train.log").unlink()
    run = read_run(folder)
    run.files.append("train.log")
    assert 'href="train.log"' not in write_report(run, folder / "report.html").read_text()


def test_many_layers_are_drawn_as_highest_middle_and_lowest() -> None:
    lines = curves(render(made_run(layers=9)), "max-mean")
    assert {name: line[2] for name, line in lines.items()
            } == {"highest layer": 1.82, "middle layer": 1.42, "lowest layer": 1.02}


def test_command_writes_the_page_and_says_what_it_could_not_read(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a run"
    shutil.copytree(DATA / "fairseq", folder)
    with open(folder / "stats.jsonl", "a") as stream:
        stream.write('{"step": 26, "lay')
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert str(folder / "report.html") in out
    assert "note: The last line of stats.jsonl is unfinished" in out
    page = (folder / "report.html").read_text()
    assert "is unfinished" in page
    assert {attrs["id"] for attrs in Page(page).of("figure")} >= {
        "loss", "speed", "max-mean", "drops", "entropy", "experts-0", "experts-1", "layers",
        "bytes", "exchange-time", "timeline-0"
    }
    assert main(["report", str(folder), "--output", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").is_file()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="x.html cannot be written"):
        write_report(made_run(), tmp_path / "no" / "x.html")
    assert main(["report", str(tmp_path)]) == 2
    assert "Searched for layer statistics" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "unit", "text"), [(None, "", "–"), (math.nan, "s", "–"),
                                                     (math.inf, "", "∞"), (0.0, "%", "0 %"),
                                                     (0.2512, "%", "25.12 %"),
                                                     (1234567.0, "B", "1.18 MiB"),
                                                     (12.0, "B", "12 B"), (0.00034, "s", "340 us"),
                                                     (200.0, "s", "3.33 min"),
                                                     (7500.0, "s", "2.08 h"),
                                                     (12345.6, "count", "12,346"),
                                                     (3.0, "ms", "3 ms"), (0.0001, "", "0.0001")])
def test_numbers_for_people(value: float | None, unit: str, text: str) -> None:
    assert number(value, unit) == text


def test_ticks_are_round_and_inside() -> None:
    assert [number(v, "B") for v in ticks(0, 300_000, unit="B")] == ["0 B", "100 KiB", "200 KiB"]
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0] and ticks(
        3.2, 11.9) == [4, 6, 8, 10] and ticks(0, 2, least=1.0) == [0, 1, 2] and ticks(5, 5) == [5]


def test_runs_are_compared() -> None:
    slow, fast = made_run(name="slow"), made_run(name="fast", records=5)
    slow.settings, fast.settings = {"lr": "1", "seed": "3"}, {"lr": HOSTILE, "seed": "3"}
    page = render_comparison([slow, fast])
    for figure, value in (("loss", lambda r: r.loss), ("speed", lambda r: r.tokens_per_s)):
        assert curves(page, figure) == {
            run.name: {r.step: pytest.approx(value(r), rel=1e-5) for r in run.steps}
            for run in (slow, fast)}
    assert curves(page, "max-mean")["slow"] == {
        s: pytest.approx(1.05 + s / 100) for s in (1, 2, 3)}
    parsed = Page(page)
    cells = parsed.text["td"] + parsed.text["th"]
    assert "lr" in cells and HOSTILE in "".join(cells) and "seed" not in cells
    assert not parsed.of("img")


def test_settings_that_nobody_changed_are_not_compared() -> None:
    one, two = made_run(name="one"), made_run(name="two")
    one.settings, two.settings = {"lr": "1", "beam": "5"}, {"lr": "2", "tpu": "False"}
    cells = Page(render_comparison([one, two])).text["td"]
    assert {"lr", "beam", "tpu"} <= set(cells)  # whether these are defaults is not known
    one.changed, two.changed = {"lr": ("1.0", "3")}, {}
    cells = Page(render_comparison([one, two])).text["td"]
    assert "lr" in cells and not {"beam", "tpu"} & set(cells)


def test_runs_of_one_name_are_told_apart_and_their_number_is_bounded(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = render_comparison([made_run(), made_run()])
    assert set(curves(page, "loss")) == {"made (1)", "made (2)"}
    with pytest.raises(ValueError, match="a comparison of 9 runs is not possible"):
        render_comparison([made_run()] * 9)
    for host in ("fairseq", "megatron"):
        shutil.copytree(DATA / host, tmp_path / host)
    assert main(["report", str(tmp_path / "fairseq"), str(tmp_path / "megatron")]) == 0
    path = tmp_path / "fairseq" / "comparison.html"
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    assert set(curves(path.read_text(), "loss")) == {"fairseq", "megatron"}


def test_long_names_of_rows_are_shortened_in_the_middle() -> None:
    names = ["encoder_of_speech.layers.1", "decoder_of_words.layers.1",
             "decoder_of_words.layers.11"]
    run = RunRecord(name="r", host="pytorch", layers={name: [LayerRecord(
        step=step, layer=name, load=(1, 3), max_over_mean=1.5) for step in (1, 2)]
        for name in names})
    page = render(run)
    # what page.css shortens, and the end that it leaves whole
    labels = re.findall(r'title="([^"]*)"><i>([^<]*)</i>([^<]*)</span>', page)
    assert [(whole, end) for whole, _, end in labels] == [
        (names[0], "ech.layers.1"), (names[1], "rds.layers.1"), (names[2], "ds.layers.11")]
    assert all(begin + end == whole for whole, begin, end in labels)
    assert shortened("a" * 18, 18) == "a" * 18 and len(shortened("a" * 90, 18)) == 18


def test_plain_training_has_its_name_and_its_steps(tmp_path: Path) -> None:
    layer = MoELayer(MoEConfig(model_dim=8, num_experts=4))
    recorder = StatsRecorder(ObserveConfig(interval=20, jsonl=str(tmp_path / "stats.jsonl")))
    for step in range(60):
        recorder.add("layer0", layer(torch.randn(16, 8)).stats)
        recorder.step(step)
    facts = dict(summary(read_run(tmp_path)))
    assert facts["Host"] == "plain PyTorch" and facts["Steps"] == "60 (0 to 59)"


def test_settings_that_mean_the_same_do_not_differ() -> None:
    runs = [RunRecord(name=name, host="fairseq", settings=settings) for name, settings in (
        ("a", {"lr": "0.10", "adam-betas": "(0.9, 0.98)", "block-lr": "-1.0", "arch": "x"}),
        ("b", {"lr": "0.1", "adam-betas": "[0.9, 0.98]", "block-lr": "-1", "arch": "y"}))]
    table = next(f for section in comparison(runs) for f in section.figures
                 if f.id == "differences")
    assert [row[0] for row in table.rows] == ["arch"]


def test_a_folder_of_runs_gets_its_history_the_best_last(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("fairseq", "megatron"):
        shutil.copytree(DATA / host, tmp_path / "hosts" / host)
    assert main(["report", str(tmp_path / "hosts" / "fairseq")]) == 0
    assert main(["report", str(tmp_path)]) == 0
    path = tmp_path / "report.html"
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    page = path.read_text()
    rows = re.findall(r"<tr>(<td>.*?)</tr>", page.partition('id="history"')[2])[:2]
    best = [min(r.valid_loss for r in read_run(DATA / host).steps if r.valid_loss)
            for host in ("fairseq", "megatron")]
    order = ["fairseq", "megatron"] if best[0] > best[1] else ["megatron", "fairseq"]
    assert [order.index(host) for row in rows for host in order if f"hosts/{host}" in row] == [0, 1]
    # where it has a report, a link to it
    links = re.findall(r'<a href="([^#"]*)">', page)
    assert links == ["hosts/fairseq/report.html"]
    assert set(curves(page, "loss")) == {"hosts/fairseq", "hosts/megatron"}


def test_the_best_of_many_runs_are_compared() -> None:
    runs = [made_run(name=f"run{i}") for i in range(11)]
    for i, run in enumerate(runs):
        run.steps = [StepRecord(step=1, loss=float((7 * i) % 11))]
    runs.append(RunRecord(name="nothing", host="unknown"))
    table, *others = (f for section in history(runs) for f in section.figures)
    losses = [row[4] for row in table.rows]
    assert losses == ["–", *map(str, range(10, -1, -1))] and "best 8" in table.about
    (loss,) = (f for f in others if f.id == "loss")
    best = [run.name for run in runs[:11] if run.steps[0].loss < 8]
    assert {one.name for one in loss.lines} == set(best)


def test_a_comparison_says_how_the_others_differ_from_the_first() -> None:
    native, ours = made_run(name="native"), made_run(name="ours")
    native.steps = [StepRecord(step=s, loss=3.0, tokens_per_s=100.0) for s in (1, 2, 3)]
    ours.steps = [StepRecord(step=s, loss=3.0 + s / 10, tokens_per_s=150.0) for s in (2, 3, 4)]
    facts = next(f for section in comparison([native, ours]) for f in section.figures
                 if f.id == "facts")
    rows = {name: cells for name, *cells in facts.rows}
    assert rows["Tokens per second, compared with the first run"] == ["–", "1.5 times"]
    assert rows["Largest difference of the loss from the first run"] == ["–", "0.3 (step 3)"]


def test_plain_training_names_the_settings_that_its_layers_were_given(tmp_path: Path) -> None:
    model = torch.nn.ModuleList(MoELayer(MoEConfig(
        model_dim=8, num_experts=4, router=RouterConfig(top_k=k))) for k in (1, 2))
    TrainingSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: b,
                  settings=RunConfig(observe=ObserveConfig(jsonl=str(tmp_path / "stats.jsonl"))))
    row = json.loads((tmp_path / "stats.jsonl").read_text())
    # none that the layer chose itself, such as its all-to-all
    assert row["changed"] == {"model_dim": ["8", "0"], "num_experts": ["4", "8"],
                              "router.top_k": ["1, 2", "2"]}
    assert set(row["changed"]) < set(row["settings"])


def test_the_layout_is_said_in_words() -> None:
    run = made_run()
    for records in run.layers.values():
        records[-1].layouts["r=1 d=2 2dh auto"] = 3.0
        records[-1].layouts["r=0 d=1 linear auto"] = 1.0
    facts = dict(summary(run))
    assert facts["Layout, last record"] == (
        "tokens sent by all-to-all 2dh, 2 pieces along rows")
    run.layers["layer0"][-1].layouts.clear()
    run.layers["layer0"][-1].layouts["of another version"] = 1.0
    assert dict(summary(run))["Layout, last record"] == (
        "1 of 2 layers: of another version; "
        "1 of 2 layers: tokens sent by all-to-all 2dh, 2 pieces along rows")
