"""Traits are declared and checked where a dispatcher is registered, and where settings name it."""

from __future__ import annotations

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.comm import run_simulated
from moe_plugin.config import from_dict
from moe_plugin.dispatch import Dispatcher, DispatchTraits, RaggedDispatcher, dispatchers

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("own_entries")]


def layer_of(name: str, **parallel: object) -> MoELayer:
    config = from_dict({
        "model_dim": 8, "num_experts": 2, "parallel": parallel,
        "dispatch": {"name": name, "capacity_factor": 1.0}
    })
    return run_simulated(4, lambda comm: MoELayer(config, comm))[0]


def test_every_dispatcher_declares_its_traits() -> None:
    for name in dispatchers.names():
        assert issubclass(dispatchers.get(name), Dispatcher), name
        assert isinstance(dispatchers.get(name).traits, DispatchTraits), name


def test_other_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="must be a subclass of Dispatcher"):
        dispatchers.register("other")(torch.nn.Linear)


@pytest.mark.parametrize("other", ["fixed_slots", "shares_tokens", "single_layout", "bounded"])
def test_rows_that_spill_are_exact(other: str) -> None:
    class Both(RaggedDispatcher):
        traits = DispatchTraits(spills=True, **{other: True})

    with pytest.raises(ValueError, match=f"'both' declares both spills and {other}"):
        dispatchers.register("both")(Both)


@pytest.mark.parametrize("other", ["fixed_slots", "shares_tokens", "single_layout"])
def test_rows_that_are_sent_once_are_exact(other: str) -> None:
    class Both(RaggedDispatcher):
        traits = DispatchTraits(sends_once=True, **{other: True})

    with pytest.raises(ValueError, match=f"'both' declares both sends_once and {other}"):
        dispatchers.register("both")(Both)


def test_settings_are_checked_against_traits() -> None:
    """A copy of ragged dispatch that declares less is refused what it does not declare."""
    class Whole(RaggedDispatcher):
        traits = DispatchTraits()

    class Single(RaggedDispatcher):
        traits = DispatchTraits(single_layout=True)

    dispatchers.register("whole")(Whole)
    dispatchers.register("single")(Single)
    assert layer_of("ragged", d=2, r=1) and layer_of("whole", r=1) and layer_of("single", r=2)
    with pytest.raises(ValueError, match="parallel.d=2.*dispatch.name='whole'.*cannot divide"):
        layer_of("whole", d=2)
    with pytest.raises(ValueError, match="parallel.r=1 is not possible .*Choose one of .2."):
        layer_of("single", r=1)
