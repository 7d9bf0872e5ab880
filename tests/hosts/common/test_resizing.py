"""`--moe-expert-parallel-at`: a run whose expert-parallel size changes makes the losses of one that
keeps its size.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from moe_plugin.observe.history.reader import read_run
from moe_plugin.observe.report.text import summary
from moe_plugin.training.resilience.resizing import ExpertParallelSteps
from moe_plugin.utils.run_feature import StepInput
from tests.hosts.common.adapters import Fairseq, Megatron, cases
from tests.hosts.common.host import Host, Ran, records

CASES = {
    "fairseq": {
        "sgd": Fairseq.sgd, "adam": f"{Fairseq.adam} --ddp-backend c10d",
        "bf16": f"{Fairseq.adam} --bf16 --moe-router-fp32",
        "fp16": f"{Fairseq.adam} --fp16 --fp16-init-scale 4 --update-freq 2",
        "pre-gates": f"{Fairseq.adam} --moe-router sigmoid_bias --moe-pre-gate 1 --moe-freq 1"},
    "megatron": {
        "sgd": f"{Megatron.sgd} --moe-router-load-balancing-type seq_aux_loss",
        "adam": f"{Megatron.adam} --clip-grad 0.1 --overlap-grad-reduce",
        "bf16": f"{Megatron.adam} --clip-grad 0.1 --bf16"},
}


def changes(run: Ran) -> list[Any]:
    """(before, after, step) of each change that the log names."""
    return re.findall(r"expert-parallel ranks (\d+) -> (\d+) before step (\d+): [1-9]", run.log)


@cases(CASES)
def test_losses_and_norms_do_not_notice(host: Host, case: str, tmp_path: Path) -> None:
    wanted, found = (host.train(tmp_path / name, 10, f"{case} {more}", ranks=4, ep=2)
                     for name, more in (("wanted", ""), (
                         "found", "--moe-expert-parallel-at 3=1,6=4,8=2")))
    assert changes(found) == [("2", "1", "3"), ("1", "4", "6"), ("4", "2", "8")]
    assert found.numbers == wanted.numbers == [*range(1, 11)]
    host.same(found, wanted, host.near_16 if "16" in case else None)


def test_checkpoints_of_any_size_resume_at_the_size_of_their_step(host: Host,
                                                                  tmp_path: Path) -> None:
    whole, home = host.train(tmp_path / "whole", 8, host.adam, ranks=4, ep=2), tmp_path / "run"
    more = (f"{host.adam} --moe-expert-parallel-at 3=1,6=4 --moe-stats-jsonl {home}/stats.jsonl "
            "--moe-stats-interval 2")
    # after steps of one rank with all experts, and of four; each begins with two that share them
    for last, said in ((4, [("2", "1", "3")]), (7, [("2", "1", "5"), ("1", "4", "6")]),
                       (8, [("2", "4", "8")])):
        run = host.train(home, last, more, ranks=4, ep=2, save=4)
        assert changes(run) == said and run.numbers == whole.numbers[:last][-len(run.rows):]
        host.same(run, whole)
    rows = [row for row in records(home / "stats.jsonl") if "expert_parallel" in row]
    assert [row["step"] for row in rows] == [3, 5, 6, 8]
    for row in rows:  # a rank with all experts needs those of no other
        sent = row["expert_parallel"]
        assert sent["bytes"] > (1e5 if row["step"] == 3 else 0) and sent["seconds"] > 0
    said = dict(summary(read_run(home)))
    assert said["Change of size"].startswith("expert-parallel ranks 2 -> 4 before step 8: ")


def _count() -> None:
    """Print how many descriptors are open when a step begins."""
    begin = ExpertParallelSteps.around_step

    def counted(self: ExpertParallelSteps, step: StepInput) -> Any:
        around = begin(self, step)
        print(f"rank {self.world.rank}: {len(os.listdir('/proc/self/fd'))} descriptors", flush=True)
        return around

    ExpertParallelSteps.around_step = counted  # type: ignore[method-assign]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no list of open descriptors here")
@pytest.mark.parametrize("size", [1, 2])
def test_changes_back_and_forth_open_no_new_connections(host: Host, size: int,
                                                        tmp_path: Path) -> None:
    sizes = ",".join(f"{step}={1 + step % 2}" for step in range(2, 16))
    run = host.train(tmp_path, 15, f"--moe-expert-parallel-at {sizes}", ep=size, attack=_count).ok()
    for rank in range(2):
        open_ = [int(n) for n in re.findall(rf"rank {rank}: (\d+) descriptors", run.log)]
        assert len(open_) == 15 and max(open_[4:]) == open_[3], open_


def test_sizes_that_do_not_fit_are_refused_before_the_run(host: Host, tmp_path: Path) -> None:
    ended = host.train(tmp_path, 4, "--moe-expert-parallel-at 3=4")
    ended.failed_with("resize.expert_parallel_at=3=4 is out of bounds: the size must divide the "
                      "number of data-parallel ranks, 2")
    assert not ended.rows
