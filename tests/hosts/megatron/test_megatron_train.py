"""The training script: the same curve as Megatron's own layer, checkpoints at other sizes, kill and
resume, bad input.
"""

from __future__ import annotations

import contextlib
import json
import logging.handlers
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.ranks import on_ranks

pytestmark = pytest.mark.megatron
MODEL = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32",
    "--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "3e-3", "--num-experts", "4",
    "--moe-ffn-hidden-size", "48", "--disable-bias-linear", "--moe-aux-loss-coeff", "0.01",
    "--moe-z-loss-coeff", "0.001", "--moe-router-dtype", "fp32", "--log-interval", "1",
    "--hidden-dropout", "0", "--attention-dropout", "0", "--lr-decay-iters", "8"
]
EP2, TP2, PP2 = ["--expert-model-parallel-size",
                 "2"], ["--tensor-model-parallel-size", "2",
                        "--sequence-parallel"], ["--pipeline-model-parallel-size", "2"]


def _train(argv: list[str]) -> dict[str, Any]:
    from moe_plugin.hosts.megatron import arguments, train

    args = arguments.parser().parse_args(argv)
    train.start(args)
    return train.run(args)


def _message(argv: list[str]) -> str:
    try:
        _train(argv)
    except ValueError as error:
        return str(error)
    return ""


def _losses(path: str) -> dict[int, float]:
    with open(path, encoding="utf-8") as stream:
        return {record["iteration"]: record["lm_loss"] for record in map(json.loads, stream)}


def _curves(argv: list[str]) -> list[list[tuple[float, float]]]:
    """(loss, gradient norm) of 20 steps with Megatron's layer and with ours, from the same weights.
    """
    from moe_plugin.hosts.megatron import arguments, checkpoint, model, train
    from moe_plugin.hosts.megatron.report import Observer, RunLog

    args = arguments.parser().parse_args(argv)
    train.start(args)
    settings = arguments.our_settings(args)
    tokenizer, train_set, _ = train._datasets(args)
    built = []
    for args.native_moe in (True, False):
        train.seed_everything(args.seed)
        built.append(
            model.build(args, arguments.transformer_config(args, cpu=True), settings,
                        tokenizer.vocab_size))
    _copy(*built)
    curves = []
    for training in built:
        observer = Observer(training.moe_layers(), train.MoEConfig().observe)
        loop = train.Loop(args, training, observer, RunLog(None), train_set, None)
        records: list[dict[str, Any]] = []
        loop.log.write = records.append  # type: ignore[method-assign]
        loop.run(checkpoint.Progress())
        curves.append([(r["lm_loss"], r["grad_norm"], r["aux_losses"]["load_balancing_loss"][0])
                       for r in records])
    return curves


def _copy(native: Any, ours: Any) -> None:
    theirs = dict(native.bare()[0].named_parameters())
    with torch.no_grad():
        for name, parameter in ours.bare()[0].named_parameters():
            if ".mlp.router." in name:
                parameter.copy_(theirs[name.replace("weight_ED", "weight")])
            elif ".mlp.experts." in name:
                fc = "linear_fc1" if "w_in" in name else "linear_fc2"
                stem = name.split(".experts.")[0]
                for e in range(parameter.shape[0]):
                    parameter[e].copy_(theirs[f"{stem}.experts.local_experts.{e}.{fc}.weight"].t())
            else:
                parameter.copy_(theirs[name])


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "sizes"),
                         [(1, []), (2, EP2), (2, PP2),
                          (4, [*EP2, *TP2, "--expert-tensor-parallel-size", "1"])],
                         ids=["one rank", "EP2", "PP2", "EP2 TP2"])
def test_twenty_steps_equal_native(world: int, sizes: list[str], data: str) -> None:
    """SGD shows a wrong gradient scale; clipping in force shows a wrong norm."""
    argv = [
        *MODEL, "--data-path", data, "--train-iters", "20", "--optimizer", "sgd", "--sgd-momentum",
        "0", "--lr", "0.3", "--clip-grad", "0.8", "--lr-decay-style", "constant", *sizes
    ]
    for native, ours in on_ranks(world, _curves, argv):
        assert native[0][0] - native[-1][0] > 0.5 and max(row[1] for row in native) > 0.8
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(native), rtol=2e-4, atol=2e-4)


