"""Commands around all-to-all and schedules of collectives: what they print, write and refuse."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moe_plugin.cli.main import main
from moe_plugin.planner import load_cluster
from moe_plugin.planner.forest import COLLECTIVES, Schedule, plan
from moe_plugin.planner.forest.presets import preset
from scripts.emulate import why_not
from tests.distributed import free_port
from tests.planner.msccl import check_result

# The commands around all-to-all: what they print, write and refuse.


CLUSTER = str(Path(__file__).parents[2] / "configs" / "clusters" / "a100_ib.yaml")
emulated = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def test_simulate_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([
        "simulate", "all-to-all", "--cluster", CLUSTER, "--ranks", "2,16,4096", "--sizes", "1MiB",
        "--json"
    ]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["ranks"], row["algorithm"])
            for row in rows} == {(n, a) for n in (2, 16, 4096) for a in ("linear", "2dh", "leader")}
    by_name = {row["algorithm"]: row["ms"] for row in rows if row["ranks"] == 16}
    assert round(by_name["linear"] / by_name["2dh"], 2) == 1.50


def test_simulate_tables_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "all-to-all", "--cluster", CLUSTER, "--plot",
                 str(tmp_path / "a.png")]) == 0
    out = capsys.readouterr().out
    assert out.count(" by each rank, predicted time:") == 4 and "| 4,096 ranks " in out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("args", "said"), [
    (["--ranks", "many"], "must be whole numbers"),
    (["--ranks", "12"], "12 ranks do not fill the nodes"),
    (["--sizes", "big"], "'big' is not a size"),
    (["--cluster", "/nowhere"], "cannot be read"),
])
def test_simulate_refuses(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "all-to-all", "--cluster", CLUSTER, *args]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("args", "said"), [
    (["--emulate", "8"], "'8' is not a grid"),
    (["--emulate", "2x2", "--rate", "fast"], "is not a rate"),
    (["--algorithms", "quick", "--emulate", "2x2"], "unknown all_to_all 'quick'"),
    (["--repeats", "0", "--emulate", "2x2"], "--repeats 0"),
    (["--sizes", "x", "--emulate", "2x2"], "is not a size"),
])
def test_bench_refuses(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "all-to-all", *args]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [
    "bench all-to-all", "calibrate", "bench train --host fairseq",
    f"simulate routing traces --cluster {shlex.quote(CLUSTER)} --model m.yaml --device d.yaml"])
@pytest.mark.parametrize("flag", ["--rate", "--delay", "--message-cost"])
def test_links_without_an_emulated_cluster_are_refused(
        command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(command), flag, "1"]) == 2
    said = capsys.readouterr().err
    assert f"{flag} '1' " in said and "Add --emulate" in said


@pytest.mark.parametrize("command", ["bench all-to-all", "calibrate"])
def test_without_ranks_the_error_says_how_to_start_the_command(
        command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert "`torchrun --nproc-per-node 2 -m moe_plugin.cli.main " + command + "`" in said


@emulated
@pytest.mark.distributed
def test_bench_on_an_emulated_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([
        "bench", "all-to-all", "--emulate", "2x2", "--rate", "200mbit", "--delay", "1ms", "--sizes",
        "16KiB,64KiB", "--repeats", "2", "--json", "--plot",
        str(tmp_path / "a.png")
    ]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rate_bit_s"] == 200e6 and told["delay_s"] == 1e-3
    cells = {(row["algorithm"], row["bytes"]): row for row in told["rows"]}
    assert set(cells) == {(name, size) for name in ("native", "linear", "2dh", "leader", "auto")
                          for size in (16384, 65536)}
    for row in told["rows"]:
        assert row["median_ms"] >= row["min_ms"] > row["floor_ms"] > 1.0 and row["cpu_ms"] > 0
    assert [cells[name, 16384]["messages"]
            for name in ("native", "linear", "2dh", "leader")] == [4, 4, 2, 1]
    assert cells["auto", 65536]["chosen"] in {"native", "linear", "2dh", "leader"}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@emulated
@pytest.mark.distributed
def test_calibrate_on_small_emulated_grids(tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    assert main([
        "calibrate", "--emulate", "2x2,3x2", "--sizes", "4KiB,64KiB", "--repeats", "2", "--name",
        "mine", "--out",
        str(file)
    ]) == 0
    cluster = load_cluster(file)
    assert (cluster.name, cluster.nodes, cluster.ranks_per_node) == ("mine", 3, 2)
    # which constants the time lands in is the machine's business; all of them zero would be none of
    # it
    assert cluster.phase_s + sum(link.alpha_s + link.beta_s
                                 for link in (cluster.inter, cluster.intra, cluster.host)) > 0
    assert "Relative error of the fit" in file.read_text() and "2x2, 3x2" in capsys.readouterr().out


@pytest.mark.distributed
def test_bench_on_own_ranks() -> None:
    """As torchrun would start it, on two ranks."""
    environment = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": ""
    }
    command = [
        sys.executable, "-m", "moe_plugin.cli.main", "bench", "all-to-all", "--sizes", "4KiB",
        "--repeats", "2", "--algorithms", "linear,2dh", "--topology", "1", "--json"
    ]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)},
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    out = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], out
    told = json.loads(out[0][0])
    assert out[1][0] == "" and told["ranks"] == 2 and "2 node(s) of 1 rank(s)" in told["topology"]
    assert [(row["algorithm"], row["floor_ms"], row["messages"])
            for row in told["rows"]] == [("linear", None, 1), ("2dh", None, 1)]


# `moe-plugin schedule`: what it prints and writes, and what it refuses.


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
