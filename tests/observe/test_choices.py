"""Experts that tokens choose together: counted over ranks and calls, once where activations are
recomputed, and only where it is asked for.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin import MoELayer
from moe_plugin.checkpoint.resize import change_expert_parallel, reorder_experts
from moe_plugin.comm import Comm, LocalComm, run_simulated
from moe_plugin.config import ObserveConfig, RunConfig, from_dict
from moe_plugin.hosts.plain.run import TrainingSteps
from moe_plugin.observe.choices import ChoiceLog
from moe_plugin.planner.order_files import load_choices
from moe_plugin.resilience.overflow import StepStart
from moe_plugin.routing.replay import checkpoint
from tests.seeds import seeded

pytestmark = pytest.mark.fast


class Model(nn.Module):
    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self.moe = MoELayer(from_dict({"model_dim": 8, "num_experts": 4, "router": {
            "name": "group_limited", "groups": 2, "group_top_k": 2, "top_k": 2}}), comm)
        self.chosen: list[Tensor] = []

    def forward(self, x_TD: Tensor) -> Tensor:
        self.chosen.append(self.moe.router(x_TD.detach()).ids_TK)  # a call of the router, too
        return checkpoint(lambda x: self.moe(x).output, x_TD)


def trained(comm: Comm, path: Path, steps: int) -> list[Tensor]:
    with seeded(comm.rank):
        model = Model(comm)
    with torch.no_grad():
        model.moe.router.weight_ED.copy_(torch.eye(4, 8))
    run = TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.0),
                        lambda model, x: model(x).square().mean(), world=comm,
                        settings=RunConfig(observe=ObserveConfig(choices=str(path), interval=2)))
    for _ in range(steps):
        run(torch.randn(6, 8))
    run.close()
    return model.chosen


def test_counts_of_all_ranks_since_the_last_record(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    ranks = run_simulated(2, lambda comm: trained(comm, path, 4))
    found = load_choices(path)["moe"]
    recent = [ids_TK.tolist() for chosen in ranks for ids_TK in chosen[2:]]
    wanted = Counter(pair for ids in recent for chosen in ids
                     for pair in itertools.product(chosen, repeat=2))
    # every call's choices are in twice: the model calls the router, and so does the layer
    assert [[count // 2 for count in row] for row in found.pairs_EE] == [
        [wanted[e, f] for f in range(4)] for e in range(4)]
    assert (found.tokens, found.groups) == (2 * 2 * 2 * 6, 2)
    mine = Counter(tuple(chosen) for ids_TK in ranks[0][2:] for chosen in ids_TK.tolist())
    assert Counter(found.sets) == {chosen: 2 * count for chosen, count in mine.items()}


def test_layers_have_no_hook_without_it(tmp_path: Path) -> None:
    model = Model(LocalComm())
    TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, x: m(x).sum(),
                  settings=RunConfig(observe=ObserveConfig(jsonl=str(tmp_path / "stats.jsonl"))))
    assert not model.moe.router._forward_hooks


def test_a_router_that_knows_places_is_refused(tmp_path: Path) -> None:
    layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 4, "router": {
        "name": "topology_quota"}}))
    with pytest.raises(ValueError, match="router TopologyQuotaRouter of layer 'a'.*must be none"):
        ChoiceLog(str(tmp_path / "x.json"), {"a": layer}, LocalComm())


def log_of(path: Path, comm: Comm | None = None, **settings: Any) -> tuple[MoELayer, ChoiceLog]:
    comm = comm or LocalComm()
    layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 4, **settings}), comm)
    return layer, ChoiceLog(str(path), {"a": layer}, comm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_counts_are_exact_in_mixed_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    """Above 256 bfloat16 has not every whole number."""
    path = tmp_path / "choices.json"
    layer, log = log_of(path, router={"top_k": 4})
    torch.set_default_dtype(dtype)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            layer.router(torch.randn(3001, 8))
    finally:
        torch.set_default_dtype(torch.float32)
    log.write()
    assert load_choices(path)["a"].pairs_EE == [[3001] * 4] * 4


def test_a_pipeline_stage_without_moe_layers_writes_nothing(tmp_path: Path) -> None:
    ChoiceLog(str(tmp_path / "x.json"), {}, LocalComm()).write()
    assert not (tmp_path / "x.json").exists()


def test_a_record_that_cannot_be_written_is_lost(tmp_path: Path,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "made" / "x.json"
    layer, log = log_of(path)
    path.mkdir()
    for _ in range(2):
        layer.router(torch.randn(5, 8))
        log.write()
    assert caplog.text.count("a record is lost") == 1
    path.rmdir()
    layer.router(torch.randn(5, 8))
    log.write()
    assert load_choices(path)["a"].tokens == 5


def test_all_ranks_know_that_the_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def said(comm: Comm) -> str:
        with pytest.raises(ValueError, match="observe.choices=") as error:
            log_of(tmp_path / "file" / "x.json", comm)
        return str(error.value)

    first, second = run_simulated(2, said)
    assert "choose another folder" in first and "rank 0 cannot write it" in second


def test_a_repeated_step_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    layer, log = log_of(path)
    layer.router(torch.randn(3, 8))
    start = StepStart([layer])
    for _ in range(2):
        layer.router(torch.randn(7, 8))
        start.rewind()
    layer.router(torch.randn(5, 8))
    log.write()
    assert load_choices(path)["a"].tokens == len(load_choices(path)["a"].sets) == 8


def test_it_follows_experts_to_other_places_and_ranks(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    layer, log = log_of(path)
    layer.router(torch.randn(3, 8))
    change_expert_parallel(layer, None, LocalComm(), LocalComm())
    layer.router(torch.randn(4, 8))
    log.write()
    assert load_choices(path)["a"].tokens == 7
    layer.router(torch.randn(3, 8))
    reorder_experts(layer, None, {"": (3, 1, 2, 0)}, LocalComm())
    layer.router(torch.randn(5, 8))
    log.write()
    assert load_choices(path)["a"].tokens == len(load_choices(path)["a"].sets) == 5


def test_what_torch_compile_hides_is_said_once(tmp_path: Path,
                                               caplog: pytest.LogCaptureFixture) -> None:
    layer, log = log_of(tmp_path / "x.json")
    torch.compile(lambda x_TD: layer.router(x_TD).ids_TK, backend="eager")(torch.randn(5, 8))
    log.write()
    log.write()
    assert caplog.text.count("graphs of torch.compile are not recorded") == 1
    assert not (tmp_path / "x.json").exists()