@pytest.fixture(scope="module")
def whole_run(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, float]]:
    """Eight steps at EP2 with a checkpoint after four: (folder, losses by step)."""
    folder = str(tmp_path_factory.mktemp("whole run"))
    on_ranks(2, _train, [
        *MODEL, "--data-path", data, "--train-iters", "8", "--save", folder, "--save-interval", "4",
        *EP2
    ])
    Path(folder, "latest_checkpointed_iteration.txt").write_text("4")
    return folder, _losses(f"{folder}/log.jsonl")


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "sizes"), [(2, EP2), (1, []), (2, TP2), (2, PP2),
                                              (2, ["--expert-tensor-parallel-size", "2"])],
                         ids=["EP2", "EP1", "TP2", "PP2", "ETP2"])
def test_checkpoint_continues_at_other_sizes(world: int, sizes: list[str], data: str,
                                             whole_run: Any, tmp_path: Path) -> None:
    folder, losses = whole_run
    log = str(tmp_path / "log.jsonl")
    on_ranks(world, _train, [
        *MODEL, "--data-path", data, "--train-iters", "8", "--load", folder, "--log-file", log,
        *sizes
    ])
    found = _losses(log)
    assert sorted(found) == [5, 6, 7, 8]
    for step, loss in found.items():
        assert loss == pytest.approx(losses[step], abs=2e-4)


@pytest.mark.distributed
def test_experts_cut_and_whole_share_checkpoints(data: str, whole_run: Any, tmp_path: Path) -> None:
    """Steps 5 and 6 with every expert cut over two ranks, at PP2 and r = 1, from a checkpoint of
    whole experts; 7 and 8 with whole ones again.
    """
    argv, folder = [*MODEL, "--data-path", data, "--train-iters", "8"], str(tmp_path)
    cut = [
        "--expert-tensor-parallel-size", "2", "--moe-expert-shards", "2", "--moe-parallel-r", "1",
        *PP2
    ]
    on_ranks(4, _train,
             [*argv, *cut, "--load", whole_run[0], "--save", folder, "--exit-interval", "6"])
    on_ranks(2, _train, [
        *argv, *EP2, "--moe-parallel-r", "0", "--load", folder, "--log-file",
        f"{folder}/second.jsonl"
    ])
    found = {**_losses(f"{folder}/log.jsonl"), **_losses(f"{folder}/second.jsonl")}
    assert found == pytest.approx({step: whole_run[1][step] for step in (5, 6, 7, 8)}, abs=2e-4)


@pytest.mark.distributed
@pytest.mark.parametrize(("saved", "loaded"), [([], ["--moe-expert-shards", "2"]),
                                               (["--moe-expert-shards", "2"], [])],
                         ids=["to shards", "from shards"])
def test_distributed_optimizer_of_cut_experts(saved: list[str], loaded: list[str], data: str,
                                              tmp_path: Path) -> None:
    argv = [
        *MODEL, "--data-path", data, "--train-iters", "6", "--use-distributed-optimizer",
        "--expert-tensor-parallel-size", "2"
    ]
    folder = str(tmp_path)
    on_ranks(2, _train, [*argv, *saved, "--save", folder, "--save-interval", "3"])
    Path(folder, "latest_checkpointed_iteration.txt").write_text("3")
    on_ranks(2, _train, [*argv, *loaded, "--load", folder, "--log-file", f"{folder}/second.jsonl"])
    first, second = _losses(f"{folder}/log.jsonl"), _losses(f"{folder}/second.jsonl")
    assert [second[step]
            for step in (4, 5, 6)] == pytest.approx([first[step] for step in (4, 5, 6)], abs=2e-4)


