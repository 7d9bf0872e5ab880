"""Which folders the launcher takes for checkpoints of Megatron's own loop; one rank, no training.

Also:

* Runs on Megatron's own loop that go on from a checkpoint with other arguments, or from a damaged
  one.
* `--moe-expert-parallel-at` on Megatron's own loop: a run whose expert-parallel size changes makes
  the losses of one that keeps its size.
* Processes that write checkpoints do not outlive their rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.config import run_from_dict
from moe_plugin.hosts.megatron import checkpoint_files as files
from moe_plugin.hosts.megatron import script_checkpoint as checkpoint
from moe_plugin.hosts.megatron.checkpoint_files import META
from moe_plugin.hosts.megatron.run import check_resizing
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import MODEL, launched, own_loop, trained

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]
NATIVE = ".metadata", "metadata.json", "common.pt"


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _folder(root: Path, step: int, *names: str) -> Path:
    path = Path(files.folder(str(root), step))
    path.mkdir()
    for name in names:
        (path / name).write_text("")
    return path


def test_a_first_save_that_was_killed_is_no_checkpoint(tmp_path: Path) -> None:
    _folder(tmp_path, 10)
    _folder(tmp_path, 20, "common.pt", "__0_0.distcp")
    assert checkpoint.latest_iteration(str(tmp_path)) is None


def test_an_empty_file_of_the_newest_is_written_again(tmp_path: Path) -> None:
    tracker = tmp_path / files.LATEST
    tracker.write_text("")
    _folder(tmp_path, 20)
    assert checkpoint.latest_iteration(str(tmp_path)) is None
    assert not tracker.exists()
    tracker.write_text("")
    _folder(tmp_path, 10, *NATIVE)
    assert checkpoint.latest_iteration(str(tmp_path)) == 10
    assert tracker.read_text() == "10"


def test_a_missing_checkpoint_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      caplog: pytest.LogCaptureFixture) -> None:
    given = {"load": str(tmp_path / "typo"), "ckpt_format": "torch_dist", "skip_train": False}
    monkeypatch.setattr(checkpoint, "script_arguments", lambda: given)
    load = checkpoint.loads_whole(lambda load_arg="load": "native")
    assert load() == "native" and "no checkpoint found in" in caplog.text
    given["skip_train"] = True
    with pytest.raises(ValueError, match="nothing to evaluate"):
        load()
    given["pretrained_checkpoint"] = "elsewhere"
    assert load() == "native"
    del given["pretrained_checkpoint"]
    Path(given["load"]).mkdir()
    Path(given["load"], files.LATEST).write_text("release")
    assert load() == "native"


@pytest.mark.parametrize(("error", "kind"), [
    (CheckpointError("damaged"), CheckpointError), (ValueError("other settings"), ValueError),
    (KeyError("settings"), ValueError), (OSError("gone"), ValueError)])
def test_every_rank_hears_why_the_first_cannot_read(
        error: Exception, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, which reads, and another one, which does not."""
    sent: list[Any] = []

    def gather(value: Any) -> list[Any]:
        sent.append(value)
        return sent

    def work() -> None:
        raise error

    monkeypatch.setattr(files, "gather", gather)
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        with pytest.raises(ValueError, match=f"{error.args[0]}") as raised:
            files.on_first_rank("runs/iter_0000002", work)
        assert type(raised.value) is kind
    assert len(sent) == 2 and sent[1][2] == ""


@pytest.mark.parametrize("names", [["mp_rank_00"], ["mp_rank_00_000"], [".metadata", "x.distcp"],
                                   NATIVE])
def test_formats_of_megatron_are_its_own_business(tmp_path: Path, names: list[str]) -> None:
    assert checkpoint.verified(str(_folder(tmp_path, 10, *names))) == {}


def test_a_folder_that_is_written_again_in_place_is_not_whole(tmp_path: Path) -> None:
    path = _folder(tmp_path, 10, *NATIVE, files.META)
    checkpoint.begin_again(str(path))
    # newer releases write no common.pt, and read it first where one is there
    assert not list(path.iterdir())
    with pytest.raises(CheckpointError, match="incomplete"):
        checkpoint.verified(str(path))


