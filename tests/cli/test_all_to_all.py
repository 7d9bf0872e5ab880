"""The commands around all-to-all: what they print, write and refuse."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moe_plugin.cli.main import main
from moe_plugin.planner import load_cluster
from scripts.emulate import why_not
from tests.distributed import free_port

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
