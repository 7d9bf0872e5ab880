"""A rank dies or stalls in a layer: fairseq's other rank ends in time, by a named error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_plugin.comm import CommError
from moe_plugin.hosts.fairseq.trainer import norm_squared
from tests.distributed import run_gloo
from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE, Corpus, run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_the_other_rank_says_what_it_waited_for(corpus: Corpus, tmp_path: Path, how: str) -> None:
    tool = str(Path(__file__).with_name("lost_train.py"))
    run(tool, f"{how} send_receive 9 {corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --max-update 12 "
        f"--moe-timeout 2 --save-dir {tmp_path}", ranks=2).failed_with(
        "CommError: rank 0 of 2 in group 'ranks [0, 1]': ", "from rank 1 failed",
        "send_receive of torch.")


def _norm_alone(folder: Path) -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    try:
        norm_squared([], dist.group.WORLD, torch.device("cpu"))
    except CommError as error:
        (folder / "said").write_text(str(error))
    os._exit(3)


def test_the_gradient_norm_names_what_failed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died"):
        run_gloo(2, _norm_alone, tmp_path, group_timeout_s=5)
    said = (tmp_path / "said").read_text()
    assert said.startswith("rank 0 of 2 in group 'ranks [0, 1]': all_reduce of the gradient norm "
                           "failed: "), said


def _norm_of_a_group() -> float:
    groups = [dist.new_group([rank]) for rank in range(2)]
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), 3.0 + dist.get_rank())
    return float(norm_squared([parameter], groups[dist.get_rank()], torch.device("cpu")))


@pytest.mark.fast
def test_the_gradient_norm_is_that_of_the_group() -> None:
    assert run_gloo(2, _norm_of_a_group) == [9.0, 16.0]