@pytest.fixture(scope="module")
def saved(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with a checkpoint after 2 steps in `run`, and the arguments that made it."""
    folder = tmp_path_factory.mktemp("resume")
    words = ["--data-path", data, "--load", "run"]
    launched([*words, "--save", "run", "--train-iters", "2"], 1, folder)
    return folder, words


def test_a_longer_run_goes_on_and_says_what_is_computed_otherwise(
        saved: tuple[Path, list[str]]) -> None:
    folder, words = saved
    log = launched([*words, "--train-iters", "3", "--lr-decay-iters", "9", "--moe-router-topk", "1",
                    "--moe-router-pre-softmax", "--log-file", "log"], 1, folder)
    assert "iter_0000002 was trained with moe_router_topk=2, but this run uses 1" in log
    assert [json.loads(line)["iteration"] for line in (folder / "log").open()] == [3]


def test_another_model_is_refused_by_name(saved: tuple[Path, list[str]]) -> None:
    folder, words = saved
    log = launched([*words, "--train-iters", "3", "--qk-layernorm"], 1, folder, fails=True)
    assert "has qk_layernorm=False, but this run has qk_layernorm=True. Use the arguments" in log
    assert "Traceback" not in log


def test_what_cannot_be_read_is_named_with_its_remedy(saved: tuple[Path, list[str]]) -> None:
    """Of a checkpoint without our checksums, as Megatron writes it."""
    folder, words = saved
    checkpoint = folder / "run" / "iter_0000002"
    (checkpoint / META).unlink()
    for file in checkpoint.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    log = launched([*words, "--train-iters", "3"], 1, folder, fails=True)
    assert "iter_0000002' cannot be loaded: " in log and "to use an earlier checkpoint" in log
    assert "Traceback" not in log


EP2 = ["--expert-model-parallel-size", "2", "--clip-grad", "0.1"]
CHANGES = ["--moe-expert-parallel-at", "3=1,5=4,6=2"]  # from 2 of 4 ranks
KINDS = {
    "adam": ["--optimizer", "adam", "--overlap-grad-reduce"],
    "sgd": ["--optimizer", "sgd", "--lr", "0.3", "--moe-router-load-balancing-type",
            "seq_aux_loss"],
    "bf16": ["--optimizer", "adam", "--bf16"],
}


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()]


def curve(path: Path) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) by step."""
    return {row["iteration"]: (row["lm_loss"], row["grad_norm"])
            for row in records(path) if "lm_loss" in row}


def same(found: dict[int, tuple[float, float]], wanted: dict[int, tuple[float, float]],
         rel: float) -> None:
    assert list(found) == list(wanted)
    for step, pair in wanted.items():
        assert found[step] == pytest.approx(pair, rel=rel), step


@own_loop
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_norms_do_not_notice(data: str, tmp_path: Path, kind: str) -> None:
    words = ["--data-path", data, *EP2, *KINDS[kind], "--train-iters", "7"]
    launched([*words, "--log-file", "wanted"], 4, tmp_path)
    log = launched([*words, *CHANGES, "--log-file", "found"], 4, tmp_path)
    for said in ("2 -> 1 before step 3", "1 -> 4 before step 5", "4 -> 2 before step 6"):
        assert f"expert-parallel ranks {said}: " in log
    same(curve(tmp_path / "found"), curve(tmp_path / "wanted"), 5e-4 if kind == "bf16" else 2e-5)


@own_loop
def test_checkpoints_of_any_size_resume_at_the_size_of_their_step(data: str,
                                                                  tmp_path: Path) -> None:
    words = ["--data-path", data, *EP2, *KINDS["adam"]]
    launched([*words, "--train-iters", "7", "--log-file", "wanted"], 4, tmp_path)
    changing = [*words, "--moe-expert-parallel-at", "3=1,6=4", "--save", "run", "--load", "run",
                "--log-file", "found", "--moe-stats-jsonl", "stats.jsonl"]
    # after steps of one rank with all experts, and of four; each begins with two that share them
    logs = [launched([*changing, "--train-iters", str(last)], 4, tmp_path) for last in (4, 6, 7)]
    assert "expert-parallel ranks 2 -> 1 before step 5: " in logs[1]
    assert "expert-parallel ranks 2 -> 4 before step 7: " in logs[2]
    same(curve(tmp_path / "found"), curve(tmp_path / "wanted"), 2e-5)
    changes = [row for row in records(tmp_path / "stats.jsonl") if "expert_parallel" in row]
    assert [row["step"] for row in changes] == [3, 5, 6, 7]
    assert all(row["expert_parallel"]["bytes"] > 0 for row in changes)


def given(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"optimizer": "adam", "num_experts": 4, **changed})


