"""Training without balance is warned of, once."""

from __future__ import annotations

from typing import Any

import pytest

from moe_plugin import MoELayer
from moe_plugin.comm import LocalComm
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import from_dict
from tests.logs import warned

pytestmark = pytest.mark.fast


def _said(numbers: tuple[int | None, ...] = (None,), **config: Any) -> list[str]:
    """Warnings where a model of several layers is made."""
    settings = from_dict({"model_dim": 8, "num_experts": 4, "losses": {}, **config})
    with warned("moe_plugin.routing.registry") as lines:
        for number in numbers:
            MoELayer(settings, LocalComm(), host=HostContext(layer_number=number))
    return lines


@pytest.mark.parametrize("numbers", [(None, None, None), (0, 1, 2)], ids=["unknown", "numbered"])
def test_a_model_without_a_balance_loss_is_warned_of_once(numbers: tuple[int | None, ...]) -> None:
    [text] = _said(numbers)
    assert text.startswith("moe-plugin: ")
    for part in ("router.name='topk' with losses={}", "--moe-losses gshard=0.01",
                 "--moe-aux-loss-coeff 0.01", "--moe-router sigmoid_bias"):
        assert part in text


@pytest.mark.parametrize("config", [
    {"losses": {"z": 0.1}}, {"losses": {"gshard": 0.0}}, {"router": {"name": "switch"}},
    {"router": {"name": "sigmoid_bias", "bias_rate": 0.0}}, {"router": {"name": "topk,base"}}])
def test_what_does_not_balance(config: dict[str, Any]) -> None:
    assert len(_said(**config)) == 1


@pytest.mark.parametrize("config", [
    {"losses": {"gshard": 0.01}}, {"losses": {"sequence": 0.01, "z": 0.1}},
    {"router": {"name": "sigmoid_bias"}}, {"router": {"name": "base"}},
    {"router": {"name": "expert_choice"}}, {"router": {"name": "sinkhorn"}},
    {"router": {"top_k": 4}}, {"num_experts": 1, "router": {"top_k": 1}}])
def test_what_balances(config: dict[str, Any]) -> None:
    assert _said(**config) == []


def test_later_layers_say_nothing() -> None:
    assert _said((3,)) == []


def test_the_first_of_several_processes_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert _said() == []
    monkeypatch.setenv("RANK", "0")
    assert len(_said()) == 1
