"""A rank dies or stalls in a layer or in a step of training: Megatron's other rank ends in time, by
an error that names rank, group and collective.
"""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.lost_rank import is_last, lose
from tests.hosts.megatron.ranks import command, on_ranks
from tests.hosts.megatron.training import EP2, MODEL, PP2, QUICK, TRAIN, trained

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
    "loss": ("script_report", None, "of_last_stage", PP2, "all_gather of the loss"),
    "finite": ("compat.finite", "PreparedGradients", "gradients", EP2,
               "all_reduce(max) of torch.float32 ()"),
    "balance losses": ("script_report", None, "reduced", EP2,
                       "all_gather of the auxiliary losses' names"),
    "statistics": ("script_report", None, "layer_records", PP2,
                   "all_gather of the layers' records"),
    "checkpoint": ("checkpoint_files", None, "together", EP2,
                   "all_gather of the ranks' parts of a checkpoint"),
}


def _train_and_die(place: str, argv: list[str]) -> None:
    module, cls, name, *_ = PLACES[place]
    owner: Any = importlib.import_module(f"moe_plugin.hosts.megatron.{module}")
    if is_last():
        setattr(getattr(owner, cls) if cls else owner, name, lambda *_, **__: os._exit(7))
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


# where the last rank fails, not the host: module, function
FAILS = {"data": ("megatron.core.datasets.blended_megatron_dataset_builder",
                  "BlendedMegatronDatasetBuilder"),
         "loading": ("megatron.core.dist_checkpointing", "load")}


def _main_and_fail(place: str, argv: list[str]) -> None:
    module, name = FAILS[place]
    owner = importlib.import_module(module)

    @functools.wraps(getattr(owner, name))
    def fail(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'nothing_of_this_name'")

    if is_last():
        setattr(owner, name, fail)
    command(TRAIN, ["--cpu", *QUICK, *argv])


@pytest.mark.parametrize("place", FAILS)
def test_an_error_of_one_rank_is_not_blamed_on_settings_or_data(data: str, tmp_path: Path,
                                                               place: str) -> None:
    """The other rank says the error of the rank that failed, in one line."""
    argv = [*MODEL, *EP2, "--data-path", data, "--train-iters", "1", "--save", str(tmp_path),
            "--data-cache-path", str(tmp_path / "cache")]
    if place == "loading":
        on_ranks(2, trained, argv)
        argv += ["--load", str(tmp_path)]
    with pytest.raises(AssertionError) as error:
        on_ranks(2, _main_and_fail, place, argv)
    said = [line for line in str(error.value).splitlines()
            if line.startswith("pretrain_gpt_moe.py: error: ")]
    of_other = next(line for line in said if "error: rank 0 of 2 in group" in line)
    assert "; rank 1 of the job gave up: " in of_other and "no training samples" not in of_other
    assert all("No module named 'nothing_of_this_name'" in line for line in said), said
    # the rank that cannot read a checkpoint says that itself
    assert len(said) == (2 if place == "loading" else 1), said


def _groups_of_a_lost_rank(argv: list[str]) -> str:
    from moe_plugin.comm import CommError

    def lost(*_: Any, **__: Any) -> None:
        raise RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed")

    parallel = importlib.import_module("megatron.core.parallel_state")
    parallel.initialize_model_parallel = lost
    try:
        trained(argv)
    except CommError as error:
        return str(error)
    return ""


def test_a_lost_connection_is_not_blamed_on_parallel_sizes(data: str) -> None:
    [said] = on_ranks(1, _groups_of_a_lost_rank, [*MODEL, "--data-path", data, "--train-iters",
                                                  "1"])
    assert "a collective of Megatron's making of process groups failed: " in said
