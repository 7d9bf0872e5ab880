"""One `Sweep` for all studies on emulated clusters: its cells, sides that alternate, medians."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict
from scripts.bench.sweep import Sweep, alternate, clean_step, medians, slowest

pytestmark = pytest.mark.fast


def test_sides_alternate_and_the_first_rounds_are_left_out() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[], int]:
        return lambda: order.append(name) or len(order)

    found = alternate({name: side(name) for name in "ab"}, rounds=2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}
    order.clear()
    alternate({name: side(name) for name in "abc"}, rounds=3, warm_up=0, rotate=True)
    assert "".join(order) == "abcbcacab"


def test_times_are_those_of_the_slowest_rank_in_each_round() -> None:
    ranks = [{"seconds": {"a": [1.0, 5.0, 2.0]}}, {"seconds": {"a": [3.0, 1.0, 2.0]}}]
    assert slowest(ranks, "a") == [3.0, 5.0, 2.0] and medians(ranks) == {"a": 3.0}


class Cluster:
    """Runs the function of a rank twice in this process, as on two ranks."""

    def __init__(self, rate: float, timeouts: list[float]) -> None:
        self.rate, self.timeouts = rate, timeouts

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.rate = 0.0

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float,
            group_timeout_s: float) -> list[Any]:
        self.timeouts += [timeout_s, group_timeout_s]
        assert self.rate > 0
        return [function(*args) for _ in range(2)]


def test_every_combination_of_the_axes_is_a_cell_with_the_options_of_the_study() -> None:
    timeouts: list[float] = []
    swept = Sweep(
        axes=lambda args: {"width": args.widths, "k": (1, 2)},
        cluster=lambda at: Cluster(at.rate, timeouts),
        rank=lambda at: {"seconds": {"a": [at.width * at.k / at.rate]}},
        row=lambda at, ranks: {"seconds": medians(ranks), "ranks": len(ranks)}, timeout_s=7.0,
        group_timeout_s=3.0)
    # an axis may have the name of an option, whose value it then replaces
    found = swept.measure(Namespace(widths=[8, 16], width=None, rate=2.0))
    assert found == [{"width": w, "k": k, "seconds": {"a": w * k / 2.0}, "ranks": 2}
                     for w in (8, 16) for k in (1, 2)]
    assert timeouts == [7.0, 3.0] * 4


def test_a_clean_step_leaves_no_gradients_to_the_next_side() -> None:
    layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 2,
                                "experts": {"hidden_dim": 8}}), LocalComm())
    x_TD = torch.randn(4, 8, requires_grad=True)
    seconds, stats = clean_step(layer, x_TD, grad_TD=torch.ones(4, 8))
    assert seconds > 0 and int(stats.rows) > 0
    assert x_TD.grad is None and all(p.grad is None for p in layer.parameters())
