"""Dispatcher `deepep` over a stand-in with DeepEP's published interface; refusals without it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm import LocalComm, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.dispatch import deepep, dispatchers
from tests.combinations import Cell, all_pairs, name_of
from tests.distributed import run_gloo
from tests.exactness import cells
from tests.exactness.harness import RankResult, compare, naming, reference, run_rank

FAKE = str(Path(__file__).parents[1] / "fake_deepep")
CELLS = {
    2: all_pairs({
        "dispatch": ["deepep"],
        "size": [cells.Size(2, 1), cells.Size(2, 8), cells.Size(2, 4, 2)],
        "pieces": [(1, 0)], "cut": deepep.DeepEPDispatcher.traits.piece_axes,
        "factor": [None, 0.5, 0.0], "tokens": ["uneven", "padding", "none"],
        "k": [1, 2, 4], "kind": ["ffn", "gated_ffn"], "compute": ["auto"],
        "all_to_all": ["linear"], "collectives": ["native"], "bias": [True, False],
        "activation": ["gelu"],
        "score": ["softmax"], "normalize": ["before_drop"], "prioritized": [False],
        "weights_first": [False, True], "dropout": [0.0],
    }),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setattr(deepep, "DEVICES", ("cpu",))
    monkeypatch.setattr(deepep, "DTYPES", (torch.bfloat16, torch.float64))
    yield
    sys.modules.pop("deep_ep", None)


def _run_cells(some: list[Cell]) -> list[RankResult]:
    comm, found = TorchComm(), []
    for cell in some:
        with naming(name_of(cell)):
            found.append(run_rank(cells.case_of(cell), comm, cells.settings_of(cell)))
    return found


@pytest.mark.distributed
def test_cells(installed: None) -> None:
    some = CELLS[2]
    by_rank = run_gloo(2, _run_cells, some)
    for index, cell in enumerate(some):
        with naming(name_of(cell)):
            # gate weights travel in float32
            compare(cells.case_of(cell), [results[index] for results in by_rank],
                    reference(cells.case_of(cell)), rtol=1e-5, atol=1e-6)


def _one_buffer() -> tuple[int, int, int, list[int]]:
    import deep_ep

    config = from_dict({"model_dim": 16, "num_experts": 4, "dispatch": {"name": "deepep"}})
    layers = [MoELayer(config, TorchComm(), dtype=torch.bfloat16) for _ in range(2)]
    x = torch.randn(6, 16, dtype=torch.bfloat16, requires_grad=True)
    out = layers[1](layers[0](x).output)
    out.output.sum().backward()
    wide = MoELayer(from_dict({"model_dim": 32, "num_experts": 4, "dispatch": {"name": "deepep"}}),
                    TorchComm(), dtype=torch.bfloat16)
    wide(torch.randn(3, 32, dtype=torch.bfloat16))
    first = deep_ep.Buffer.made[0]
    return (len(deep_ep.Buffer.made), first.dispatched, first.combined,
            [buffer.num_nvl_bytes for buffer in deep_ep.Buffer.made], out.stats.rows)


@pytest.mark.distributed
def test_layers_share_a_buffer_and_gradients_travel_by_it(installed: None) -> None:
    """Forward a dispatch and a combine a layer, backward the same; a wider layer makes another."""
    results = run_gloo(2, _one_buffer)
    for made, dispatched, combined, sizes, _ in results:
        assert (made, dispatched, combined) == (2, 4, 4)
        assert sizes == [16 * 2 * 2 * 256, 32 * 2 * 2 * 256]
    assert sum(rows for *_, rows in results) == 2 * 6 * 2  # top-2 of both ranks' tokens


def test_without_the_package_it_is_refused_with_the_remedy() -> None:
    assert "deepep" not in dispatchers.names()
    config: Any = from_dict({"model_dim": 16, "num_experts": 4, "dispatch": {"name": "deepep"}})
    with pytest.raises(ValueError, match="deepep.*not installed; install DeepEP.*'ragged'"):
        MoELayer(config, LocalComm())


def test_what_it_does_not_take_is_named(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "deepep" in dispatchers.names()
    config = from_dict({"model_dim": 16, "num_experts": 4, "dispatch": {"name": "deepep"}})
    with pytest.raises(ValueError, match="must be a torch.distributed group"):
        run_simulated(2, lambda comm: MoELayer(config, comm))
    monkeypatch.setattr(deepep, "DEVICES", ("cuda",))
    dispatcher = object.__new__(deepep.DeepEPDispatcher)
    with pytest.raises(ValueError, match="float32 on cpu: must be torch.bfloat16 on cuda"):
        dispatcher.dispatch(torch.zeros(2, 16), None, None)
