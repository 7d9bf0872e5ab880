"""Ranks with different settings: every rank raises the same `ValueError`, which names them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_plugin
from moe_plugin import MoELayer
from moe_plugin.comm import TorchComm
from moe_plugin.comm.agreement import SHOWN, _differences, _values
from moe_plugin.config import from_dict
from moe_plugin.routing import build_router
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed
SAME = {"model_dim": 8, "num_experts": 4}
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "num_experts": ({}, {"num_experts": 8}), "model_dim": ({}, {"model_dim": 16}),
    "experts.hidden_dim": ({}, {"experts": {"hidden_dim": 24}}),
    "experts.kind": ({}, {"experts": {"kind": "gated_ffn"}}),
    "comm.wire": ({}, {"comm": {"wire": "bf16"}}),
    "comm.all_to_all": ({}, {"comm": {"all_to_all": "2dh"}}),
    "dispatch.capacity_factor": ({}, {"dispatch": {"capacity_factor": 1.0}}),
    "dispatch.name": ({}, {"dispatch": {"name": "all_gather"}}),
    "router.top_k": ({}, {"router": {"top_k": 1}}),
    "router.name": ({}, {"router": {"name": "sigmoid_bias"}}),
    "parallel.r": ({}, {"parallel": {"r": 0}}),
    "losses": ({"losses": {"gshard": 0.01}}, {"losses": {"z": 0.01}}),
}


def _refusal(values: dict[str, Any], dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(ValueError, match="settings differ between the 2 ranks") as caught:
        MoELayer(from_dict(SAME | values), TorchComm(), dtype=dtype)
    return str(caught.value)


def _all_refusals() -> dict[str, str]:
    rank = dist.get_rank()
    found = {name: _refusal(pair[rank]) for name, pair in DIFFERENT.items()}
    found["dtype"] = _refusal({}, (torch.float32, torch.float64)[rank])
    moe_plugin.__version__ = f"9.{rank}"
    found["version of moe_plugin"] = _refusal({})
    moe_plugin.__version__ = "9"
    torch.__version__, known = f"8.{rank}", torch.__version__
    found["version of torch"] = _refusal({})
    torch.__version__ = known
    with pytest.raises(ValueError, match="settings differ") as caught:
        config = from_dict(SAME | {"router": {"name": "topk,base", "selection": {
            "rule": "random", "seed": rank}}})
        build_router(config, TorchComm())
    found["router.selection.seed"] = str(caught.value)
    # a file of this name on each node, with other contents
    with tempfile.TemporaryDirectory() as folder:
        known = os.getcwd()
        os.chdir(folder)
        Path("device.yaml").write_text(f"name: rank{rank}\n")
        found["contents of tuner.device"] = _refusal({"tuner": {"device": "device.yaml"}})
        os.chdir(known)
    # the group still works, and what each rank may have of its own is not compared
    layer = MoELayer(from_dict(SAME | {"comm": {"timeout_s": 100.0 + rank}}), TorchComm())
    assert layer(torch.randn(3 + rank, 8)).output.shape == (3 + rank, 8)
    return found


def test_every_rank_names_the_setting_the_values_and_the_ranks() -> None:
    first, second = run_gloo(2, _all_refusals)
    assert first == second
    for name, text in first.items():
        assert f"{name} is " in text and " on rank 0, " in text and " on rank 1" in text
    assert "num_experts is 4 on rank 0, 8 on rank 1" in first["num_experts"]
    assert "dtype is torch.float32 on rank 0, torch.float64 on rank 1" in first["dtype"]


@pytest.mark.parametrize(("ranks", "rest"), [(16, ""), (17, " and 1 more")])
@pytest.mark.fast
def test_many_ranks_are_counted(ranks: int, rest: str) -> None:
    text = _values("top_k", [{"top_k": "1"}] * ranks + [{"top_k": "2"}])
    assert text == f"top_k is 1 on rank {', '.join(map(str, range(16)))}{rest}, 2 on rank {ranks}"


@pytest.mark.fast
@pytest.mark.parametrize(("differ", "rest"), [(SHOWN, ""), (SHOWN + 2, "; and 2 more")])
def test_many_settings_are_counted(differ: int, rest: str) -> None:
    settings = [{f"s{number:02}": str(rank) for number in range(differ)} for rank in range(2)]
    text = _differences(SimpleNamespace(size=2, name="ep"), settings)
    assert f"s{SHOWN - 1:02} is 0 on rank 0, 1 on rank 1{rest}. They must be equal" in text
