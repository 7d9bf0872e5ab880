"""`moe-plugin recommend`: on one rank and on two, what is kept, what is refused, what is written.

No assertion depends on what a clock says.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_plugin.cli.main import main
from moe_plugin.cli.recommend import CONFIG, LINE, NETWORK, PROCESSOR
from moe_plugin.config import both_from_yaml, from_yaml
from moe_plugin.planner.units import parse_size
from tests.cli.examples import ROOT, Shell, commands
from tests.distributed import free_port
from tests.preloaded import Server

MODEL = """
layers: 2
model_dim: 32
ffn_dim: 64
heads: 2
vocab: 257
sequence: 32
global_batch: 8
moe_every: 2
experts: 4
top_k: 2
element_bytes: 4
"""
FEW = ("--repeats", "2", "--device", "cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.yaml").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def recommend(*flags: str) -> int:
    return main(["recommend", "--model", "model.yaml", "--out", "out", *flags])


def on_two_ranks(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         "-m", "moe_plugin.cli.main", "recommend", "--model", "model.yaml", "--out", "out",
         *flags], check=False, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})


def check_line(text: str, folder: Path) -> None:
    """The host's own parser takes every word."""
    [words] = commands(text)
    assert words.pop(0).startswith("OMP_NUM_THREADS=")
    Shell(folder)(words, runs=False)


def test_one_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend(*FEW, "--data", "my/data") == 0
    first = capsys.readouterr().out
    assert re.search(r"predicted step: .* \(device .*: the fit is off by \d+% on average\)", first)
    check_line(first[first.index("OMP_NUM_THREADS"):], folder)
    assert "--data-path my/data" in first and not Path("out", NETWORK).exists()
    assert from_yaml(str(Path("out", CONFIG))).parallel.mode == "fixed"
    subprocess.run(["bash", "-n", str(Path("out", LINE))], check=True)

    assert recommend(*FEW, "--data", "my/data", "--json") == 0  # from what was kept
    second = json.loads(capsys.readouterr().out)
    assert second["launch"] in first and second["fit_errors"]["device"] > 0
    assert second["fit_errors"]["cluster"] is None
    seconds = [plan["seconds"] for plan in second["plans"]]
    assert seconds == sorted(seconds) and len(seconds) > 1

    assert recommend(*FEW, "--memory", "1KiB") == 2
    assert "no plan fits 1 KiB per rank" in capsys.readouterr().err


def test_little_memory_recomputes_the_same_layers_in_plan_and_host(
        folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend(*FEW, "--memory", "1KiB") == 2
    least = re.search(r"the smallest needs ([\d.]+ \w+)", capsys.readouterr().err)
    assert least is not None
    assert recommend(*FEW, "--json", "--memory", str(parse_size(least[1]) - 2000)) == 0
    found = json.loads(capsys.readouterr().out)
    assert all("recompute" in plan["activations"] for plan in found["plans"])
    _, run = both_from_yaml(str(Path("out", CONFIG)))
    assert run.offload.each_layer() == found["plans"][0]["activations"]
    assert recommend(*FEW, "--memory", str(parse_size(least[1]) - 2000)) == 0
    assert ": time per step, 1 of 2 layers recomputed" in capsys.readouterr().out


def test_what_was_kept_is_for_ranks_like_these(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend(*FEW) == 0
    Path("model.yaml").write_text(MODEL.replace("ffn_dim: 64", "ffn_dim: 128"))
    capsys.readouterr()
    assert recommend(*FEW) == 0
    assert "measured again, 'model was model_dim=32" in capsys.readouterr().out
    assert recommend(*FEW) == 0
    assert "processor.json: reused" in capsys.readouterr().out
    Path("out", PROCESSOR).write_text("[")
    assert recommend(*FEW) == 0
    assert "processor.json: measured again" in capsys.readouterr().out
    assert recommend(*FEW, "--fresh") == 0
    assert "processor.json" not in capsys.readouterr().out


@pytest.mark.parametrize("flags, text", [
    (("--nodes", "2"), "--nodes 2 needs measurements of the exchange between two nodes"),
    (("--ranks-per-node", "4"),
     "--ranks-per-node 4 needs measurements of the exchange between two ranks of a node"),
    (("--repeats", "0"), "--repeats 0 must be >= 1"),
    (("--top", "-1"), "--top -1 must be >= 1"),
    (("--memory", "much"), "'much' is not a size"),
    (("--host", "fairseq", "--script", "x.py"), "--script 'x.py' is for Megatron only"),
])
def test_errors(flags: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend(*FEW, *flags) == 2
    assert text in capsys.readouterr().err


def test_files_that_cannot_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").write_text("a file")
    assert recommend(*FEW) == 2
    assert "out cannot be written" in capsys.readouterr().err
    Path("model.yaml").write_text("layers: 0\nmodel_dim: 1\nffn_dim: 1\n")
    assert recommend(*FEW) == 2
    assert "model layers=0 must be from 1" in capsys.readouterr().err


@pytest.mark.distributed
def test_two_ranks(folder: Path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    done = Server("tests.faults.preload").run(2, recommend, *FEW, "--host", "fairseq", cwd=folder,
                                              environment={**os.environ, **place})
    assert (done.code, done.results) == (0, [0, 0]), done.log
    assert done.log.count("predicted step: ") == 1, done.log  # rank 0 alone
    assert "; cluster measured: the fit is off by " in done.log
    text = re.search(r"OMP_NUM_THREADS(?:.*\\\n)*.*", done.log)[0]
    check_line(text, folder)
    assert "--nproc_per_node 2" in text and "fairseq-train" in text


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_plan_again_from_what_was_kept() -> None:
    assert on_two_ranks(*FEW).returncode == 0
    kept = Path("out", NETWORK).read_text()
    again = on_two_ranks(*FEW, "--json", "--ranks-per-node", "8")
    assert again.returncode == 0, again.stderr
    assert Path("out", NETWORK).read_text() == kept
    values = json.loads(again.stdout)
    assert "--nproc_per_node 8" in values["launch"]
