"""Studies on emulated clusters: what their pages say of their numbers, and that they run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_plugin.comm.forest import plan_few
from moe_plugin.planner.choice import SENDS
from scripts.bench.studies import STUDIES, once, overlap, spill
from scripts.bench.studies.collectives import ring_bound_s, with_ratios
from scripts.emulate import networks, why_not

DATA = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "data"


def measured(study: str, folder: Path, words: str) -> dict[str, Any]:
    """The numbers that the command of a study writes."""
    command = [sys.executable, "-m", "moe_plugin.cli.main", "bench", study, "--out", str(folder)]
    subprocess.run([*command, *words.split()], check=True, timeout=500)
    return json.loads((folder / "data" / f"{study}.json").read_text())


def on_emulated_nodes(test: Any) -> Any:
    for mark in (pytest.mark.slow, pytest.mark.distributed,
                 pytest.mark.skipif(bool(why_not()), reason=str(why_not()))):
        test = mark(test)
    return test


# -- overlap


def test_the_page_compares_with_the_larger_of_exchange_and_products() -> None:
    names = overlap.layouts([2], ["rows", "peers"])
    assert list(names) == ["d=1", "d=2 rows", "d=2 peers"]
    ranks = [{"names": list(names), "seconds": {
        "exchange": [0.1], "products forward": [0.16 + rank / 25], "products backward": [0.15],
        **{f"{name} {way}": [0.1 * (1 + rank)] * 3 for name in names
           for way in ("forward", "backward")}}} for rank in range(2)]
    cell = {"rate": 5e7, **overlap.summary(ranks)}
    page = STUDIES["overlap"].page(
        {"rounds": 3, "tokens": 8, "load": [0, 0], "cells": {"cpu": [cell]}})
    # of the slowest rank
    assert "| 50     | forward   | 100      | 200     | 200 (1.00) |" in page
    assert "| 50     | backward  | 100      | 150     | 200 (1.33) |" in page
    assert "at most 1.10 times the limit in 1 of 2 rows." in page


@on_emulated_nodes
def test_overlap_runs(tmp_path: Path) -> None:
    cells = measured("overlap", tmp_path, "--rounds 1 --rates 1e9 --degrees 2 --tokens 16")["cells"]
    assert list(cells) == ["cpu", "wait", "many", "s2"]
    for name, (cell,) in cells.items():
        cuts = {"many": ["rows", "experts", "peers"], "s2": ["rows"]}.get(name, ["rows", "peers"])
        assert list(cell["forward"]["total"]) == ["d=1", *(f"d=2 {cut}" for cut in cuts)]
    assert (tmp_path / "overlap.md").read_text().count("\n| 1000 ") == 8


# -- rows on other ranks


def test_what_stands_is_measured_with_replicas_and_without() -> None:
    """In the committed numbers; a layer that never ends a step has no replicas to measure."""
    assert spill.STANDING not in spill.POLICIES
    report = json.loads((DATA / "spill.json").read_text(encoding="utf-8"))
    times = report[spill.STANDING]["times"]
    assert list(times) == list(spill.LOADS)
    hot, even = times[spill.HOT], times["even"]
    assert hot["place"]["rows"] > 0 == even["place"]["rows"]
    assert hot[spill.STANDING]["rows"] < hot["never"]["rows"]
    assert even[spill.STANDING]["rows"] == even["never"]["rows"]


@on_emulated_nodes
def test_it_measures_what_stands_and_keeps_the_rest(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(DATA / "spill.json", tmp_path / "data")
    before = json.loads((tmp_path / "data" / "spill.json").read_text())
    after = measured("spill", tmp_path, "--parts standing --rounds 2 --rate 1e9")
    assert after["others"] == before["others"]
    assert after["standing"]["rounds"] == 2
    assert after["standing"]["times"]["even"]["place"]["rows"] == 0


# -- collectives


@pytest.mark.parametrize(("shape", "ratio"), [
    ("equal", 1.0), ("slow-node", 1.0), ("ring", 2.0), ("two-clusters", 7 / 4)])
def test_the_links_predict_how_much_slower_a_ring_is(shape: str, ratio: float) -> None:
    """Eight nodes: a ring uses one direction; over a thin link it takes 7 shards where 4 suffice.
    """
    network = networks.SHAPES[shape](8, 40e6)
    found = ring_bound_s(network, 1e6) / plan_few(network, "all_gather").seconds(1e6)
    assert found == pytest.approx(ratio, rel=1e-6)


def test_the_page_compares_with_the_faster_of_gloo_and_ring() -> None:
    cells = [with_ratios({
        "network": "ring of nodes", "ranks": 8, "kind": kind, "bytes": size, "gloo_s": 2.2,
        "ring_s": 2.1, "native_s": 2.2, "forest_s": forest_s, "chosen": name, "bound_s": 1.0,
        "ring_bound_s": 2.0}) for kind, size, forest_s, name in (
                 ("all_gather", 1 << 20, 1.1, "forest"), ("all_gather", 1 << 22, 1.0, "forest"),
                 ("all_reduce", 1 << 22, 3.0, "forest"))]
    page = STUDIES["collectives"].page({"cells": cells, "hosts": [{
        "host": "fairseq", "native_s": 0.5, "forest_s": 0.4, "predicted_saved_s": 0.11,
        "losses": [1.0], "apart": 0.001}], "cpus": 2, "load": [0, 0]})
    said = " ".join(page.split())
    assert "| 2.00 | 1.91 | forest |" in said and "| 2.00 | 2.10 | forest |" in said
    assert ("For 1 of the 2 collectives of the largest size, the measured ratio is within 15% of "
            "the predicted ratio.") in said
    assert "In 2 of 3 rows, `auto` chose" in said
    assert "| fairseq | 500 | 400 | 110 | 100 | 0.001 |" in said


@on_emulated_nodes
def test_collectives_run(tmp_path: Path) -> None:
    report = measured("collectives", tmp_path,
                      "--networks ring --sizes 65536 --repeats 1 --steps 5")
    assert [cell["kind"] for cell in report["cells"]] == ["all_gather", "reduce_scatter",
                                                         "all_reduce"]
    assert [host["host"] for host in report["hosts"]] == ["fairseq", "megatron"]
    assert all(host["apart"] < 0.01 for host in report["hosts"])


# -- tokens sent once


def test_the_page_compares_with_rows_and_with_the_formula() -> None:
    ranks = [{"seconds": {"rows": [0.1, 0.4 + rank / 10, 0.9], "ranks": [0.2] * 3,
                          "nodes": [0.1] * 3, "auto": [0.11] * 3}} for rank in range(2)]
    cell = {"width": 8, "k": 8, "seconds": once.medians(ranks), "layout": "r=1 d=1 linear auto"}
    page = STUDIES["once"].page({"about": [], "exchange-2x2": {
        "grid": "2x2", "rounds": 3, "tokens": 8, "rate": 1e9, "load": [0, 0], "cells": [cell]}})
    assert ("| 8     | 8 | 500 (1.00) | 200 (0.40) | 100 (0.20) | 110 (0.22) | 1.10 " in page
            and "| 0.45 " in page and "| 0.25 " in page)


def test_columns_in_pieces_and_the_floor_are_on_the_page_where_they_were_measured() -> None:
    seconds = {"rows": 1.0, "ranks": 0.8, "nodes": 0.7, "ranks, d=2": 0.6, "nodes, d=2": 0.5,
               "auto": 0.55}
    part = {"grid": "8x4", "rounds": 3, "tokens": 8, "rate": 1e9, "load": [0, 0], "cells": [
        {"width": 512, "k": 8, "seconds": seconds, "layout": "r=1 d=2 linear auto"}]}
    page = STUDIES["once"].page({"about": [], "exchange-8x4": part})
    [row] = [line for line in page.splitlines() if line.startswith("| 512")]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[5:10] == ["700 (0.70)", "600 (0.60)", "500 (0.50)", "550 (0.55)", "1.10"]
    # rows of 2,048 bytes to 7/8 x 8 (1 - (7/8)^8) other nodes, 8 pairs of 6; as rows 8 of them
    assert cells[-2] == f"{(8 * (1 - (7 / 8)**8) * 2048 + 48) / (8 * 2048):.2f}" == "0.66"
    for name in once.IN_PIECES:
        del seconds[name]
    assert "floor" not in STUDIES["once"].page({"about": [], "exchange-8x4": part}).lower()


def test_whole_steps_are_compared_with_todays_best() -> None:
    seconds = dict(zip(once.SIDES, (0.2, 0.4, 0.3, 0.1, 0.1), strict=True))
    cell = {"shape": "width 8", "seconds": seconds, "losses": dict.fromkeys(seconds, 1.0),
            "layouts": dict.fromkeys(seconds, "r=1 d=1 linear auto")}
    page = STUDIES["once"].page({"about": [], "megatron-4x2": {
        "host": "megatron", "grid": "4x2", "steps": 3, "rate": 1e9, "load": [0, 0],
        "cells": [cell]}})
    assert "## Whole steps in Megatron-core, 4x2" in page and "| 100 (0.50)" in page


def test_the_predicted_table_has_all_nodes_and_what_is_published() -> None:
    page = STUDIES["once"].page({"about": [], "predicted": [2, 8, 512]})
    lines = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    assert [line[1].strip() for line in lines[2:]] == ["2", "8", "512"]
    assert lines[3][-4].strip() == "51" and lines[4][-4].strip() == ""


def test_parts_that_are_there_are_left_out(tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_plugin.cli.main import main

    seen = []

    def part(name: str) -> tuple:
        return (lambda args: seen.append(name) or [name], lambda found: iter(found))

    monkeypatch.setattr(once, "PARTS", {name: part(name) for name in "abc"})
    monkeypatch.setattr(once, "OPTIONS", {})
    monkeypatch.setattr("scripts.bench.study.NEEDS", {"nodes": lambda: None})
    words = ["bench", "once", "--out", str(tmp_path)]
    assert main([*words, "--parts", "b"]) == 0 and main([*words, "--resume"]) == 0
    assert seen == ["b", "a", "c"]
    assert sorted(json.loads((tmp_path / "data" / "once.json").read_text())) == ["a", "b", "c"]


@on_emulated_nodes
def test_once_runs(tmp_path: Path) -> None:
    found = measured("once", tmp_path, "--quick")
    assert list(found["exchange-2x2"]["cells"][0]["seconds"]) == [
        *SENDS, *once.IN_PIECES, "auto"]
    assert list(found["megatron-2x2"]["cells"][0]["seconds"]) == list(once.SIDES)
