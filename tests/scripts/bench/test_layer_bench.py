"""The benchmarks say what they promise, and refuse to compare layers that do not compute the same.
No time is asserted.
"""

from __future__ import annotations

import contextlib
import gc
import json

import pytest
import torch

from moe_plugin.cli.main import main
from scripts.bench import kernels as bench_kernels
from scripts.bench import layer, measure, plots
from scripts.bench.peers import peers
from scripts.bench.peers.local import einsum
from scripts.bench.problem import Problem

SMALL = Problem(tokens=64, model_dim=16, hidden_dim=24, experts=4, top_k=2)
OPTIONS = [
    "--tokens", "64", "--model-dim", "16", "--hidden-dim", "24", "--experts", "4", "--top-k", "2",
    "--threads", "1", "--rounds", "1"
]


@pytest.fixture(autouse=True)
def _what_is_there_stays() -> None:
    """The benchmark collects garbage before it measures memory. It takes seconds to look among the
    objects of all modules that the tests have imported.
    """
    gc.freeze()


def test_json_of_the_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer", *OPTIONS, "--peers", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"median_ms", "bound_ms", "ratio_to_bound", "peak_extra_mib", "tflops",
            "gbytes_per_s"} <= set(found)
    assert found["ratio_to_bound"] == pytest.approx(
        found["median_ms"] / found["bound_ms"]) and found["peers"] == []


def test_quick_measures_a_small_layer_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def run(problem: Problem, names: object, rounds: int) -> dict:
        measured.append((problem.tokens, problem.model_dim, problem.hidden_dim, rounds))
        return {}

    monkeypatch.setattr(layer, "run", run)
    for more in ([], ["--tokens", "32"]):
        with contextlib.suppress(Exception):  # a report without results has no page
            main(["bench", "layer", "--quick", "--json", *more])
    assert measured == [(256, 64, 128, 3), (32, 64, 128, 3)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peers_agree_and_are_drawn(dtype: str, gated: bool, tmp_path: object) -> None:
    problem = Problem(tokens=64, model_dim=16, hidden_dim=24, experts=4, top_k=2, dtype=dtype,
                      gated=gated)
    found = layer.run(problem, ["dense", "einsum"], rounds=1)
    assert [r["name"] for r in layer.results(found)] == ["moe-plugin", "dense", "einsum"]
    dense, einsum_ = found["peers"]
    assert dense["error"] is None and einsum_["error"] <= layer.TOLERANCE[dtype]
    assert "einsum" in "".join(layer.parts(found))
    plots.layer_plot(found, f"{tmp_path}/plot.svg")


def test_peers_agree_on_one_choice_a_token() -> None:
    problem = Problem(tokens=64, model_dim=16, hidden_dim=24, experts=4, top_k=1)
    names = [n for n in ("einsum", "megatron") if peers.entry(n).why_not() is None]
    found = layer.run(problem, names, rounds=1)
    assert [r["name"] for r in layer.results(found)] == ["moe-plugin", *names]


def test_a_peer_that_computes_something_else_is_an_error(own_entries: None) -> None:
    @contextlib.contextmanager
    def off(problem, data):  # noqa: ANN001, ANN202
        with einsum(problem, data) as candidate:
            yield type(candidate)(lambda x: (candidate.forward(x)[0] * 1.01, []),
                                  candidate.parameters)

    peers.register("off")(off)
    with pytest.raises(ValueError, match="off's output differs from ours"):
        layer.run(SMALL, ["off"], rounds=1)


def test_a_peer_without_balance_loss_is_an_error(own_entries: None) -> None:
    @contextlib.contextmanager
    def unbalanced(problem, data):  # noqa: ANN001, ANN202
        with einsum(problem, data) as candidate:
            yield type(candidate)(lambda x: (candidate.forward(x)[0], []), candidate.parameters)

    peers.register("unbalanced")(unbalanced)
    with pytest.raises(ValueError, match="unbalanced computes no balance loss"):
        layer.run(SMALL, ["unbalanced"], rounds=1)


def test_slow_candidates_are_measured_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "cpu_seconds", lambda candidate: candidate())
    device, candidates = torch.device("cpu"), [lambda: 1.0, lambda: 2.9, lambda: 3.1]
    assert [times.seconds
            for times in measure.interleaved(candidates, device, rounds=9, slow=3.0)] == [[1.0] * 9,
                                                                                          [2.9] * 9,
                                                                                          [3.1] * 3]
    assert [len(times.seconds)
            for times in measure.interleaved(candidates, device, rounds=9)] == [9, 9, 9]


def test_bad_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer", *OPTIONS, "--top-k", "9"]) == 2
    assert "top_k=9 is out of bounds: must be <= experts=4" in capsys.readouterr().err


def test_kernels() -> None:
    found = bench_kernels.run(SMALL, rounds=1)
    assert {r["operation"] for r in found["results"]} >= {
        "route_top_k", "take_rows", "sum_rows", "dot_rows", "expert_matmul_act",
        "expert_weight_grad"
    }
    assert all(r["chosen"] and r["implementation"] == "torch" for r in found["results"])
    assert "expert_matmul_act" in "".join(bench_kernels.parts(found))


def test_least_work() -> None:
    assert SMALL.work() == (3 * 2 * (64 * 2) * 16 * 24 * 2,
                            4 * (3 * 4 * 16 * 24 * 2 + 5 * 64 * 16))
    data = layer.make_data(SMALL)
    assert sum(layer.loads(SMALL,
                           data)) == 128 and not torch.equal(data.x_TD, torch.zeros_like(data.x_TD))


@pytest.mark.megatron
def test_the_megatron_peer_leaves_no_group_behind() -> None:
    """A group that stays would be ended in a process forked later, whose threads are gone."""
    if peers.entry("megatron").why_not() is not None:
        pytest.skip("megatron-core is not installed")
    layer.run(SMALL, ["megatron"], rounds=1)
    from megatron.core import parallel_state

    left = [name for name, value in vars(parallel_state).items()
            if isinstance(value, torch.distributed.ProcessGroup)]
    assert left == []
