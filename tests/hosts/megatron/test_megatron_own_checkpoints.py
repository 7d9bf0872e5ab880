"""Checkpoints of Megatron's own loop: which folders the launcher takes for them, runs that go on
from one with other arguments or from a damaged one, what `parallel: auto` has learned, and
processes that write and do not outlive their rank.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.hosts.megatron import checkpoint_files as files
from moe_plugin.hosts.megatron import script_checkpoint as checkpoint
from moe_plugin.hosts.megatron.checkpoint_files import META
from tests.hosts.megatron.layers import Case, build, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, PP2, Run, argv_for, launched, ran, trained

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
    argv = argv_for(data, 2, "--save-interval", "1", "--save", str(tmp_path))
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


AUTO = ["--moe-parallel", "auto", "--moe-overlap-max", "2", "--moe-parallel-samples", "1"]


def _run(argv: list[str]) -> tuple[dict[int, Any], dict[int, Any], list[float]]:
    """Train; (what each layer here knew before its first step, what after its last, losses)."""
    before: dict[int, Any] = {}

    def known(run: Run) -> dict[int, Any]:
        return {
            layer.layer_number: layer.moe.routed_experts.tuner
            and layer.moe.routed_experts.tuner.tuner.state()
            for layer in run.moe_layers()
        }

    run = ran(argv, lambda run: before.update(known(run)))
    return before, known(run), [record["lm_loss"] for record in run.steps_logged]


@pytest.fixture(scope="module")
def argv(data: str) -> list[str]:
    return argv_for(data, 8)


@pytest.fixture(scope="module")
def tuned(argv: list[str],
          tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, Any], list[float]]:
    """Two stages of two expert-parallel ranks, tuned: (checkpoint after four of eight steps, what
    it holds by layer, losses).
    """
    folder = str(tmp_path_factory.mktemp("tuned"))
    first = on_ranks(4, _run, [*argv, *EP2, *PP2, *AUTO, "--save", folder, "--exit-interval", "4"])
    assert [sorted(after) for _, after, _ in first] == [[1], [1], [2], [2]]
    assert first[0][1] == first[1][1] and first[2][1] == first[3][
        1], "ranks of a group know the same"
    whole = on_ranks(4, _run, [*argv, *EP2, *PP2, *AUTO])
    return folder, {**first[0][1], **first[2][1]}, whole[0][2]


@pytest.mark.parametrize(("world", "sizes"), [(4, [*EP2, *PP2]), (2, EP2)],
                         ids=["the same sizes", "one stage"])
def test_every_stage_knows_again_what_it_had_learned(world: int, sizes: list[str], argv: list[str],
                                                     tuned: Any) -> None:
    folder, saved, losses = tuned
    assert all(state["explored"] > 0 and state["buckets"] for state in saved.values())
    for before, after, curve in on_ranks(world, _run, [*argv, *sizes, *AUTO, "--load", folder]):
        assert before == {layer: saved[layer]
                          for layer in before} and len(before) == (1 if world == 4 else 2)
        assert all(after[layer]["calls"] > saved[layer]["calls"] for layer in after)
        assert curve == pytest.approx(losses[4:], abs=2e-4)


def test_choices_of_other_sizes_are_found_anew(argv: list[str], tuned: Any) -> None:
    [(before, _, curve)] = on_ranks(1, _run, [*argv, *AUTO, "--load", tuned[0]])
    assert all(state["calls"] == 0 and not state["buckets"] for state in before.values())
    assert curve == pytest.approx(tuned[2][4:], abs=2e-4)


def test_checkpoints_load_with_and_without_tuning(argv: list[str], tuned: Any,
                                                  tmp_path: Path) -> None:
    folder = str(tmp_path)
    [(before, _, _)] = on_ranks(
        1, _run, [*argv, "--load", tuned[0], "--save", folder, "--exit-interval", "6"])
    assert before == {1: None, 2: None}
    for before, after, _ in on_ranks(2, _run, [*argv, *EP2, *AUTO, "--load", folder]):
        assert all(state["calls"] == 0
                   for state in before.values()) and all(state["explored"]
                                                         for state in after.values())


def _plain_state_dict() -> tuple[int, int]:
    """(calls that a loaded tuner knows of, how many more after one call of the layer)."""
    case = Case(ep=2)
    initialise_parallel(case)
    auto = {"parallel.mode": "auto", "tuner.samples": 1}
    first, again = build(case, True, auto), build(case, True, auto)
    fixed = build(case, True, {"parallel.mode": "fixed"})
    x = torch.randn(4, 2, 16)
    for _ in range(20):
        first(x)[0].sum().backward()
    again.load_state_dict(first.state_dict())
    fixed.load_state_dict(first.state_dict())
    first.load_state_dict(fixed.state_dict())
    calls = again.moe.routed_experts.tuner.tuner.calls
    assert (again.moe.routed_experts.tuner.tuner.state()
            == first.moe.routed_experts.tuner.tuner.state())
    assert not any("tuner" in key for key in fixed.state_dict())
    again(x)
    return calls, again.moe.routed_experts.tuner.tuner.calls - calls


def test_plain_state_dicts_hold_it_and_the_first_call_looks_at_its_load() -> None:
    for calls, more in on_ranks(2, _plain_state_dict):
        assert calls > 0 and more == 1


def _megatrons_own_load(folder: str) -> int:
    """A checkpoint of a layer that is not tuned, into one that is, by Megatron's functions alone.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from moe_plugin.hosts.megatron.compat.checkpointing import saves_whose_writers_end, wrap

    wrap("save", saves_whose_writers_end)
    initialise_parallel(Case(ep=2))
    fixed, tuned, predicted = (build(Case(ep=2), True, {"parallel.mode": mode})
                               for mode in ("fixed", "auto", "predicted"))
    dist_checkpointing.save(fixed.sharded_state_dict("mlp."), folder)
    dist_checkpointing.load(predicted.sharded_state_dict("mlp."), folder)  # needs no permission
    with torch.no_grad():
        tuned.experts.w_in_LDF.zero_()
    found = dist_checkpointing.load(tuned.sharded_state_dict("mlp."), folder,
                                    strict=StrictHandling.LOG_ALL)
    tuned.load_state_dict({key.removeprefix("mlp."): value for key, value in found.items()})
    assert torch.equal(tuned.experts.w_in_LDF, fixed.experts.w_in_LDF)
    return tuned.moe.routed_experts.tuner.tuner.calls


