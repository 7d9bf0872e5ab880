"""What a layer costs the host: operations are counted, as the benchmark counts them; no time is
asserted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_plugin.cli.main import main, parse
from scripts.bench.studies import STUDIES, host
from scripts.bench.studies.host import TINY, measure_rank
from tests.distributed import run_gloo

NAMES = ("einsum", "dense")


@pytest.fixture(scope="module")
def one_rank() -> dict:
    """Ours, einsum and dense on this process."""
    return measure_rank(TINY, 1, 1, NAMES)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    """The same with the experts on two ranks."""
    return run_gloo(2, measure_rank, TINY, 2, 1, NAMES)


def test_all_candidates_are_counted(one_rank: dict, two_ranks: list[dict]) -> None:
    for found in (one_rank, *two_ranks):
        assert [r["name"] for r in found["results"]] == ["moe-plugin", *NAMES]
        assert not found["refused"]
        assert all(r[key] > 0 for r in found["results"]
                   for key in ("forward_us", "step_us", "backward_ops"))
    assert one_rank["results"][2]["forward_ops"] == 3  # two matmuls and an activation
    first, second = ([r["forward_ops"] for r in found["results"]] for found in two_ranks)
    assert first == second


def test_operations_of_a_forward_pass(one_rank: dict, two_ranks: list[dict]) -> None:
    """What the page promises: of 168 and 193 operations these are left."""
    for found in (one_rank, *two_ranks):
        mine = found["results"][0]
        assert mine["forward_ops"] <= 90 and mine["backward_ops"] <= 110


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_rank: dict,
                 capsys: pytest.CaptureFixture[str]) -> None:
    """The measured report stands for the ranks that the command would start."""
    asked = []
    monkeypatch.setattr(host, "run", lambda *args: asked.append(args) or one_rank)
    assert main(["bench", "host", "--rounds", "3", "--out", str(tmp_path)]) == 0
    assert asked == [(replace(TINY, gated=gated), ranks, 3)
                     for gated in (False, True) for ranks in (1, 2)]
    page = (tmp_path / "host.md").read_text()
    assert capsys.readouterr().out == page
    words = " ".join(page.split())
    assert all(words.count(" ".join(part.split())) == 4
               for part in host.parts(one_rank)[:2])
    assert "moe-plugin bench host" in page
    numbers = json.loads((tmp_path / "data" / "host.json").read_text())
    assert numbers == json.loads(json.dumps([one_rank] * 4))


def test_defaults_are_the_tiny_problem() -> None:
    args = STUDIES["host"].fill(parse(["bench", "host"]))
    assert (args.tokens, args.model_dim, args.hidden_dim, args.experts, args.top_k, args.threads) \
        == (TINY.tokens, TINY.model_dim, TINY.hidden_dim, TINY.experts, TINY.top_k, 1)


def test_ranks_divide_the_experts() -> None:
    with pytest.raises(ValueError, match="must be a divisor"):
        host.run(TINY, 3, 1)
