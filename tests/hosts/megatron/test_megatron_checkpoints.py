"""Checkpoints of the training script: continued at other sizes and in other layouts, damaged,
without trust, on full disks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.attacks.payload import Payload
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import (
    EP2,
    PP2,
    RECOMPUTE,
    TP2,
    argv_for,
    losses_of,
    refusal,
    trained,
)


@pytest.fixture(scope="module")
def whole_run(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, float]]:
    """Eight steps at EP2 with a checkpoint after four: (folder, losses by step)."""
    folder = str(tmp_path_factory.mktemp("whole run"))
    on_ranks(2, trained, argv_for(data, 8, "--save", folder, "--save-interval", "4", *EP2))
    Path(folder, "latest_checkpointed_iteration.txt").write_text("4")
    return folder, losses_of(f"{folder}/log.jsonl")


def curve(world: int, argv: list[str], log: Path) -> dict[int, float]:
    """Train with these arguments; loss by step."""
    on_ranks(world, trained, [*argv, "--log-file", str(log)])
    return losses_of(str(log))


def continued(folder: Path, step: int, world: int, argv: list[str]) -> dict[int, float]:
    """The same from the checkpoint of a step."""
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return curve(world, [*argv, "--load", str(folder)], folder / "rest.jsonl")


WAYS = {"EP2": (2, EP2), "EP1": (1, []), "TP2": (2, TP2), "PP2": (2, PP2),
        "ETP2": (2, ["--expert-tensor-parallel-size", "2"]), "TP2 without SP": (2, TP2[:2]),
        "full recompute": (2, [*EP2, *RECOMPUTE])}


@pytest.mark.parametrize(("world", "sizes"), WAYS.values(), ids=WAYS.keys())
def test_checkpoint_continues_at_other_sizes(world: int, sizes: list[str], data: str,
                                             whole_run: Any, tmp_path: Path) -> None:
    folder, losses = whole_run
    found = curve(world, argv_for(data, 8, "--load", folder, *sizes), tmp_path / "log.jsonl")
    assert found == pytest.approx({step: losses[step] for step in (5, 6, 7, 8)}, abs=2e-4)


def test_experts_cut_and_whole_share_checkpoints(data: str, whole_run: Any, tmp_path: Path) -> None:
    """Steps 5 and 6 with every expert cut over two ranks, at PP2 and r = 1, from a checkpoint of
    whole experts; 7 and 8 with whole ones again.
    """
    cut = ["--expert-tensor-parallel-size", "2", "--moe-expert-shards", "2", "--moe-parallel-r",
           "1", *PP2, "--load", whole_run[0], "--save", str(tmp_path), "--exit-interval", "6"]
    found = curve(4, argv_for(data, 8, *cut), tmp_path / "log.jsonl")
    found |= continued(tmp_path, 6, 2, argv_for(data, 8, *EP2, "--moe-parallel-r", "0"))
    assert found == pytest.approx({step: whole_run[1][step] for step in (5, 6, 7, 8)}, abs=2e-4)


CUT = ["--use-distributed-optimizer", "--expert-tensor-parallel-size", "2"]
SHARDS = [*CUT, "--moe-expert-shards", "2"]
SGD = ["--optimizer", "sgd", "--lr", "0.1", "--sgd-momentum"]
BF16 = ["--use-distributed-optimizer", "--bf16", "--moe-router-fp32"]
# (ranks, arguments) of the run that saves and of the one that goes on
RESUMED = {
    "to shards": ((2, CUT), (2, SHARDS)), "from shards": ((2, SHARDS), (2, CUT)),
    "SGD": ((2, [*SGD, "0", *EP2]), (1, [*SGD, "0"])),
    "SGD with momentum": ((2, [*SGD, "0.9", *EP2]), (1, [*SGD, "0.9"])),
    "bf16, one rank to two": ((1, BF16), (2, [*BF16, *EP2])),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_resumes_in_another_way(case: str, data: str, tmp_path: Path) -> None:
    (world, saves), (others, loads) = RESUMED[case]
    whole = curve(world, argv_for(data, 8, *saves, "--save", str(tmp_path), "--save-interval", "4"),
                  tmp_path / "log.jsonl")
    if "bf16" in case:
        saved = FileSystemReader(tmp_path / "iter_0000004").read_metadata().state_dict_metadata
        kept = {name.rsplit(".", 2)[-2]: part.properties.dtype for name, part in saved.items()
                if name.endswith(("router.weight", "experts.w_in_LDF")) and "optimizer" not in name}
        assert kept == {"router": torch.float32, "experts": torch.bfloat16}
    rest = continued(tmp_path, 4, others, argv_for(data, 8, *loads))
    assert rest == pytest.approx({step: whole[step] for step in (5, 6, 7, 8)},
                                 abs=5e-3 if "bf16" in case else 2e-4)


@pytest.mark.parametrize("forward_only", [False, True])
def test_passes_of_a_launched_script_begin_again_with_the_same_batches(forward_only: bool) -> None:
    from types import SimpleNamespace

    from moe_plugin.comm import LocalComm
    from moe_plugin.hosts.megatron.passes import computed_by, first_batch
    from moe_plugin.training.resilience.skipped_steps import RowsFit, StepStart
    from moe_plugin.training.run import Run

    rows, answers = RowsFit([], LocalComm(), lambda _: StepStart([])), iter([True, True, False])
    rows.check = SimpleNamespace(  # type: ignore[assignment]
        active=True, repeats=True, forget=lambda: None, overflowed=lambda: next(answers))
    seen: list[list[int]] = []
    cleared: list[int] = []

    def native(**given: Any) -> list[dict[str, Any]]:
        taken = [next(given["data_iterator"]) for _ in range(given["num_microbatches"])]
        seen.append([batch.pop("tokens") for batch in taken])
        return [{"lm loss": len(seen)}]

    batches = SimpleNamespace(iterable=iter([{"tokens": n} for n in range(5)]))
    assert first_batch(batches) == {"tokens": 0}  # which comes all the same
    chunk = SimpleNamespace(zero_grad_buffer=lambda: cleared.append(len(seen)))
    run = Run([rows])
    found = computed_by(lambda: run, lambda: native)()(
        data_iterator=batches.iterable, model=[chunk], num_microbatches=3,
        forward_only=forward_only)
    assert seen == [[0, 1, 2]] * 3 and found == [{"lm loss": 3}]
    assert cleared == ([] if forward_only else [1, 2])
    assert next(batches.iterable) == {"tokens": 3}


def test_ppmoe_and_parm_with_pipeline_stages_give_the_same_curve(data: str, whole_run: Any,
                                                                 tmp_path: Path) -> None:
    """Two stages of two tensor-parallel ranks: PPMoE by flag for two steps, saved; Parm S2 by YAML
    for the rest. The first steps ran at EP2.
    """
    argv = argv_for(data, 8, "--tensor-model-parallel-size", "2", *PP2)
    stats = tmp_path / "stats.jsonl"
    (tmp_path / "parm.yaml").write_text(
        "dispatch: {name: padded, capacity_factor: 0}\nparallel: {replicas: 2, schedule: s2}\n")
    found = curve(4, [*argv, "--moe-dispatch", "index_slice", "--load", whole_run[0], "--save",
                      str(tmp_path), "--exit-interval", "6", "--moe-stats-jsonl", str(stats)],
                  tmp_path / "log.jsonl")
    found |= continued(tmp_path, 6, 4, [*argv, "--moe-config", str(tmp_path / "parm.yaml")])
    assert found == pytest.approx({step: whole_run[1][step] for step in (5, 6, 7, 8)}, abs=2e-4)
    for rows in (stats, Path(f"{stats}.stage1")):
        for row in map(json.loads, rows.read_text().splitlines()):
            assert row["exchanges"] == {} and row["tokens"] == 8 * 32 and row[
                "rows"] == 2 * row["tokens"]


def test_parm_over_expert_parallel_ranks_then_ppmoe_under_sequence_parallelism_give_the_same_curve(
        data: str, whole_run: Any, tmp_path: Path) -> None:
    """Parm S1 with EP2 TP2 ETP2 for two steps, saved; PPMoE in two tensor-parallel groups with
    sequence parallelism for the rest.
    """
    stats = tmp_path / "stats.jsonl"
    argv = argv_for(data, 8, *TP2[:2], "--expert-tensor-parallel-size", "2")
    parm = ["--moe-replicas", "2", "--moe-replicas-schedule", "s1", "--moe-parallel", "fixed", *EP2]
    found = curve(4, [*argv, *parm, "--load", whole_run[0], "--save", str(tmp_path),
                      "--exit-interval", "6", "--moe-stats-jsonl", str(stats)],
                  tmp_path / "log.jsonl")
    found |= continued(tmp_path, 6, 4, [*argv, "--sequence-parallel", "--moe-dispatch",
                                        "index_slice"])
    assert found == pytest.approx({step: whole_run[1][step] for step in (5, 6, 7, 8)}, abs=2e-4)
    rows = [json.loads(line) for line in stats.read_text().splitlines()]
    assert all(row["exchanges"] and row["tokens"] == 8 * 32 for row in rows)


def _copy_of(folder: str, target: Path) -> Path:
    import shutil

    shutil.copytree(folder, target / "copy")
    return target / "copy"


def test_bad_checkpoints_are_named(data: str, whole_run: Any, tmp_path: Path) -> None:
    argv = argv_for(data, 8)
    folder = _copy_of(whole_run[0], tmp_path)
    [message] = on_ranks(1, refusal, [*argv, "--num-experts", "8", "--load", str(folder)])
    assert "num_experts=4" in message and "num_experts=8" in message

    shard = min((folder / "iter_0000004").glob("*.distcp"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    [message] = on_ranks(1, refusal, [*argv, "--load", str(folder)])
    assert "is damaged" in message and shard.name in message and str(len(whole)) in message

    shard.write_bytes(b"\0" * len(whole))
    [message] = on_ranks(1, refusal, [*argv, "--load", str(folder)])
    assert "is damaged" in message and f"the checksum of {shard.name} has changed" in message

    meta = folder / "iter_0000004" / "moe_plugin.json"  # as of a release without checksums
    meta.write_text(json.dumps({k: v for k, v in json.loads(meta.read_text()).items()
                                if k not in ("sealed", "crc32", "checksums")}))
    [message] = on_ranks(1, refusal, [*argv, "--load", str(folder)])
    assert "cannot be loaded" in message and "latest_checkpointed_iteration.txt" in message

    (folder / "iter_0000004" / "moe_plugin.json").write_text("[]")
    [message] = on_ranks(1, refusal, [*argv, "--load", str(folder)])
    assert "no readable moe_plugin.json" in message and "incomplete" in message

    (folder / "latest_checkpointed_iteration.txt").write_text("soon")
    [message] = on_ranks(1, refusal, [*argv, "--load", str(folder)])
    assert "'soon'" in message


def _flips(folder: str) -> tuple[int, list[str]]:
    """Number of single bit flips and cut ends tried in every file of a checkpoint; those that were
    not found.
    """
    from moe_plugin.checkpoint import CheckpointError
    from moe_plugin.hosts.megatron.checkpoint_files import verified_meta

    tried, silent = 0, []
    for path in sorted(filter(Path.is_file, Path(folder).iterdir())):  # main: a tokenizer's folder
        whole = path.read_bytes()
        for offset in sorted({*range(16), *range(0, len(whole), max(1, len(whole) // 60)),
                              *range(len(whole) - 32, len(whole))}):
            flipped = bytearray(whole)
            flipped[offset] ^= 1 << offset % 8
            cut = whole[:offset]  # of the line break at the end of a text it may go without
            for content in (flipped, cut) if cut.strip() != whole.strip() else (flipped,):
                path.write_bytes(content)
                tried += 1
                with contextlib.suppress(CheckpointError):
                    verified_meta(folder)
                    silent.append(f"{path.name}:{offset}")
        path.write_bytes(whole)
    verified_meta(folder)
    return tried, silent


def test_every_single_bit_flip_and_every_cut_is_detected(whole_run: Any, tmp_path: Path) -> None:
    folder = _copy_of(whole_run[0], tmp_path)
    [(tried, silent)] = on_ranks(1, _flips, str(folder / "iter_0000004"))
    assert tried > 500 and not silent


@pytest.mark.parametrize("name", [".metadata", "common.pt", "entry"])
def test_no_code_runs_from_a_checkpoint(name: str, data: str, whole_run: Any,
                                        tmp_path: Path) -> None:
    folder, target = _copy_of(whole_run[0], tmp_path), tmp_path / "code has run"
    path, bad = folder / "iter_0000004", Payload(target)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    if name == ".metadata":
        metadata.planner_data = bad
    elif name == "common.pt":
        torch.save({"progress": bad}, path / "common.pt")
    else:
        key = next(key for key in metadata.storage_data if type(
            metadata.state_dict_metadata[key.fqn]).__name__ == "BytesStorageMetadata")
        place = metadata.storage_data[key]
        torch.save([bad], path / place.relative_path)
        place.offset, place.length = 0, (path / place.relative_path).stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "moe_plugin.json").write_text(json.dumps({  # as of a release without checksums
        **json.loads((path / "moe_plugin.json").read_text()), "checksums": {}, "files": {}
    }).replace('"sealed": true, ', ""))
    meta = json.loads((path / "moe_plugin.json").read_text())
    meta.pop("crc32")
    (path / "moe_plugin.json").write_text(json.dumps(meta))
    argv = argv_for(data, 5, "--load", str(folder))
    [message] = on_ranks(1, refusal, argv)
    assert "refused" in message and "--trust-checkpoint" in message and "makedirs" in message
    assert not target.exists()
    on_ranks(1, refusal, [*argv, "--trust-checkpoint"])
    assert target.exists() or name != ".metadata"  # this run does not read that entry


def _save_without_space(argv: list[str], by_torch: bool) -> str:
    import errno
    import traceback
    from unittest import mock

    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    error: BaseException = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if by_torch:  # which is no `Exception`
        error = CheckpointException("write", {1: (error, traceback.StackSummary())})

    @functools.wraps(dist_checkpointing.save)
    def save(*_: Any, **__: Any) -> None:
        raise error

    with mock.patch.object(dist_checkpointing, "save", save):
        return refusal(argv)


def test_a_full_disk_and_a_folder_that_cannot_be_made_end_with_the_remedy(
        data: str, tmp_path: Path) -> None:
    argv = argv_for(data, 1, "--log-file", str(tmp_path / "log.jsonl"), "--save")
    for by_torch, rank in ((False, 0), (True, 1)):
        [message] = on_ranks(1, _save_without_space, [*argv, str(tmp_path / "full")], by_torch)
        assert "disk is full" in message and "free space" in message and "--save" in message
        assert f"cannot be written on rank {rank}: " in message
        assert "No space left on device" in message
    (tmp_path / "file").write_text("in the way")
    [message] = on_ranks(1, refusal, [*argv, str(tmp_path / "file" / "run")])
    assert "cannot be written" in message and "choose another folder" in message