def test_megatron_loads_a_checkpoint_without_it_where_it_is_told_to(tmp_path: Path) -> None:
    assert on_ranks(2, _megatrons_own_load, str(tmp_path)) == [0, 0]


def _predicted(folder: str) -> tuple[list[str], list[bool]]:
    """(layouts of a layer that has predicted its own, and of one that loads it; whether a layer has
    a layout after it loaded a checkpoint that holds it, and one that does not).
    """
    from megatron.core import dist_checkpointing

    from moe_plugin.hosts.megatron.compat.checkpointing import saves_whose_writers_end, wrap
    from moe_plugin.hosts.megatron.state import load_without_missing

    wrap("load", load_without_missing)
    wrap("load", load_without_missing)  # once is enough
    wrap("save", saves_whose_writers_end)
    initialise_parallel(Case(ep=2))
    first, again, other = (build(Case(ep=2), True, {"parallel.mode": "predicted"})
                           for _ in range(3))
    fixed = build(Case(ep=2), True, {"parallel.mode": "fixed"})
    first(torch.randn(2048, 4, 16))[0].sum().backward()
    layers = ((first, again, "predicted"), (fixed, other, "fixed"))
    for source, target, name in layers:
        Path(folder, name).mkdir(exist_ok=True)
        dist_checkpointing.save({"model": source.sharded_state_dict("mlp.")}, f"{folder}/{name}")
        found = dist_checkpointing.load({"model": target.sharded_state_dict("mlp.")},
                                        f"{folder}/{name}")["model"]
        target.load_state_dict({key.removeprefix("mlp."): value for key, value in found.items()})
    return ([layer.moe.routed_experts.current.label for layer in (first, again)],
            [layer.moe.routed_experts.tuner.settled for layer in (again, other)])


def test_a_distributed_checkpoint_keeps_a_predicted_layout(tmp_path: Path) -> None:
    """One without it loads, too."""
    for layouts, settled in on_ranks(2, _predicted, str(tmp_path)):
        assert layouts[0] == layouts[1] and layouts[0].startswith("r=0"), layouts
        assert settled == [True, False]
