"""A rank dies or stalls in a layer or in a step of training: Megatron's other rank ends in time, by
an error that names rank, group and collective.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.lost_rank import is_last, lose
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, PP2, trained

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]
WHO = "CommError: rank 0 of 2 in group 'ranks [0, 1]': "


def _train_and_lose(how: str, argv: list[str]) -> None:
    if is_last():
        lose(how, "send_receive", 9)
    trained(argv)


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_the_other_rank_says_what_it_waited_for(data: str, how: str) -> None:
    argv = [*MODEL, *EP2, "--data-path", data, "--train-iters", "6", "--moe-timeout", "2"]
    with pytest.raises(AssertionError) as error:
        on_ranks(2, _train_and_lose, how, argv)
    said = str(error.value)
    assert WHO in said
    assert "from rank 1 failed" in said and "send_receive of torch." in said


# what the last rank does not live to do: module below the host, class or None, function; what the
# other one waits in
PLACES = {
    "loss": ("train", "Loop", "_loss_sums", PP2, "all_reduce(sum) of torch.float32 (2,)"),
    "finite": ("compat.finite", "FiniteSteps", "_gradients", EP2,
               "all_reduce(max) of torch.float32 ()"),
    "balance losses": ("report", None, "auxiliary_losses", EP2,
                       "all_gather of the auxiliary losses' names"),
    "statistics": ("report", "Observer", "records", PP2, "all_gather of the layers' records"),
    "checkpoint": ("checkpoint_files", None, "together", EP2,
                   "all_gather of the ranks' parts of a checkpoint"),
}


def _train_and_die(place: str, argv: list[str]) -> None:
    module, cls, name, *_ = PLACES[place]
    owner: Any = importlib.import_module(f"moe_plugin.hosts.megatron.{module}")
    if is_last():
        setattr(getattr(owner, cls) if cls else owner, name, lambda *_: os._exit(7))
    trained(argv)


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_dies_between_layers_is_named_too(data: str, tmp_path: Path,
                                                      place: str) -> None:
    *_, sizes, waited = PLACES[place]
    argv = [*MODEL, *sizes, "--data-path", data, "--train-iters", "1", "--save", str(tmp_path)]
    with pytest.raises(AssertionError) as error:
        on_ranks(2, _train_and_die, place, argv)
    said = str(error.value)
    assert WHO in said and waited in said and " failed: " in said
