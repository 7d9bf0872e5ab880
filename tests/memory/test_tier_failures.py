"""A tier that fails on one rank ends the others at once, with the rank and the place named."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_plugin import TorchComm
from moe_plugin.comm import CommError
from moe_plugin.config import OffloadConfig
from moe_plugin.hosts.plain.streamed import streamed_trainer
from moe_plugin.memory.activations.auto import manage
from moe_plugin.memory.activations.swap import SwapError
from moe_plugin.memory.tiers import TierError
from tests.distributed import run_gloo
from tests.memory.test_stored_experts import layer_of, tokens

pytestmark = pytest.mark.distributed
WIDTH, LIMIT = 256, 1 << 17  # a block's weights are larger than a file may be


def _full() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE,
                       (LIMIT, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _experts(folder: str, bad: bool) -> Callable[[], object]:
    layer = layer_of("disk", TorchComm(), tmp=folder).eval()

    def step() -> None:
        with torch.no_grad():
            layer(tokens(30))
            if bad:
                os.ftruncate(layer.experts.store.weights.file.held(0)["w_in_LDF"].file, 0)
            layer.experts.store.forget()
            layer(tokens(30))

    return step


def _weights(folder: str, bad: bool) -> Callable[[], object]:
    trainer = streamed_trainer(
        OffloadConfig(weights="host", path=folder), [nn.Linear(WIDTH, WIDTH) for _ in range(3)],
        lambda out, target: (out - target).square().mean(), partial(torch.optim.SGD, lr=0.1))

    def step() -> None:
        trainer.step([(torch.ones(2, WIDTH), torch.ones(2, WIDTH))])
        if bad:
            _full()
        for _ in range(2):  # what is written behind one step is waited for in the next
            trainer.step([(torch.ones(2, WIDTH), torch.ones(2, WIDTH))])

    return step


def _activations(folder: str, bad: bool) -> Callable[[], object]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    manage(list(model), "swap", folder=folder)
    world = TorchComm()

    def step() -> None:
        if bad:
            _full()
        model(torch.ones(WIDTH, WIDTH)).sum().backward()
        world.all_reduce(torch.cat([p.grad.flatten() for p in model.parameters()]))

    return step


def _rank(use: Callable[[str, bool], Callable[[], object]], folder: str, failing: int
          ) -> list[str]:
    bad = dist.get_rank() == failing
    step, store = use(folder, bad), dist.distributed_c10d._get_default_store().clone()
    with pytest.raises((TierError, SwapError) if bad else CommError) as error:
        step()
    if bad:
        store.wait(["seen"])  # the other rank ends while this one still lives
    else:
        store.set("seen", "yes")
    dist.destroy_process_group()
    return [str(error.value), *getattr(error.value, "__notes__", [])]


@pytest.mark.parametrize(("use", "rank", "why"), [
    (_experts, 0, "bytes before the end of a tensor"), (_weights, 1, "bytes do not fit"),
    (_activations, 1, "activations of block .* could not be copied out to the tier")])
def test_a_tier_that_fails_ends_the_other_ranks_at_once(use, rank, why, tmp_path):
    folder = str(tmp_path / "a b")
    found = run_gloo(2, _rank, use, folder, rank, group_timeout_s=110)
    [error, said], [waiting] = found[rank], found[1 - rank]
    assert said.startswith(f"rank {rank} of the job gave up: ") and folder in said and error in said
    assert said in waiting and re.search(why, waiting), waiting
    assert "did not join within" not in waiting