@pytest.mark.distributed
@pytest.mark.parametrize("momentum", ["0", "0.9"])
def test_sgd_resumes(momentum: str, data: str, tmp_path: Path) -> None:
    argv = [
        *MODEL, "--data-path", data, "--train-iters", "6", "--optimizer", "sgd", "--sgd-momentum",
        momentum, "--lr", "0.1", *EP2
    ]
    on_ranks(2, _train, [*argv, "--save", str(tmp_path), "--save-interval", "3"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    on_ranks(1, _train,
             [*argv[:-2], "--load",
              str(tmp_path), "--log-file",
              str(tmp_path / "rest.jsonl")])
    whole, rest = _losses(str(tmp_path / "log.jsonl")), _losses(str(tmp_path / "rest.jsonl"))
    assert rest == pytest.approx({step: whole[step] for step in (4, 5, 6)}, abs=2e-4)


@pytest.mark.distributed
def test_distributed_optimizer_from_one_rank_to_two(data: str, tmp_path: Path) -> None:
    argv = [
        *MODEL, "--data-path", data, "--train-iters", "8", "--use-distributed-optimizer", "--bf16",
        "--moe-router-fp32"
    ]
    folder = str(tmp_path)
    on_ranks(1, _train, [*argv, "--save", folder, "--save-interval", "4"])
    saved = FileSystemReader(f"{folder}/iter_0000004").read_metadata().state_dict_metadata
    kept = {name.rsplit(".", 2)[-2]: part.properties.dtype for name, part in saved.items()
            if name.endswith(("router.weight", "experts.w_in_LDF")) and "optimizer" not in name}
    assert kept == {"router": torch.float32, "experts": torch.bfloat16}
    Path(folder, "latest_checkpointed_iteration.txt").write_text("4")
    on_ranks(2, _train, [*argv, "--load", folder, "--log-file", f"{folder}/second.jsonl", *EP2])
    first, second = _losses(f"{folder}/log.jsonl"), _losses(f"{folder}/second.jsonl")
    assert [second[step] for step in (5, 6, 7, 8)] == pytest.approx(
        [first[step] for step in (5, 6, 7, 8)], abs=5e-3)


@pytest.mark.distributed
@pytest.mark.parametrize("sizes",
                         [["--tensor-model-parallel-size", "2"],
                          [
                              *EP2, "--recompute-granularity", "full", "--recompute-method",
                              "uniform", "--recompute-num-layers", "1"
                          ]], ids=["TP2 without SP", "full recompute"])
def test_other_ways_give_the_same_curve(sizes: list[str], data: str, whole_run: Any,
                                        tmp_path: Path) -> None:
    log = str(tmp_path / "log.jsonl")
    on_ranks(2, _train, [
        *MODEL, "--data-path", data, "--train-iters", "8", "--load", whole_run[0], "--log-file",
        log, *sizes
    ])
    assert [_losses(log)[step]
            for step in (5, 8)] == pytest.approx([whole_run[1][step] for step in (5, 8)], abs=2e-4)


@pytest.mark.distributed
def test_ppmoe_and_parm_with_pipeline_stages_give_the_same_curve(data: str, whole_run: Any,
                                                                 tmp_path: Path) -> None:
    """Two stages of two tensor-parallel ranks: PPMoE by flag for two steps, saved; Parm S2 by YAML
    for the rest. The first steps ran at EP2.
    """
    argv = [
        *MODEL, "--data-path", data, "--train-iters", "8", "--tensor-model-parallel-size", "2", *PP2
    ]
    stats = tmp_path / "stats.jsonl"
    (tmp_path / "parm.yaml").write_text(
        "dispatch: {name: padded, capacity_factor: 0}\nparallel: {replicas: 2, schedule: s2}\n")
    on_ranks(4, _train, [
        *argv, "--moe-dispatch", "index_slice", "--load", whole_run[0], "--save",
        str(tmp_path), "--exit-interval", "6", "--moe-stats-jsonl",
        str(stats)
    ])
    on_ranks(4, _train, [
        *argv, "--moe-config",
        str(tmp_path / "parm.yaml"), "--load",
        str(tmp_path), "--log-file",
        str(tmp_path / "parm.jsonl")
    ])
    found = {**_losses(str(tmp_path / "log.jsonl")), **_losses(str(tmp_path / "parm.jsonl"))}
    assert found == pytest.approx({step: whole_run[1][step] for step in (5, 6, 7, 8)}, abs=2e-4)
    for rows in (stats, Path(f"{stats}.stage1")):
        for row in map(json.loads, rows.read_text().splitlines()):
            assert row["exchanges"] == {} and row["tokens"] == 8 * 32 and row[
                "rows"] == 2 * row["tokens"]


@pytest.mark.distributed
def test_parm_over_expert_parallel_ranks_then_ppmoe_under_sequence_parallelism_give_the_same_curve(
        data: str, whole_run: Any, tmp_path: Path) -> None:
    """Parm S1 with EP2 TP2 ETP2 for two steps, saved; PPMoE in two tensor-parallel groups with
    sequence parallelism for the rest.
    """
    tensor, stats = ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size",
                     "2"], tmp_path / "stats.jsonl"
    argv = [*MODEL, "--data-path", data, "--train-iters", "8", *tensor]
    parm = ["--moe-replicas", "2", "--moe-replicas-schedule", "s1", *EP2]
    on_ranks(4, _train, [
        *argv, *parm, "--load", whole_run[0], "--save",
        str(tmp_path), "--exit-interval", "6", "--moe-stats-jsonl",
        str(stats)
    ])
    on_ranks(4, _train, [
        *argv, "--sequence-parallel", "--moe-dispatch", "index_slice", "--load",
        str(tmp_path), "--log-file",
        str(tmp_path / "ppmoe.jsonl")
    ])
    found = {**_losses(str(tmp_path / "log.jsonl")), **_losses(str(tmp_path / "ppmoe.jsonl"))}
    assert found == pytest.approx({step: whole_run[1][step] for step in (5, 6, 7, 8)}, abs=2e-4)
    assert all(row["exchanges"] and row["tokens"] == 8 * 32
               for row in map(json.loads,
                              stats.read_text().splitlines()))


def _copy_of(folder: str, target: Path) -> Path:
    import shutil

    shutil.copytree(folder, target / "copy")
    return target / "copy"


def test_bad_checkpoints_are_named(data: str, whole_run: Any, tmp_path: Path) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "8"]
    folder = _copy_of(whole_run[0], tmp_path)
    [message] = on_ranks(1, _message, [*argv, "--num-experts", "8", "--load", str(folder)])
    assert "num_moe_experts=4" in message and "num_moe_experts=8" in message

    shard = min((folder / "iter_0000004").glob("*.distcp"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    [message] = on_ranks(1, _message, [*argv, "--load", str(folder)])
    assert "is damaged" in message and shard.name in message and str(len(whole)) in message

    shard.write_bytes(b"\0" * len(whole))
    [message] = on_ranks(1, _message, [*argv, "--load", str(folder)])
    assert "is damaged" in message and f"{shard.name} has another checksum" in message

    meta = folder / "iter_0000004" / "moe_plugin.json"  # as of a release without checksums
    meta.write_text(json.dumps({k: v for k, v in json.loads(meta.read_text()).items()
                                if k not in ("sealed", "crc32", "checksums")}))
    [message] = on_ranks(1, _message, [*argv, "--load", str(folder)])
    assert "cannot be loaded" in message and "latest_checkpointed_iteration.txt" in message

    (folder / "iter_0000004" / "moe_plugin.json").write_text("[]")
    [message] = on_ranks(1, _message, [*argv, "--load", str(folder)])
    assert "no readable moe_plugin.json" in message and "incomplete" in message

    (folder / "latest_checkpointed_iteration.txt").write_text("soon")
    [message] = on_ranks(1, _message, [*argv, "--load", str(folder)])
    assert "'soon'" in message


def _flips(folder: str) -> tuple[int, list[str]]:
    """Number of single bit flips and cut ends tried in every file of a checkpoint; those that were
    not found.
    """
    from moe_plugin.checkpoint import CheckpointError
    from moe_plugin.hosts.megatron.checkpoint_files import verified_meta

    tried, silent = 0, []
    for path in sorted(Path(folder).iterdir()):
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


def test_a_damaged_checkpoint_gives_way_to_an_older_one(data: str, whole_run: Any,
                                                        tmp_path: Path) -> None:
    folder = _copy_of(whole_run[0], tmp_path)
    (folder / "latest_checkpointed_iteration.txt").write_text("8")
    shard = max((folder / "iter_0000008").glob("*.distcp"))
    whole = bytearray(shard.read_bytes())
    whole[len(whole) // 2] ^= 1
    shard.write_bytes(whole)
    log = tmp_path / "resumed.jsonl"
    on_ranks(2, _train, [*MODEL, "--data-path", data, "--train-iters", "6", *EP2, "--load",
                         str(folder), "--log-file", str(log)])
    assert _losses(str(log)) == {step: whole_run[1][step] for step in (5, 6)}


class _Payload:
    """A pickle that writes a file where it is loaded."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "entry"])
def test_no_code_runs_from_a_checkpoint(name: str, data: str, whole_run: Any,
                                        tmp_path: Path) -> None:
    folder, target = _copy_of(whole_run[0], tmp_path), tmp_path / "code has run"
    path, bad = folder / "iter_0000004", _Payload(str(target))
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
    argv = [*MODEL, "--data-path", data, "--train-iters", "5", "--load", str(folder)]
    [message] = on_ranks(1, _message, argv)
    assert "refused" in message and "--trust-checkpoint" in message and "mkdir" in message
    assert not target.exists()
    on_ranks(1, _message, [*argv, "--trust-checkpoint"])
    assert target.exists() or name != ".metadata"  # this run does not read that entry


def _save_without_space(argv: list[str]) -> str:
    import errno
    from unittest import mock

    from megatron.core import dist_checkpointing

    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(dist_checkpointing, "save", side_effect=error):
        return _message(argv)


def test_a_full_disk_and_a_folder_that_cannot_be_made_end_with_the_remedy(
        data: str, tmp_path: Path) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "1", "--log-file",
            str(tmp_path / "log.jsonl"), "--save"]
    for message in on_ranks(1, _save_without_space, [*argv, str(tmp_path / "full")]):
        assert "disk is full" in message and "free space" in message and "--save" in message
    (tmp_path / "file").write_text("in the way")
    [message] = on_ranks(1, _message, [*argv, str(tmp_path / "file" / "run")])
    assert "cannot be written" in message and "choose another folder" in message


BAD = {
    "no data": (["--data-path", "/nowhere/corpus"],
                ("/nowhere/corpus.bin is missing", "moe_plugin.hosts.megatron.data")), "sizes": ([
                    "--tensor-model-parallel-size", "3"
                ], ("=3", "divisor of the 1 processes")), "virtual stages": ([
                    "--num-virtual-stages-per-pipeline-rank", "2"
                ], ("num_virtual_stages_per_pipeline_rank=2", "1 without pipeline stages")),
    "batch": (["--global-batch-size", "7"], ("global_batch_size=7", "multiple of", "use 6")),
    "experts": (["--num-experts", "4", "--expert-model-parallel-size",
                 "3"], ("num_experts=4", "expert_model_parallel_size=3")),
    "yaml": (["--moe-config", __file__], ("is not YAML",)),
    "no yaml": (["--moe-config", "/nowhere.yaml"], ("/nowhere.yaml", "cannot be read")), "flag": ([
        "--moe-capacity-factor", "wide"
    ], ("--moe-capacity-factor 'wide'",)), "megatron's own check": (["--moe-router-topk",
                                                                     "1"], ("pre-softmax",)),
    "absurd experts": (["--num-experts", "1000000000000"], ("num_experts=1000000000000", "<=")),
    "absurd width": (["--hidden-size", "100000000"], ("num_layers * hidden_size^2", "memory")),
    "time-out": (["--distributed-timeout-minutes", "nan"], ("distributed_timeout_minutes=nan",)),
    "a device": (["--moe-stats-jsonl", "/dev/null"], ("observe.jsonl='/dev/null'", "a device")),
    "a folder": (["--log-file", "/tmp"], ("log_file='/tmp'", "a folder", "regular file")),
    "a long value": (["--moe-router", "x" * 5000], ("unknown router 'xxx", "characters)")),
}


@pytest.mark.parametrize(("extra", "parts"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_named(extra: list[str], parts: tuple[str, ...], data: str) -> None:
    [message] = on_ranks(1, _message, [*MODEL, "--data-path", data, "--train-iters", "2", *extra])
    assert all(part in message for part in parts), message


def _train_with_warnings(argv: list[str]) -> tuple[Any, list[str]]:
    handler = logging.handlers.BufferingHandler(100)
    logging.getLogger("moe_plugin").addHandler(handler)
    record = _train(argv)
    return record, [entry.getMessage() for entry in handler.buffer
                    if entry.levelno == logging.WARNING]


def test_yaml_and_flags_reach_the_layers(data: str, tmp_path: Path) -> None:
    (tmp_path / "moe.yaml").write_text("dispatch: {name: padded, capacity_factor: 0.5}\n")
    log = str(tmp_path / "stats.jsonl")
    argv = [
        *MODEL, "--data-path", data, "--train-iters", "2", "--moe-config",
        str(tmp_path / "moe.yaml"), "--moe-stats-jsonl", log
    ]
    [(record, warnings)] = on_ranks(1, _train_with_warnings, argv)
    # half of the slots: one warning for both steps, with what to change
    [warning] = [text for text in warnings if "found no slot at their expert" in text]
    assert warning.startswith("step 1: ") and "--moe-capacity-factor none" in warning
    assert set(record["balance"]) == {"layer1", "layer2"
                                      } and record["balance"]["layer1"]["drop_fraction"] > 0
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    assert rows[0]["layer"] == "layer1" and rows[0]["capacity"] > 0


def _balance_warnings(argv: list[str]) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        _train(argv)
    return [str(each.message) for each in shown if "experts balanced" in str(each.message)]


@pytest.mark.distributed
def test_training_without_a_balance_loss_is_warned_of_once(data: str) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "1"]
    off = ["--moe-aux-loss-coeff", "0"]
    assert on_ranks(2, _balance_warnings, [*argv, *EP2]) == [[], []]
    first, second = on_ranks(2, _balance_warnings, [*argv, *off, *EP2])
    assert len(first) == 1 and "--moe-aux-loss-coeff 0.01" in first[0] and second == []
    # Megatron's own router: by its expert bias, or by nothing
    native = ["--moe-router-num-groups", "2", "--moe-router-group-topk", "1"]
    biased = [*native, "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"]
    for extra, count in ((native, 1), (biased, 0)):
        [said] = on_ranks(1, _balance_warnings, [*argv, *off, "--moe-z-loss-coeff", "0", *extra])
        assert len(said) == count, (extra, said)


def _query_groups(argv: list[str]) -> tuple[int, tuple[int, ...], float]:
    from moe_plugin.hosts.megatron import arguments, model, train

    build, built = model.build, []

    def kept(*args: Any) -> Any:
        built.append(build(*args))
        return built[0]

    model.build = kept
    args = arguments.parser().parse_args(argv)
    train.start(args)
    loss = train.run(args)["lm_loss"]
    weight = built[0].bare()[0].decoder.layers[0].self_attention.linear_qkv.weight
    return built[0].config.num_query_groups, tuple(weight.shape), loss


def test_grouped_query_attention_trains(data: str) -> None:
    [(groups, shape, loss)] = on_ranks(1, _query_groups, [
        *MODEL, "--data-path", data, "--train-iters", "2", "--group-query-attention",
        "--num-query-groups", "2"
    ])
    # 32 rows of queries, 2 groups of 8 keys and 8 values
    assert groups == 2 and shape == (32 + 2 * 2 * 8, 32) and 0 < loss < 10


@pytest.mark.parametrize(("extra", "message"), [
    (["--context-parallel-size", "2"], "Transformer Engine"),
    (["--group-query-attention", "--num-query-groups", "3"], "a divisor of num_attention_heads=4")])
def test_attention_flags_are_refused_by_name(extra: list[str], message: str, data: str) -> None:
    [found] = on_ranks(1, _message, [*MODEL, "--data-path", data, "--train-iters", "2", *extra])
    assert message in found and extra[-2][2:].replace("-", "_") in found


def test_empty_text_writes_nothing(tmp_path: Path) -> None:
    from moe_plugin.hosts.megatron.data import documents, write_indexed

    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(ValueError, match="no text to write"):
        write_indexed(documents(str(tmp_path / "empty.txt")), str(tmp_path / "corpus"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.txt"]


def test_a_run_over_two_stages_has_one_report(data: str, tmp_path: Path) -> None:
    from moe_plugin.observe.history import read_run
    from moe_plugin.observe.report import render

    files = [
        "--log-file",
        str(tmp_path / "log.jsonl"), "--moe-stats-jsonl",
        str(tmp_path / "stats.jsonl"), "--moe-stats-interval", "1", "--moe-stats-timeline", "2"
    ]
    on_ranks(2, _train, [*MODEL, "--data-path", data, "--train-iters", "3", *files, *PP2])
    run = read_run(tmp_path)
    assert [r.step for r in run.steps
            ] == [1, 2, 3] and run.host == "megatron" and run.total_steps == 3 and run.notes == []
    assert {name: [r.step for r in records]
            for name, records in run.layers.items()} == {"layer1": [1, 2, 3], "layer2": [1, 2, 3]}
    shown = {
        rank: {s.name for s in spans if s.track == "layers"}
        for (_, rank), spans in run.timelines.items()
    }
    assert shown == {
        0: {"layer1 forward", "layer1 backward"}, 1: {"layer2 forward", "layer2 backward"}
    }
    assert 'id="timeline-1"' in render(run)


def _launched(argv: list[str], steps: int) -> None:
    """The parts of Megatron's `pretrain` that the launcher wraps, around a model of the training
    script: nothing of it is connected by hand.
    """
    import argparse
    from types import SimpleNamespace

    from moe_plugin.hosts.megatron import arguments, model, script, train
    from moe_plugin.hosts.megatron.report import RunLog

    args = arguments.parser().parse_args(argv)
    train.start(args)
    tokenizer, train_set, _ = train._datasets(args)
    state = argparse.Namespace(curr_iteration=0)
    training_module = SimpleNamespace()
    sys.modules["megatron.training.global_vars"] = SimpleNamespace(  # type: ignore[assignment]
        _GLOBAL_ARGS=state)
    sys.modules["megatron.training.training"] = training_module  # type: ignore[assignment]
    sys.modules.setdefault("megatron.training", SimpleNamespace())  # type: ignore[arg-type]
    built = model.build(args, arguments.transformer_config(args, cpu=True),
                        arguments.our_settings(args), tokenizer.vocab_size)
    for layer in built.moe_layers():  # as a script's model: no token ids yet
        layer.tokens_BT = None
    for chunk in built.bare():
        chunk._forward_pre_hooks.clear()
    idle = SimpleNamespace(layers=[])
    loop = train.Loop(args, built, idle, RunLog(None), train_set, None)
    batches = [loop._batches(train_set, 0) for _ in built.chunks]
    training_module.setup_model_and_optimizer = lambda: (built.chunks, built.optimizer, None)
    training_module.train_step = lambda: loop.step(batches, args.lr)
    script.observe_script()
    training_module.setup_model_and_optimizer()
    for state.curr_iteration in range(steps):
        training_module.train_step()


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [EP2, PP2], ids=["EP2", "PP2"])
def test_a_launched_script_writes_records_and_hands_over_token_ids(sizes: list[str], data: str,
                                                                    tmp_path: Path) -> None:
    files = ["--moe-stats-jsonl", str(tmp_path / "stats.jsonl"), "--moe-stats-interval", "2",
             "--moe-stats-timeline", "3"]
    argv = [*MODEL, "--moe-aux-loss-coeff", "0", "--moe-router", "hash", "--moe-hash-vocabulary",
            "384", "--data-path", data,
            "--train-iters", "4", *files, *sizes]
    on_ranks(2, _launched, argv, 4)
    rows = [json.loads(line) for path in sorted(tmp_path.glob("stats.jsonl*"))
            for line in path.read_text().splitlines()]
    balance = sorted((row["step"], row["layer"]) for row in rows if "layer" in row)
    assert balance == [(2, "layer1"), (2, "layer2"), (4, "layer1"), (4, "layer2")]
    calls = {row["calls"] for row in rows if "layer" in row}
    # two steps of all micro-batches and ranks of a stage
    assert calls == {8} and all(row["step"] == 3 for row in rows if "timeline" in row)
    assert len([row for row in rows if "timeline" in row]) == (2 if sizes == PP2 else 1)
