"""Whole audits over gloo ranks: a step that is right, steps with a fault, ranks that stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_plugin.cli.main import main
from scripts.audit import Audit, audit, load

pytestmark = pytest.mark.distributed
SEEDED = {
    "ExtraAverage": ("factor", "1/EP", "extra average"),
    "NoDenseReduce": ("own tokens only", "", "missing all-reduce"),
    "CountedTwice": ("factor", "2", "counted twice"),
    "ExpertsTwiceInNorm": ("counts an expert twice", "", "with all parameters and again"),
}


def seeded(name: str, *ranks: int, timeout_s: float = 60) -> Audit:
    return audit(load(f"tests.scripts.audit.seeded:{name}"), ranks, timeout_s=timeout_s)


def test_a_right_step_has_no_fault() -> None:
    found = seeded("Right", 1, 2, 4)
    assert found.findings == [] and found.left_out == [] and len(found.tried) == 35
    assert found.largest_error < 1e-10  # it computes in float64


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_is_named(name: str) -> None:
    pattern, factor, cause = SEEDED[name]
    first = seeded(name, 1, 2).findings[0]
    assert first.pattern == pattern and cause in first.cause, first
    assert not factor or first.factor.split(" = ")[0] == factor


@pytest.mark.slow
@pytest.mark.parametrize("name, pattern, factor", [
    ("NotDivided", "factor", "EP"), ("SummedLoss", "factor", "micro-batches"),
    ("RecomputedTwice", "factor", "2"), ("NoReplicaReduce", "own group only", "EP"),
    ("OnlyLastMicroBatch", "last micro-batch only", ""), ("MeanOfMeans", "mean of means", ""),
    ("RouterDetached", "missing", ""),
    ("LocalExpertsInNorm", "counts only this rank's experts", ""),
    ("ReplicasInNorm", "counts an expert for each replica", "")])
def test_other_faults_over_four_ranks(name: str, pattern: str, factor: str) -> None:
    first = seeded(name, 1, 2, 4).findings[0]
    assert (first.pattern, first.factor.split(" = ")[0]) == (pattern, factor), first


@pytest.mark.parametrize("name, where", [("SkipsCollective", "in all_reduce (seeded.py:"),
                                         ("EndsEarly", "at the end of the step")])
def test_a_hang_names_the_rank_that_left_out_a_collective(name: str, where: str) -> None:
    found, = seeded(name, 2, timeout_s=4).findings
    assert found.pattern == "hang" and "rank 1 (without tokens) did not call" in found.cause
    assert f"rank 1 (without tokens) {where}" in found.example
    assert "rank 0 in all_to_all_single (seeded.py:" in found.example


def test_an_error_names_its_rank_and_line() -> None:
    found, = seeded("Raises", 2).findings
    assert found.pattern == "error"
    assert found.cause.startswith("rank 1: RuntimeError: no kernel for this (seeded.py:")


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = Path(__file__).with_name("seeded.py")
    assert main(["audit", f"{path}:Right", "--ranks", "1"]) == 0
    assert "right in 8 steps" in capsys.readouterr().out
    assert main(["audit", f"{path}:CountedTwice", "--ranks", "1", "--json"]) == 1
    one, = json.loads(capsys.readouterr().out)["audits"]
    assert one["state"] == "wrong" and one["findings"][0]["factor"] == "2"


@pytest.mark.parametrize("words, said", [
    (["nowhere.py"], "'nowhere.py' is not a file. Pass the path of a .py file"),
    (["nowhere"], "'nowhere' is neither a known target nor a module"),
    (["tests.scripts.audit.made"], "has no function build and no step"),
    (["tests.scripts.audit.seeded:Wrong"], "has no 'Wrong'"),
    (["plain", "--ranks", "0"], "--ranks '0' must be numbers in 1..64")])
def test_refusals(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *words]) == 2
    assert said in capsys.readouterr().err


def test_what_is_not_installed_is_no_fault(capsys: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.audit import targets

    monkeypatch.setattr(targets, "not_installed", lambda *names: f"{names[0]} is not installed")
    assert main(["audit", "megatron"]) == 0
    assert capsys.readouterr().out == "megatron: megatron.core is not installed\n"


@pytest.mark.slow
@pytest.mark.parametrize("name, module", [
    ("plain", "torch"), ("transformers", "transformers"),
    ("transformers-all-reduce", "transformers"),
    ("megatron", "megatron.core"), ("megatron-per-token", "megatron.core")])
def test_installed_frameworks_are_right(name: str, module: str,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(module)
    assert main(["audit", name, "--ranks", "2"]) == 0, capsys.readouterr().out