@pytest.mark.parametrize(("changed", "said"), [
    ({"tensor_model_parallel_size": 2}, "does not fit --tensor-model-parallel-size: use 1, because "
     "experts move between whole data-parallel ranks"),
    ({"async_save": True}, "does not fit --async-save: leave it out, because the parameters could"),
    ({"cuda_graph_impl": "local"}, "does not fit --cuda-graph-impl local: leave it out"),
    ({"optimizer": "muon"}, "does not fit --optimizer muon: use adam or sgd"),
    ({"num_experts": 6}, "does not fit --num-experts 6: .* must be divisible by 4")])
def test_what_cannot_follow_is_refused(changed: dict[str, Any], said: str) -> None:
    run = run_from_dict({"resize": {"expert_parallel_at": {3: 4}}})
    check_resizing(given(), run)
    with pytest.raises(ValueError, match="resize.expert_parallel_at={3: 4} " + said):
        check_resizing(given(**changed), run)


def _saved(argv: list[str]) -> tuple[list[str], bool]:
    """Processes that a run has left when its checkpoints are written, and whether Megatron's own
    queue is as it was.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    trained(argv)
    return ([child.name() for child in psutil.Process().children(recursive=True)],
            filesystem_async._results_queue is None)


def test_a_run_that_saves_starts_no_process_that_stays(data: str, tmp_path: Path) -> None:
    """Megatron keeps one for its queue, which stays when the rank is killed."""
    argv = [*MODEL, "--data-path", data, "--train-iters", "2", "--save-interval", "1", "--save",
            str(tmp_path)]
    assert on_ranks(1, _saved, argv) == [([], True)]
    assert (tmp_path / "iter_0000002" / "moe_plugin.json").exists()


def _script_saves(folder: str) -> tuple[bool, bool]:
    """Whether a script that calls Megatron's function gets that queue, and gets it for a save that
    is not waited for.
    """
    from unittest import mock

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from moe_plugin.hosts.megatron.compat.checkpointing import saves_whose_writers_end, wrap

    seen = []

    def original(state: object, folder: str, sharded_strategy: object = None,
                 async_sharded_save: bool = False) -> None:
        seen.append(filesystem_async._results_queue is None)

    with mock.patch.object(dist_checkpointing, "save", original):
        wrap("save", saves_whose_writers_end)
        wrap("save", saves_whose_writers_end)  # once is enough
        dist_checkpointing.save({}, folder)
        dist_checkpointing.save({}, folder, async_sharded_save=True)
    assert dist_checkpointing.save is serialization.save
    return seen[0], seen[1]


def test_a_launched_script_waits_without_that_process(tmp_path: Path) -> None:
    assert on_ranks(1, _script_saves, str(tmp_path)) == [(False, True)]


def _killed_while_saving(guarded: bool) -> bool:
    """A process forks a writer and is killed; whether the writer ends with it."""
    import contextlib

    from moe_plugin.hosts.megatron.compat.checkpointing import writers_end_with_us

    read, write = os.pipe()
    if os.fork() == 0:
        with writers_end_with_us() if guarded else contextlib.nullcontext():
            if os.fork() == 0:
                os.write(write, f"{os.getpid()}\n".encode())
                signal.pause()
        signal.pause()
    with os.fdopen(read) as stream:
        writer = psutil.Process(int(stream.readline()))
    rank = writer.parent()
    assert rank is not None and rank.ppid() == os.getpid()
    rank.kill()
    os.waitpid(rank.pid, 0)
    try:
        writer.wait(20 if guarded else 1)
        return True
    except psutil.TimeoutExpired:
        writer.kill()
        return False


def test_forks_that_write_end_with_their_rank() -> None:
    assert on_ranks(1, _killed_while_saving, True) == [True]
    assert on_ranks(1, _killed_while_saving, False) == [False]
