"""Runs made to have findings: what is wrong with them, and in which step, for both hosts; and a
run that is well.

Three layers of experts. All tokens of the first choose the same experts; those of the others
choose few, with scores of 1 and 0; the third has no losses. Steps are counted as the process takes
them.
"""

from __future__ import annotations

import functools
import html
import itertools
import math
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin.cli.main import main
from moe_plugin.layer import MoELayer
from moe_plugin.observe.features import RULE as DROPS
from moe_plugin.observe.findings import RULES as ALL_RULES
from moe_plugin.observe.findings import findings
from moe_plugin.observe.history import read_run
from moe_plugin.planner.trials import ContestRules
from moe_plugin.tuning.layout_tuner import LayoutTuner

STEPS, JUMP_TO, LAST = 46, 300, 344  # after the first step a run goes on at JUMP_TO
TIMELINE, LATE = 306, 7  # the step of the timeline, which is the seventh
NOT_FINITE, SPIKE, SLOW_FROM = 10, 27, 33
FLAGS = ("--moe-stats-interval 2 --moe-capacity-factor 1.0 --moe-dispatch ragged "
         f"--moe-parallel auto --moe-parallel-samples 100 --moe-stats-timeline {TIMELINE}")
RULES = {"not_finite", "collapse", "dead_experts", "uneven", "sure_router", "spikes",
         "exchange_dominates", "undecided", "slower", "no_balance"}
# of the others, the hosts say themselves what is dropped; experts that are not on the device are
# evaluated alone, and the tests of that have waits_for_experts


class Ill:
    """Makes the process ill; `begin` tells it that a step begins. rank: of this process."""

    def __init__(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.step, self._late_s, self._was_late = rank, 0, 0.0, False
        self._layers: list[MoELayer] = []
        real, init, layout = time.perf_counter, MoELayer.__init__, LayoutTuner.layout
        monkeypatch.setattr(time, "perf_counter", lambda: real() + self._late_s)

        def built(layer: MoELayer, *args: Any, **kwargs: Any) -> None:
            init(layer, *args, **kwargs)
            number = len(self._layers)
            self._layers.append(layer)
            if number == 2:
                layer.router.losses = {}
            layer.register_forward_pre_hook(lambda *_: self._choose(layer, number))
            if number:
                layer.router.register_forward_pre_hook(
                    lambda _, given: (_numbered(given[0]), *given[1:]))
            layer.experts.register_forward_hook(lambda _, __, output: self._spoiled(output))

        def chosen(tuner: LayoutTuner, *args: Any) -> Any:
            if self.step > 2:  # Megatron makes two steps before it goes on
                return layout(tuner, *args)
            return tuner.layouts.at(tuner.current), None

        monkeypatch.setattr(MoELayer, "__init__", built)
        monkeypatch.setattr(LayoutTuner, "layout", chosen)
        # on a loaded machine all layouts but one may be far behind, which ends the trials
        monkeypatch.setattr(ContestRules, "__init__", functools.partialmethod(
            ContestRules.__init__, behind=math.inf))

    def begin(self, model: nn.Module) -> None:
        """A step begins."""
        self.step += 1
        if self.step >= SLOW_FROM:
            self._late_s += 100.0  # the clock's, nobody waits
        if self.step in (SPIKE, SPIKE + 1):
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2 and ("embed" in name or "output" in name):
                    parameter.data.mul_(30.0 if self.step == SPIKE else 1 / 30.0)

    def _choose(self, layer: MoELayer, number: int) -> None:
        if self.step == LATE and self.rank == 1 and not self._was_late:
            self._was_late = True
            time.sleep(2.0)  # the other rank waits for it in an exchange
        weight_ED = layer.router.weight_ED
        weight_ED.data.copy_(_scores(*weight_ED.shape) if number else torch.zeros_like(weight_ED))

    def _spoiled(self, output: Tensor) -> Tensor:
        return output * float("nan") if self.step == NOT_FINITE and self.rank == 1 else output


def _numbered(x_TD: Tensor) -> Tensor:
    """Each token is the unit vector of its place."""
    return torch.eye(x_TD.shape[1], dtype=x_TD.dtype).repeat(len(x_TD), 1)[:len(x_TD)]


def _scores(experts: int, width: int) -> Tensor:
    """Router weights: half of the units choose the first expert, all experts are chosen."""
    scores_ED = torch.zeros(experts, width)
    for unit in range(width):
        first = 0 if unit < width // 2 else 1 + unit % (experts - 1)
        second = 1 + (unit + 1) % (experts - 1)
        scores_ED[first, unit], scores_ED[second, unit] = 30.0, 20.0
    return scores_ED


def check(folder: Path, log: str, capsys: pytest.CaptureFixture[str],
          rules: Iterable[str] = RULES) -> None:
    """Each rule is said once in the log, and of the same run by `report` and `watch`."""
    said = {rule: log.count(f"[{rule}]") for rule in rules}
    assert said == dict.fromkeys(rules, 1), said
    found = {f.rule: f for f in findings(read_run(folder))}
    assert set(rules) <= set(found), sorted(found)
    assert main(["report", str(folder)]) == 0
    page = html.unescape((folder / "report.html").read_text())
    capsys.readouterr()
    assert main(["watch", str(folder), "--once"]) == 0
    seen = capsys.readouterr().out
    for rule in rules:
        title = found[rule].title
        assert title[:1].upper() + title[1:] in page and f"! {title[:80]}" in seen, rule
    assert DROPS in found and "found no slot" in log  # the host says that itself


WELL_STEPS = 46
WELL_FLAGS = (f"--moe-stats-interval 2 --moe-stats-timeline {TIMELINE - JUMP_TO} "
              "--moe-capacity-factor none --moe-parallel fixed")


class Well:
    """Lets nothing but its own steps count as time: no other load of the machine makes the run
    slower. `begin` tells it that a step begins.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step, self._calls = 0, itertools.count()
        monkeypatch.setattr(time, "perf_counter",
                            lambda: 0.1 * self.step + 1e-6 * next(self._calls))

    def begin(self) -> None:
        """A step begins."""
        self.step += 1


def check_well(folder: Path, log: str) -> None:
    """Nothing is found in a run of `WELL_STEPS` steps, neither as it goes nor afterwards."""
    run = read_run(folder)
    assert len(run.steps) >= 40 and run.layers and run.timelines
    assert all(len(records) >= WELL_STEPS // 2 for records in run.layers.values())
    assert [f.title for f in findings(run)] == []
    assert not re.search("|".join(rf"\[{rule}\]" for rule in ALL_RULES), log)
    assert "found no slot" not in log
