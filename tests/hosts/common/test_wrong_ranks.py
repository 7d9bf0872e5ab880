"""Ranks that send or compute wrong numbers: outvoted, or found and named."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.layer import MoELayer
from tests.hosts.common.adapters import Fairseq, Megatron, cases
from tests.hosts.common.host import Host
from tests.hosts.lost_rank import on_last

STAGES = "--untie-embeddings-and-output-weights --global-batch-size 12 --pipeline-model-parallel-"
# ranks, ranks of a worker that share experts, words, ranks that are outvoted, steps
WORKERS: dict[str, dict[str, tuple[int, int, str, list[int], int]]] = {
    "fairseq": {"ranks": (3, 1, Fairseq.sgd, [2], 6), "EP2": (6, 2, Fairseq.sgd, [4, 5], 4)},
    "megatron": {
        "ranks": (4, 1, Megatron.adam, [3], 4),
        "EP2": (6, 2, f"{Megatron.sgd} {STAGES}size 1", [4, 5], 3),
        "PP2": (6, 1, f"{Megatron.sgd} {STAGES}size 2", [2, 5], 3),
        "EP2 PP2": (12, 2, f"{Megatron.sgd} {STAGES}size 2", [4, 5, 10, 11], 3),
        "PP3": (9, 1, f"{Megatron.sgd} {STAGES}size 3 --num-layers 3", [2, 5, 8], 3)},
}


@cases(WORKERS)
def test_ranks_that_send_wrong_gradients_are_outvoted(
        host: Host, case: tuple[int, int, str, list[int], int], tmp_path: Path) -> None:
    """Each step another attack of the last rank, alone or in a group: losses and parameters are
    those of a run without it.
    """
    ranks, ep, more, outvoted, steps = case
    more = f"{more} {host.dropout}"
    clean = host.train(tmp_path / "clean", steps, f"{more} {host.plain}", ranks=ranks, ep=ep,
                       save=steps)
    voted = host.train(tmp_path / "voted", steps, f"{more} --moe-votes 3", ranks=ranks, ep=ep,
                       save=steps, attack=partial(on_last, host.attack_votes))
    host.same(voted, clean, {**host.near, "rel": 1e-4}, names=("loss", "norm"))
    assert voted.numbers == clean.numbers == [*range(1, steps + 1)]
    assert clean.losses[-1] < clean.losses[0]
    said = "; files without a majority: []"
    assert re.findall(r"(step \d+: outvoted ranks: .*?\])" + re.escape(said), voted.log) == [
        f"step {step}: outvoted ranks: {outvoted}" for step in voted.numbers]
    wanted, found = (host.tensors(tmp_path / name) for name in ("clean", "voted"))
    assert wanted.keys() == found.keys() and len(wanted) > 15
    for name, value in wanted.items():
        if name.endswith(("_extra_state", ".step")) or not value.is_floating_point():
            continue
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_the_median_of_workers_learns(host: Host, tmp_path: Path) -> None:
    clean, voted = (host.train(tmp_path / name, 4, host.dropout, ranks=4, ep=1) if not more else
                    host.train(tmp_path / name, 4, f"{host.dropout} {more}", ranks=4, ep=1,
                               attack=partial(on_last, host.attack_votes))
                    for name, more in (("clean", ""), (
                        "voted", "--moe-votes 3 --moe-vote-aggregate median")))
    assert voted.ok().losses[0] == pytest.approx(clean.ok().losses[0], **host.near)
    assert voted.losses[-1] < 0.97 * voted.losses[0]


def flip(kind: type[Host], step: int) -> None:
    """The experts of every layer put out a wrong bit once `step` has begun."""
    begun, init = 0, MoELayer.__init__

    def begin(_: torch.nn.Module) -> None:
        nonlocal begun
        begun += 1

    def flipped(module: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        if begun < step:
            return output
        wrong = output.clone()
        wrong.detach().view(torch.int32).view(-1)[0] ^= 1
        return wrong

    def built(layer: MoELayer, *args: Any, **options: Any) -> None:
        init(layer, *args, **options)
        layer.experts.register_forward_hook(flipped)

    MoELayer.__init__ = built  # type: ignore[method-assign]
    kind.around_steps(begin)


@pytest.mark.parametrize(("ranks", "named"), [
    (2, r"rank 0 on \S+, rank 1 on \S+"), (4, r"rank 3 on \S+")], ids=["two", "a majority"])
def test_ranks_that_compute_otherwise_are_named(host: Host, ranks: int, named: str,
                                                tmp_path: Path) -> None:
    """From step 4 on one bit is wrong on the last rank; ranks compare in steps 3, 6, ..."""
    clean = host.train(tmp_path / "clean", 3, ranks=ranks, ep=1)
    ended = host.train(tmp_path, 8, "--moe-check-twins 3", ranks=ranks, ep=1,
                       attack=partial(on_last, flip, type(host), 4))
    ended.failed_with(" machine")  # what to do with it
    assert re.search(rf"step 6: {named} computed a different value for the output of ", ended.log)
    assert ended.numbers == [1, 2, 3, 4, 5]
    assert ended.losses[:3] == pytest.approx(clean.ok().losses, **host.near)


@pytest.mark.fast
def test_twins_are_needed(host: Host, tmp_path: Path) -> None:
    host.train(tmp_path, 2, "--moe-check-twins 3").failed_with(
        "no two of 2 ranks store the same experts", host.ep_flag)
