"""Optimizer state that fairseq stores by parameter index, or as one vector, and its names."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.checkpoint.derived import in_memory
from moe_plugin.checkpoint.formats.base import open_source
from moe_plugin.checkpoint.formats.fairseq import neutral
from moe_plugin.checkpoint.formats.fairseq.entries import OPTIMIZER, by_parameter, names_by_order
from moe_plugin.checkpoint.upcycle import Upcycling
from tests.fuzz.samples import sample

pytestmark = pytest.mark.fast
SHAPES = {"first": (2, 3), "second": (4,)}


def state_of(moments: dict[int, torch.Tensor]) -> dict[str, Any]:
    return {"model": {name: in_memory(("model", name), torch.zeros(shape))
                      for name, shape in SHAPES.items()},
            OPTIMIZER: {"state": {index: {"exp_avg": in_memory(("exp_avg", ""), value)}
                                  for index, value in moments.items()},
                        "param_groups": [{"params": list(moments), "lr": 0.1}]}}


def test_state_by_index_has_the_names_in_the_order_of_registration() -> None:
    values = [torch.zeros(shape) for shape in SHAPES.values()]
    assert names_by_order(state_of(dict(enumerate(values)))) == ["first", "second"]
    assert names_by_order(state_of({1: values[0], 0: values[1]})) == []
    assert names_by_order(state_of(dict(enumerate(values[::-1])))) == []


def test_one_vector_becomes_the_state_of_each_parameter() -> None:
    vector = torch.arange(10.0)
    [group] = (found := by_parameter(state_of({0: vector}))[OPTIMIZER])["param_groups"]
    assert group == {"params": [0, 1], "lr": 0.1}
    for index, want in enumerate((vector[:6].view(2, 3), vector[6:])):
        read = found["state"][index]["exp_avg"].read(tuple(slice(0, n) for n in want.shape))
        assert torch.equal(read, want)
    other = state_of({0: torch.zeros(9)})
    assert by_parameter(other) is other


@pytest.mark.parametrize("rank", [0, 1])
def test_the_file_whose_state_fits_no_parameter_is_named(tmp_path: Path, rank: int) -> None:
    """Each of two ranks has one expert of the sample; the state of one of them has another size."""
    folder = sample("fairseq_branch")
    shared, whole = (torch.load(folder / f"checkpoint_last-{name}.pt", weights_only=False)
                     for name in ("shared", "rank-0"))
    torch.save(shared, tmp_path / "checkpoint_last-shared.pt")
    model = {name: value for name, value in whole["model"].items() if ".experts.0." in name}
    for number in range(2):
        state = {index: {"exp_avg": torch.ones(99) if number == rank else torch.ones_like(value)}
                 for index, value in enumerate(model.values())}
        torch.save({**whole, "model": model,
                    OPTIMIZER: {"state": state, "param_groups": []}},
                   tmp_path / f"checkpoint_last-rank-{number}.pt")
    with open_source(tmp_path, "fairseq_branch") as source:
        said = source.describe()["optimizer_state"]
    assert said.startswith("not converted: ") and f"checkpoint_last-rank-{rank}.pt" in said


@pytest.mark.parametrize("kind", [lambda **values: Namespace(**values), dict, None])
def test_settings_of_an_upcycled_model_have_the_type_of_the_old_ones(kind: Any) -> None:
    """fairseq stores `args`, or a `cfg` whose model is a namespace or a mapping."""
    old = {"args": Namespace(lr=1.0, moe_freq=0)} if kind is None else {
        "cfg": {"model": kind(moe_freq=0), "task": "t"}}
    state = neutral._state_of({neutral.STATE: {**old, "optimizer_history": []}, "step": 3},
                              {"moe_freq": 2}, Upcycling(experts=4, top_k=2))
    if kind is None:
        assert state["args"] == Namespace(lr=1.0, moe_freq=2) and "cfg" not in state
    else:
        assert state["cfg"] == {"model": kind(moe_freq=2), "task": "t"} and "args" not in state
