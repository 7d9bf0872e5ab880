"""Routing traces in Megatron's form, written and repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin.comm.base import LocalComm
from moe_plugin.config import ObserveConfig, RunConfig, from_dict
from moe_plugin.hosts.plain.run import TrainingSteps
from moe_plugin.layer import MoELayer
from moe_plugin.observe.traces import read_trace, trace_path
from moe_plugin.routing.replay import checkpoint

pytestmark = pytest.mark.fast


def choices_of(path: str | Path) -> dict[Any, list[torch.Tensor]]:
    """Of all steps, one after the other."""
    return {key: [ids for step in steps for ids in step] for key, steps in read_trace(path).items()}


class Model(nn.Module):
    """Two layers, the first recomputed; notes what is chosen in training."""

    def __init__(self, seed: int, experts: int = 4, **router: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = {"model_dim": 8, "num_experts": experts, "router": {"top_k": 2, **router}}
        self.layers = nn.ModuleList([MoELayer(from_dict(config)) for _ in range(2)])
        self.chosen: list[Tensor] = []
        self.layers[1].router.register_forward_hook(
            lambda router, args, out: self.chosen.append(out.ids_TK))

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD = x_TD + checkpoint(lambda x: self.layers[0](x).output, x_TD)
        return self.layers[1](x_TD).output


def trained(model: Model, steps: int = 3, tokens: int = 6, **observe: Any) -> Model:
    """Steps of two micro-batches, with other data in each run, and an evaluation between."""
    run = TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.1),
                        lambda model, xs: sum(model(x).square().mean() for x in xs),
                        world=LocalComm(), settings=RunConfig(
                            observe=ObserveConfig(**observe)))
    for _ in range(steps):
        run([torch.randn(tokens, 8) for _ in range(2)])
        model.eval()(torch.randn(3, 8))
        model.train()
        with torch.no_grad():  # counts as little
            model(torch.randn(5, 8))
        del model.chosen[-2:]
    run.close()
    return model


def test_a_trace_has_every_choice_of_training_once(tmp_path: Path) -> None:
    model = trained(Model(0), trace=str(tmp_path / "trace"))
    path = trace_path(str(tmp_path / "trace"), 0)
    assert path.name == "router_trace_rank0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["layer"]) for r in records] == [
        (step, layer) for step in range(3) for _ in range(2) for layer in range(2)]
    assert records[1] == {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 1,
                          "rank": 0, "num_tokens": 6, "topk": 2,
                          "top_indices": model.chosen[0].tolist()}
    trace = choices_of(path)
    assert list(trace) == [("decoder", None, 0), ("decoder", None, 1)]
    assert all(torch.equal(a, b) for a, b in zip(
        trace["decoder", None, 1], model.chosen, strict=True))


def test_it_ends_after_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    trained(Model(0), trace=str(tmp_path), trace_steps=2)
    assert len(choices_of(trace_path(str(tmp_path), 0))["decoder", None, 0]) == 4


def test_another_model_repeats_the_choices_and_begins_again(tmp_path: Path) -> None:
    first = trained(Model(0), trace=str(tmp_path / "a"))
    second = trained(Model(1), steps=4, replay=str(tmp_path / "a"), trace=str(tmp_path / "b"))
    wanted = [*first.chosen, *first.chosen[:2]]
    assert all(torch.equal(a, b) for a, b in zip(second.chosen, wanted, strict=True))
    a, b = (choices_of(trace_path(str(tmp_path / name), 0)) for name in "ab")
    assert all(torch.equal(x, y) for key in a for x, y in zip(a[key], b[key][:6], strict=True))
    weights = second.layers[1].router.weight_ED.grad
    assert weights is not None and weights.abs().max() > 0  # it learns from the weights


def test_a_step_that_is_repeated_counts_once(tmp_path: Path) -> None:
    from moe_plugin.observe.traces import RoutingTrace
    from moe_plugin.training.resilience.skipped_steps import StepStart

    trained(Model(0), trace=str(tmp_path / "a"))
    model = Model(0)
    trace = RoutingTrace({str(i): layer for i, layer in enumerate(model.layers)}, 0,
                         write=str(tmp_path / "b"), replay=str(tmp_path / "a"))
    start = StepStart([model])
    model(torch.randn(6, 8))
    start.rewind()
    for _ in range(2):
        model(torch.randn(6, 8))
    trace.end_step(1)
    a, b = (choices_of(trace_path(str(tmp_path / name), 0)) for name in "ab")
    assert all(torch.equal(a[key][0], b[key][0]) and len(b[key]) == 2 for key in a)


@pytest.mark.parametrize(("change", "error"), [
    (lambda rows: [row for row in rows for _ in range(2)],
     "has 2 passes in this step, but 4 records in step 1"),
    (lambda rows: rows[:2] + rows[4:], "has more passes in this step, but 1 records in step 1")],
    ids=["recomputations", "fewer"])
def test_records_that_are_no_passes_of_the_run_are_an_error(
        change: Any, error: str, tmp_path: Path) -> None:
    trained(Model(0), trace=str(tmp_path))
    path = trace_path(str(tmp_path), 0)
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=error):
        trained(Model(0), replay=str(tmp_path))


def test_a_run_that_goes_on_keeps_earlier_steps(tmp_path: Path) -> None:
    from moe_plugin.observe.traces import RoutingTrace

    trained(Model(0), steps=3, trace=str(tmp_path))
    path, model = trace_path(str(tmp_path), 0), Model(0)
    with open(path, "a") as file:
        file.write('{"step": 0, "sta')  # killed while it wrote
    before = path.read_text().splitlines()
    trace = RoutingTrace({str(i): layer for i, layer in enumerate(model.layers)}, 0,
                         write=str(tmp_path))
    for number in (3, 4):  # from a checkpoint of step 2
        model(torch.randn(6, 8))
        trace.end_step(number)
    after = path.read_text().splitlines()
    assert after[:8] == before[:8]
    assert [json.loads(line)["step"] for line in after[8:]] == [2, 2, 3, 3]


def test_a_trace_of_megatron_is_read(tmp_path: Path) -> None:
    """Fields of its sidecars are not looked at; layers of multi-token prediction come last."""
    rows = [{"step": 4, "stage": "pre_dispatch", "block": block, "layer": layer, "rank": 3,
             "num_tokens": 1, "topk": 2, "top_indices": [[step, 1]], "hs_offset": 0, **more}
            for step, block, layer, more in [(0, "mtp", 0, {"mtp_idx": 0}), (1, "decoder", 3, {}),
                                             (2, "decoder", 1, {})]]
    rows.append({**rows[1], "step": 3, "top_indices": [[9, 1]]})
    path = tmp_path / "router_trace_rank3.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = choices_of(path)
    assert list(trace) == [("decoder", None, 1), ("decoder", None, 3), ("mtp", 0, 0)]
    assert [ids.tolist() for ids in trace["decoder", None, 3]] == [[[9, 1]], [[1, 1]]]


@pytest.mark.parametrize(("model", "tokens", "error"), [
    (Model(0), 5, r"record 1 of a layer in step 1 .* has \(6, 2\) .* this pass has \(5, 2\)"),
    (Model(0, top_k=1), 6, r"this pass has \(6, 1\)"),
    (Model(0, experts=2), 6, r"has experts 0..3, which must be in -1..1"),
    (Model(0, force="balance"), 6, "router.force='balance' cannot be combined with observe.replay"),
    (Model(0, second_expert_policy="random"), 6,
     "second_expert_policy='random' cannot be combined with observe.replay"),
    (Model(0, name="sinkhorn"), 6, "SinkhornRouter cannot be used with observe.replay"),
    (Model(0).layers[0], 6, "has 2 layers, but this rank has 1")])
def test_a_trace_that_does_not_fit_is_named(model: Any, tokens: int, error: str,
                                            tmp_path: Path) -> None:
    trained(Model(0), trace=str(tmp_path))
    with pytest.raises(ValueError, match=error):
        trained(model, tokens=tokens, replay=str(tmp_path))


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "router_trace_rank0.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match="line 1 is not a record in Megatron's format"):
        trained(Model(0), replay=str(tmp_path))
    with pytest.raises(ValueError, match="another folder than observe.trace"):
        ObserveConfig(replay="a", trace="a").check_bounds()
