"""Our layer in the place of the `moe` branch's, on a stand-in for that branch's module tree."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin.hosts.fairseq.compat.native import native_module, swap_native
from tests.hosts.fairseq import branch_tree
from tests.hosts.fairseq.conftest import environment

ROOT = Path(__file__).parents[3]


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wg = nn.Linear(8, 4, bias=False)


class MOELayer(nn.Module):
    """The branch's interface; its own path must not run."""

    def __init__(self, gate: nn.Module, experts: Any, args: Any, group: Any = None,
                 all2all_group: Any = None) -> None:
        raise AssertionError("the native layer was built")


@pytest.fixture
def branch(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module, user = ModuleType("fairseq.modules.moe"), ModuleType(
        "fairseq.modules.transformer_layer_of_the_branch")
    module.MOELayer = user.MOELayer = MOELayer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, user.__name__, user)
    yield module


def args(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "moe_expert_count": 4, "moe_second_expert_policy": "all",
            "moe_normalize_gate_prob_before_dropping": True, "moe_capacity_factor": "none",
            **settings
        })


def expected(x_TD: Tensor, gate: Gate, experts: nn.ModuleList) -> Tensor:
    """Dense top-2 mixture, token by token."""
    scores_TE = torch.softmax(gate.wg(x_TD), 1)
    rows = []
    for x_D, p_E in zip(x_TD, scores_TE, strict=True):
        two = torch.argsort(p_E, descending=True)[:2]
        rows.append(sum(p_E[e] / p_E[two].sum() * experts[int(e)](x_D[None])[0] for e in two))
    return torch.stack(rows)


def test_stock_fairseq_has_no_native_layer() -> None:
    assert native_module() is None


def test_swapped_layer_computes_the_mixture_with_the_given_gate_and_experts(
        branch: ModuleType) -> None:
    assert native_module() is branch
    swapped = swap_native(branch)
    assert sys.modules["fairseq.modules.transformer_layer_of_the_branch"].MOELayer is swapped
    assert swap_native(branch) is swapped
    gate, experts = Gate(), nn.ModuleList(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))
    layer = branch.MOELayer(gate, experts, args())
    assert isinstance(layer, MOELayer)
    x_BTD = torch.randn(2, 5, 8)
    y_BTD, loss = layer(x_BTD)
    torch.testing.assert_close(y_BTD,
                               expected(x_BTD.view(-1, 8), gate, experts).view(2, 5, 8), atol=1e-5,
                               rtol=1e-5)
    (y_BTD.square().sum() + loss).backward()
    assert gate.wg.weight.grad.abs().sum() > 0
    assert all(p.grad is not None and p.expert for p in experts.parameters())
    assert min(layer.state_dict()).startswith("experts.0.0.")
    assert "gate.wg.weight" in layer.state_dict()
    assert {"entropy_gating", "overflow_expert1", "expert2_balance_top",
            "unused_expert1_count"} <= set(layer.metadata)


def test_padding_is_masked(branch: ModuleType) -> None:
    swap_native(branch)
    layer = branch.MOELayer(Gate(), nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), args()).eval()
    padding = torch.tensor([[False, False, True], [False, True, True]])
    y_BTD, _ = layer(torch.randn(2, 3, 8), input_padding_mask=padding)
    assert (y_BTD[padding] == 0).all()
    assert (y_BTD[~padding] != 0).any(1).all()


@pytest.mark.parametrize(("start", "user_dir", "by_name"), [
    ("finder", "moe_plugin", False),
    pytest.param("alone", str(ROOT / "moe_plugin"), True, marks=pytest.mark.slow)])
def test_the_branch_swaps_its_layer_at_its_command_line(start: str, user_dir: str, by_name: bool,
                                                        tmp_path: Path) -> None:
    """With our flags, and the log says so; with the startup finder and without it."""
    home = branch_tree.build(tmp_path, by_name)
    variables = {**environment(), "PYTHONPATH": f"{home}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("in_branch.py")), start, user_dir], cwd=ROOT,
        env=variables, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["flag"], found["translation"]) == ("none", "1")
    assert (found["capacity"], found["prioritized"]) == (None, True)
    assert found["error"] < 1e-5 and not found["stock"]
    assert found["loss"] == (["moe_gate_loss"] if by_name else "tensor")
    [said] = [line for line in found["log"] if "moe-plugin's layer replaces" in line]
    assert "fairseq.modules.moe.MOELayer" in said


@pytest.mark.parametrize(("settings", "words"), [
    ({"moe_router": "cosine", "moe_losses": "switch=1"}, "router.name='cosine' cannot be used"),
    ({"moe_router_fp32": "true"}, "router.fp32=True cannot be used")])
def test_routers_that_the_branch_cannot_hold_are_refused(branch: ModuleType, settings: dict,
                                                         words: str) -> None:
    swap_native(branch)
    with pytest.raises(ValueError, match=words):
        branch.MOELayer(Gate(), nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), args(**settings))


def test_token_dropout_of_later_versions_is_refused(branch: ModuleType) -> None:
    swap_native(branch)
    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    branch.MOELayer(Gate(), experts, args(), tok_dropout=0.0, moe_local_drop=0.0)
    with pytest.raises(ValueError, match="not support tok_dropout=0.2"):
        branch.MOELayer(Gate(), experts, args(), tok_dropout=0.2)
