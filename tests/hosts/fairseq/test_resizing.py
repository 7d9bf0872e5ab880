"""`--moe-expert-parallel-at`: a run whose expert-parallel size changes makes the losses of one that
keeps its size.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_plugin.config import run_from_dict
from moe_plugin.hosts.fairseq import run as resizing
from moe_plugin.observe.history.reader import read_run
from moe_plugin.observe.report.text import summary
from moe_plugin.training.resilience.resizing import ExpertParallelSteps
from moe_plugin.utils.run_feature import StepInput
from tests.hosts.fairseq.commands import run_command
from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE, Corpus, Result, fork, run

pytestmark = pytest.mark.distributed
SGD = "--optimizer sgd --momentum 0.9 --lr 0.1 "
ADAM = "--optimizer adam --lr 0.002 "
CHANGES = "--moe-expert-parallel-at 3=1,6=4,8=2"  # from 2 of 4 ranks


def train(corpus: Corpus, home: Path, flags: str, ranks: int = 4,
          model: str = f"{MOE} {DROPLESS}") -> Result:
    shape = LANGUAGE_MODEL.replace(SGD, "") if "--optimizer" in flags else LANGUAGE_MODEL
    return run("fairseq-train", f"{corpus.lm} {shape} {model} --moe-expert-parallel-size 2 "
               f"--disable-validation --save-dir {home} {flags}", ranks=ranks)


def changes(result: Result) -> list[Any]:
    """(before, after, step) of each change that the log names."""
    return re.findall(r"expert-parallel ranks (\d+) -> (\d+) before step (\d+): [1-9]", result.log)


def same(found: Result, wanted: Result, abs_: float = 2.1e-3) -> None:
    assert len(found.ok().steps) == len(wanted.ok().steps) > 0
    for mine, theirs in zip(found.steps, wanted.steps, strict=True):
        for name in ("loss", "gnorm", "num_updates"):  # the log line has three decimals
            assert mine[name] == pytest.approx(theirs[name], abs=abs_), (name, theirs)


@pytest.mark.parametrize("flags", [
    SGD, f"{ADAM} --ddp-backend c10d", f"{ADAM} --bf16 --moe-router-fp32",
    f"{ADAM} --fp16 --fp16-init-scale 4 --update-freq 2",
    f"{ADAM} --moe-router sigmoid_bias --moe-pre-gate 1 --moe-freq 1"])
def test_losses_and_norms_do_not_notice(corpus: Corpus, tmp_path: Path, flags: str) -> None:
    flags = f"{flags} --max-update 10 --no-save"
    found = train(corpus, tmp_path, f"{flags} {CHANGES}")
    assert changes(found) == [("2", "1", "3"), ("1", "4", "6"), ("4", "2", "8")]
    same(found, train(corpus, tmp_path, flags), 5e-3 if "16" in flags else 2.1e-3)


def test_checkpoints_of_any_size_resume_at_the_size_of_their_step(corpus: Corpus,
                                                                  tmp_path: Path) -> None:
    flags = f"{ADAM} --moe-expert-parallel-at 3=1,6=4"
    whole = train(corpus, tmp_path / "whole", f"{ADAM} --max-update 8 --no-save")
    home, again = tmp_path / "run", tmp_path / "again"
    first = train(corpus, home, f"{flags} --max-update 7 --save-interval-updates 4 "
                  f"--moe-stats-jsonl {home}/stats.jsonl --moe-stats-interval 2")
    for resumed, steps, said in (
            # one rank has all experts; the run itself begins with two that share them
            (train(corpus, again, f"{flags} --max-update 8 --restore-file {home}/checkpoint_1_4.pt"
                   ), 4, [("2", "1", "5"), ("1", "4", "6")]),
            (train(corpus, home, f"{flags} --max-update 8"), 1, [("2", "4", "8")])):
        assert changes(resumed) == said
        assert len(resumed.ok().losses) == steps
        assert resumed.losses == pytest.approx(whole.ok().losses[-steps:], abs=2.1e-3)
    assert first.ok().losses == pytest.approx(whole.losses[:7], abs=2.1e-3)
    rows = [json.loads(line) for line in (home / "stats.jsonl").open()]
    [one, four] = [row for row in rows if "expert_parallel" in row]
    assert (one["step"], four["step"]) == (3, 6)
    assert one["expert_parallel"]["bytes"] > 1e5 and one["expert_parallel"]["seconds"] > 0
    said = dict(summary(read_run(home)))
    assert said["Change of size"].startswith("expert-parallel ranks 1 -> 4 before step 6: ")


def run_and_count(arguments: list[str]) -> None:
    """`fairseq-train` that prints how many descriptors are open when a step begins."""
    begin = ExpertParallelSteps.around_step

    def counted(self: ExpertParallelSteps, step: StepInput) -> Any:
        around = begin(self, step)
        print(f"rank {self.world.rank}: {len(os.listdir('/proc/self/fd'))} descriptors", flush=True)
        return around

    ExpertParallelSteps.around_step = counted  # type: ignore[method-assign]
    run_command("fairseq-train", arguments)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no list of open descriptors here")
@pytest.mark.parametrize("size", [1, 2])
def test_changes_back_and_forth_open_no_new_connections(corpus: Corpus, size: int) -> None:
    changes_ = ",".join(f"{step}={1 + step % 2}" for step in range(2, 16))
    result = fork(2, run_and_count, f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --no-save "
                  f"--disable-validation --max-update 15 --moe-expert-parallel-size {size} "
                  f"--moe-expert-parallel-at {changes_}".split()).ok()
    for rank in range(2):
        open_ = [int(n) for n in re.findall(rf"rank {rank}: (\d+) descriptors", result.log)]
        assert len(open_) == 15 and max(open_[4:]) == open_[3], open_


def test_sizes_that_do_not_fit_are_refused_before_the_run(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, tmp_path, "--moe-expert-parallel-at 3=3", ranks=2).failed_with(
        "resize.expert_parallel_at=3=3 is out of bounds: the size must divide the number of "
        "data-parallel ranks, 2")
    train(corpus, tmp_path, "--moe-expert-parallel-at 3=1 --zero-sharding os", ranks=2).failed_with(
        "--moe-expert-parallel-at 3=1 does not fit --ddp-backend fully_sharded and --zero-sharding "
        "os: it assigns parts of parameters to ranks")


@pytest.mark.parametrize(("section", "name", "value", "said"), [
    ("distributed_training", "distributed_world_size", 1, "does not fit one rank: use several"),
    ("model", "moe_lighthouse", "http://a:1", "does not fit --moe-lighthouse: "),
    ("ema", "store_ema", True, "does not fit --store-ema: averages would not be moved"),
    ("common", "amp", True, "does not fit --amp: use --bf16"),
    ("optimizer", "_name", "adafactor", "does not fit --optimizer adafactor: its state"),
    ("optimizer", "_name", "composite", "does not fit --optimizer composite: its state")])
def test_what_cannot_follow_is_refused(monkeypatch: pytest.MonkeyPatch, section: str, name: str,
                                       value: Any, said: str) -> None:
    wanted = run_from_dict({"resize": {"expert_parallel_at": {3: 2}}})
    monkeypatch.setattr(resizing, "run_settings", lambda model: wanted)
    cfg = SimpleNamespace(
        model=SimpleNamespace(moe_lighthouse=None),
        distributed_training=SimpleNamespace(distributed_world_size=4, ddp_backend="legacy_ddp",
                                             zero_sharding="none"),
        ema=SimpleNamespace(store_ema=False), common=SimpleNamespace(amp=False),
        optimizer=SimpleNamespace(_name="adam"))
    model: Any = None
    resizing.check_resizing(cfg, model)
    setattr(getattr(cfg, section), name, value)
    with pytest.raises(ValueError, match=f"--moe-expert-parallel-at 3=2 {said}"):
        resizing.check_resizing(cfg, model)
