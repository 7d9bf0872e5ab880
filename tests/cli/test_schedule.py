"""`moe-plugin schedule`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moe_plugin.cli.main import main
from moe_plugin.planner.forest import COLLECTIVES, Schedule, plan
from moe_plugin.planner.forest.presets import preset
from tests.planner.msccl import check_result

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SVG = "{http://www.w3.org/2000/svg}"


def schedule(*words: str) -> int:
    return main(["schedule", *words])


def test_it_prints_the_optimum_and_its_proof(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule("--topology", str(CONFIGS / "networks/thin_link.yaml"), "--size", "100MB") == 0
    printed = capsys.readouterr().out
    for said in ("thin_link: 8 ranks, 2 switches, 18 wires",
                 "all_gather: 6.25 GB/s of result, the optimum; 1/x* = 32/25",
                 "right (4 of 8 ranks): 4 shards must leave; 1 wire leads out of it, 3.125 GB/s",
                 "4 / 3.125 = 32/25 s per GB of a shard", "k = 1 trees per rank",
                 "at least 16 ms", "with 64 chunks"):
        assert said in printed, said
    rows = {line[:28].strip(): line.split()[-2] for line in printed.splitlines()
            if line.endswith("64")}
    assert list(rows) == ["forest", "ring", "double binary tree", "recursive halving/doubling"]
    assert rows["forest"] == "1.00x" and all(float(row[:-1]) >= 1 for row in rows.values())


@pytest.mark.parametrize("words, said", [
    (["ring:8", "--trees", "1"], "87.50 % of the optimum, which needs more trees (2.28571 GB/s)"),
    (["dgx-a100:2"], "All nodes but n0.gpu0 (15 of 16 ranks): 15 shards must leave; 2 wires lead "
                     "out of it, 325 GB/s in total. 15 / 325 = 3/65"),
    (["star:4", "--collective", "reduce_scatter"], "which must enter"),
    (["star:4", "--collective", "all_reduce"], "must enter, then leave"),
    (["ring:4", "--collective", "all_reduce", "--overlap"],
     "Each rank separately, 4 parts: every part except the root's must send its share of a "
     "piece and receive the sum; 8 GB/s lead out of the parts in total. 2 (4 - 1) / 8 = 3/4 s per "
     "GB"),
    (["star:1"], "With one rank, nothing moves."),
])
def test_it_says_what_the_schedule_is(words: list[str], said: str,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule("--topology", *words, "--chunks", "4") == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("collective", [*COLLECTIVES, "overlap"])
def test_it_writes_files_that_can_be_read(collective: str, tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "msccl", "svg", "html")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    words = (["all_reduce", "--overlap"] if collective == "overlap" else [collective])
    assert schedule("--topology", "mesh:2x3", "--collective", *words, *options) == 0
    printed = capsys.readouterr().out
    assert all(f"wrote {path}" in printed for path in files.values())
    assert Schedule.from_json(files["json"].read_text()) == plan(
        preset("mesh:2x3"), words[0], overlap=len(words) > 1)
    check_result(files["msccl"].read_text())
    picture = ElementTree.fromstring(files["svg"].read_text())
    titles = [title.text for title in picture.iter(f"{SVG}title")]
    assert set(preset("mesh:2x3").ranks) <= set(titles)
    assert sum("to and from" in title for title in titles) == 7
    page = files["html"].read_text()
    assert "Why nothing is faster" in page and "double binary tree" in page and "<svg " in page
    assert not re.search(r"(src|href)=\"(?!#|data:)", page), "loads something"


def within(picture: ElementTree.Element) -> None:
    """Every circle, and every text's beginning, is inside the picture; circles do not overlap."""
    width, height = float(picture.get("width")), float(picture.get("height"))
    circles = [(float(c.get("cx")), float(c.get("cy")), float(c.get("r")))
               for c in picture.iter(f"{SVG}circle")]
    for x, y, r in circles:
        assert r <= x <= width - r and r <= y <= height - r
    for words in picture.iter(f"{SVG}text"):
        assert 0 <= float(words.get("x")) <= width and 0 <= float(words.get("y")) <= height
    for i, (x, y, r) in enumerate(circles):
        for u, v, s in circles[:i]:
            assert (x - u) ** 2 + (y - v) ** 2 > (0.8 * (r + s)) ** 2, "two nodes at one place"


@pytest.mark.parametrize("name", ["ring:2", "star:8", "mesh:1x5", "torus:4x4", "dgx-a100:2",
                                  "mi250:2", "fat-tree:4", "dragonfly:2x2x1", "star:40"])
def test_pictures_are_readable(name: str) -> None:
    from moe_plugin.cli.planning.pictures import drawing

    made = plan(preset(name), "all_gather", 1)
    text = drawing(made)
    within(ElementTree.fromstring(text))
    assert text == drawing(made)


def test_one_way_wires_have_arrows_and_large_networks_are_not_drawn() -> None:
    from moe_plugin.cli.planning.pictures import drawing
    from moe_plugin.planner.forest import Network

    ring = Network.from_dict({"ranks": 3, "one_way": [["0", "1", 2], ["1", "2", 2], ["2", "0", 2]]})
    assert "0 to 1: 2 GB/s" in drawing(plan(ring, "all_gather"))
    large = replace(plan(ring, "all_gather"), network=preset("star:300"))
    with pytest.raises(ValueError, match="has 301 nodes, which is too many to draw"):
        drawing(large)


@pytest.mark.parametrize("words, said", [
    (["--topology", "nothing:2"], "neither a file nor a preset. Available presets: ring:8"),
    (["--topology", "missing.yaml"], "(no such file)"),
    (["--topology", "ring:4", "--size", "many"], "is not a size"),
    (["--topology", "ring:4", "--size", "0"], "must be at least 1"),
    (["--topology", "ring:4", "--chunks", "0"], "must be at least 1"),
    (["--topology", "ring:4", "--trees", "0"], "trees=0"),
    (["--topology", "ring:4", "--nodes", "2"], "after its colon"),
    (["--topology", "ring:4", "--overlap"], "overlap"),
    (["--topology", "ring:4", "--svg", "no/folder.svg"], "there is no folder"),
    (["--topology", "star:40", "--msccl", "x.xml"], "MSCCL supports at most 32 peers"),
    (["--topology", "ring:4@0"], "must be > 0"),
])
def test_errors_say_what_to_do(words: list[str], said: str, tmp_path: Path,
                               monkeypatch: pytest.MonkeyPatch,
                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert schedule(*words) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_it_needs_no_torch() -> None:
    code = ("import sys; from moe_plugin.cli.main import main; "
            "main(['schedule', '--topology', 'ring:4']); assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
