"""Distributed checkpoints read, written and converted in one process, and loaded by real runs in
the other layout of experts.
"""

from __future__ import annotations

import errno
import importlib.metadata
import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from moe_plugin.checkpoint.formats.base import (
    CheckpointSizes,
    convert,
    detect,
    formats,
    open_source,
)
from moe_plugin.checkpoint.formats.megatron import common
from moe_plugin.checkpoint.formats.megatron import format as _registers  # noqa: F401
from moe_plugin.checkpoint.formats.megatron import writer as megatron_writer
from moe_plugin.checkpoint.formats.megatron.torch_dist import DistributedFiles
from moe_plugin.checkpoint.layers import write_experts
from moe_plugin.checkpoint.source import MODEL as MODEL_FIELD
from moe_plugin.checkpoint.source import (
    MODEL_ONLY,
    CheckpointError,
    Derived,
    DerivedSource,
    Source,
    TensorEntry,
    View,
)
from moe_plugin.checkpoint.trust import UntrustedFile
from moe_plugin.cli.main import main
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer
from tests.attacks.payload import Payload
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import (
    EP2,
    MODEL,
    PP2,
    TP2,
    argv_for,
    losses_of,
    refusal,
    trained,
)

GATED = [*MODEL, "--swiglu", "--moe-shared-expert-intermediate-size", "24", "--normalization",
         "RMSNorm", "--group-query-attention", "--num-query-groups", "2",
         "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"]
SGD = ["--optimizer", "sgd", "--sgd-momentum", "0.9", "--lr", "0.1"]
STEPS, SAVED = 14, 6
NATIVE = ["--native-moe"]
RATE = ["--lr-decay-iters", "64"]
SIGMOID = [*MODEL, "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]
CASES = {
    "Adam": (1, [*GATED, *RATE]),
    "Adam EP2": (2, [*MODEL, *RATE, *EP2]),
    "SGD": (1, [*MODEL, *RATE, *SGD]),
    "SGD EP2": (2, [*GATED, *RATE, *SGD, *EP2]),
    "expert bias": (1, [*SIGMOID, *RATE]),
    "distributed Adam EP2": (2, [*GATED, *RATE, *EP2, "--use-distributed-optimizer"]),
}


@pytest.fixture(scope="module")
def runs(data: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(case, native) -> folder of a run of 32 steps with a checkpoint after 12, which is the newest
    one there; made when first asked for.
    """
    made: dict[Any, str] = {}

    def run(case: str, native: bool) -> str:
        if (case, native) not in made:
            world, argv = CASES[case]
            folder = str(tmp_path_factory.mktemp("run"))
            on_ranks(world, trained, [
                *argv, *(NATIVE if native else []), "--data-path", data, "--train-iters",
                str(STEPS), "--save", folder, "--save-interval", str(SAVED)
            ])
            Path(folder, "latest_checkpointed_iteration.txt").write_text(str(SAVED))
            made[case, native] = folder
        return made[case, native]

    return run


def _same(one: Source, other: Source) -> None:
    assert dict(one.entries) == dict(other.entries)
    for key in one.entries:
        assert torch.equal(one.read(key), other.read(key)), key


def _written(source: Source, path: Path, **sizes: Any) -> Path:
    path.mkdir(parents=True)
    formats.get(source.format)().write(source, path, CheckpointSizes(**sizes))
    return path


def _continued(case: str, folder: str | Path, data: str, log: Path, native: bool,
               sizes: Any = None) -> dict[int, float]:
    world, argv = CASES[case]
    if sizes is not None:
        world, argv = sizes[0], [*argv, *sizes[1]]
    on_ranks(world, trained, [
        *argv, *(NATIVE if native else []), "--data-path", data, "--train-iters", str(STEPS),
        "--load", str(folder), "--log-file", str(log)
    ])
    return losses_of(str(log))


def _after(folder: str) -> dict[int, float]:
    return {step: loss for step, loss in losses_of(f"{folder}/log.jsonl").items() if step > SAVED}


# one way each, the others take minutes
FAST = [("Adam", True), ("SGD EP2", False)]


@pytest.mark.parametrize(("case", "native"), [
    *FAST, *(pytest.param(case, native, marks=pytest.mark.slow)
             for case in CASES for native in (True, False) if (case, native) not in FAST)])
def test_a_run_continues_in_the_other_layout_of_experts(case: str, native: bool, runs: Any,
                                                        data: str, tmp_path: Path) -> None:
    """Loaded directly and after an offline conversion: the losses of the next steps."""
    folder = runs(case, native)
    wanted = _after(folder)
    assert len(wanted) == STEPS - SAVED
    direct = _continued(case, folder, data, tmp_path / "direct.jsonl", not native)
    assert direct == pytest.approx(wanted, abs=2e-4)
    with open_source(Path(folder)) as source:
        assert source.format == ("megatron_native" if native else "megatron")
        view = convert(source, "megatron" if native else "megatron_native")
        path = _written(view, tmp_path / "converted")
    assert detect(path) == view.format
    converted = _continued(case, path, data, tmp_path / "converted.jsonl", not native)
    assert converted == direct


@pytest.mark.parametrize(("world", "sizes"), [(2, EP2), pytest.param(
    2, TP2, marks=pytest.mark.slow), pytest.param(2, PP2, marks=pytest.mark.slow)],
    ids=["EP2", "TP2", "PP2"])
def test_a_native_checkpoint_of_one_rank_continues_in_our_layers_at_other_sizes(
        world: int, sizes: list[str], runs: Any, data: str, tmp_path: Path) -> None:
    folder = runs("Adam", True)
    found = _continued("Adam", folder, data, tmp_path / "log.jsonl", False, (world, sizes))
    assert found == pytest.approx(_after(folder), abs=2e-4)


@pytest.mark.parametrize("case", [
    "Adam", pytest.param("distributed Adam EP2", marks=pytest.mark.slow)])
def test_layouts_and_neutral_names_round_trip_bit_for_bit(case: str, runs: Any,
                                                          tmp_path: Path) -> None:
    ours, native = (open_source(Path(runs(case, flag))) for flag in (False, True))
    with ours, native:
        assert {field for field, _ in ours.entries} >= {"model", "exp_avg", "exp_avg_sq"}
        assert ours.layers == {f"decoder.layers.{n}.mlp.": {"num_experts": 4} for n in (0, 1)}
        for source, other in ((ours, "megatron_native"), (native, "megatron")):
            there = _written(convert(source, other), tmp_path / "there" / other)
            with open_source(there) as read:
                back = _written(convert(read, source.format), tmp_path / "back" / other)
            with open_source(back) as read:
                _same(source, read)
            neutral = convert(source, "neutral")
            again = convert(neutral, source.format)
            assert set(source.entries) <= set(again.entries)
            _same(source, _only(again, source))


def _only(view: Source, like: Source) -> Source:
    return View(view, [view.tensor(key) for key in like.entries])


def test_biases_of_experts_change_their_layout_and_come_back() -> None:
    """Megatron's own layers do not train with them on one rank."""
    prefix = "decoder.layers.0.mlp."
    shapes = {"w_in_LDF": (2, 3, 4), "w_gate_LDF": (2, 3, 4), "w_out_LFD": (2, 4, 3),
              "b_in_LF": (2, 4), "b_gate_LF": (2, 4), "b_out_LD": (2, 3)}
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    ours = DerivedSource(
        [Derived(("model", f"{prefix}experts.{name}"), TensorEntry(shapes[name], value.dtype),
                 lambda window, value=value: value[window]) for name, value in values.items()],
        "megatron", {}, {prefix: {"num_experts": 2}})
    native = convert(ours, "megatron_native")
    first = prefix + "experts.experts.linear_fc1."
    assert torch.equal(native.read(("model", first + "bias")),
                       torch.cat([values["b_gate_LF"], values["b_in_LF"]], 1))
    assert torch.equal(native.read(("model", first + "weight")),
                       torch.cat([values["w_gate_LDF"].mT, values["w_in_LDF"].mT], 1))
    _same(ours, _only(convert(native, "megatron"), ours))


def test_reshard_and_inspect(runs: Any, tmp_path: Path, capsys: Any) -> None:
    """By the commands, and on from where a full disk stopped a conversion."""

    folder, target = runs("Adam", True), tmp_path / "ours"
    assert main(["reshard", folder, str(target), "--to", "megatron"]) == 0
    assert "megatron_native to megatron" in capsys.readouterr().out
    assert main(["inspect", str(target)]) == 0
    said = capsys.readouterr().out
    assert "MoE layer  decoder.layers.1.mlp. 4 experts" in said and "exp_avg_sq" in said
    shutil.rmtree(target)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(megatron_writer, "metadata_of", side_effect=full):
        assert main(["reshard", folder, str(target), "--to", "megatron"]) != 0
    assert "the disk is full" in capsys.readouterr().err and not target.exists()
    assert main(["reshard", folder, str(target), "--to", "megatron"]) == 0
    assert "2 files reused" in capsys.readouterr().out
    with open_source(Path(folder)) as source, open_source(target) as read:
        _same(convert(source, "megatron"), read)


def test_experts_of_a_run_become_a_file_for_the_store(runs: Any, tmp_path: Path) -> None:
    path = tmp_path / "experts.safetensors"
    with open_source(Path(runs("Adam", True))) as source:
        write_experts(source, path)
        plain, written = convert(source, "plain"), load_file(path)
        assert {name.rpartition(".")[2] for name in written} == {
            "w_in_LDF", "w_gate_LDF", "w_out_LFD"}
        for name, value in written.items():
            assert torch.equal(value, plain.read((MODEL_FIELD, name))), name
    shape = written["layers.0.moe.experts.w_in_LDF"].shape
    config = {"model_dim": shape[1], "num_experts": shape[0], "experts": {
        "kind": "gated_ffn", "hidden_dim": shape[2], "bias": False, "store": "disk",
        "store_path": str(path)}}
    layer = MoELayer(from_dict(config), host=HostContext(layer_number=1))
    stored = layer.experts.state_dict()
    for name, value in stored.items():
        assert torch.equal(value, written[f"layers.1.moe.experts.{name}"])


def test_windows_are_what_megatron_wrote(runs: Any) -> None:
    """Against torch's own reader, at random windows."""
    from torch.distributed import checkpoint as dcp

    folder = Path(runs("SGD EP2", False), f"iter_{SAVED:07d}")
    generator = torch.Generator().manual_seed(0)
    with open_source(folder) as source:
        for name, one in list(DistributedFiles(folder).tensors().items())[::3]:
            tensors = {name: torch.empty(one.entry.shape, dtype=one.entry.dtype)}
            dcp.load(tensors, checkpoint_id=str(folder), no_dist=True)
            whole, window = tensors[name], []
            for size in one.entry.shape:
                start, stop = sorted(torch.randint(0, size + 1, (2,), generator=generator).tolist())
                window.append(slice(start, stop))
            assert torch.equal(one.read(tuple(window)), whole[tuple(window)])
            stacked = common.is_stacked(common.split_field(name)[1])
            for wanted, each in zip(whole if stacked else [whole], common.by_layer({name: one}),
                                    strict=True):
                assert torch.equal(source.read(each.key), wanted)
                last = (*(slice(None),) * (wanted.dim() - 1), slice(1, None))
                assert torch.equal(source.read(each.key, last), wanted[last])


def _saved_by_rank(argv: list[str]) -> None:
    """As a script without our command's default, which no flag takes back."""
    from moe_plugin.hosts.megatron.compat.settings import training_module

    saving, built = training_module("checkpointing"), "_build_sharded_state_dict_metadata"
    native = getattr(saving, built)
    with mock.patch.object(saving, built, lambda *given, **named: {
            **native(*given, **named), "distrib_optim_sharding_type": "dp_reshardable"}):
        trained(argv)


@pytest.mark.skipif(importlib.metadata.version("megatron-core") < "0.16", reason=(
    "distrib_optim_sharding_type=dp_reshardable asserts that every tensor of Adam's state has the "
    "parameter's shape, and torch's has a scalar step"))
def test_optimizer_state_that_only_its_ranks_can_read_is_refused_by_name(
        data: str, tmp_path: Path) -> None:
    argv = argv_for(data, 1, "--use-distributed-optimizer")
    on_ranks(1, _saved_by_rank, [*argv, "--save", str(tmp_path / "saved")])
    with open_source(tmp_path / "saved") as source:
        assert {field for field, _ in source.entries} == {"model"}
        assert source.describe()["optimizer"] == "dp_reshardable"
        for act in (lambda: _written(source, tmp_path / "written"),
                    lambda: convert(source, "neutral")):
            with pytest.raises(CheckpointError, match="'dp_reshardable'.*fully-reshardable"):
                act()
        model = View(source, [source.tensor(key) for key in source.entries],
                     values={**source.values, MODEL_ONLY: True})
        path = _written(model, tmp_path / "model")
    for folder in (tmp_path / "saved", path):  # on the rank that wrote it; without any
        assert on_ranks(1, refusal, [*argv, "--load", str(folder)]) == [""]


def test_state_by_buckets_does_not_go_into_the_other_layout_of_experts(
        data: str, tmp_path: Path) -> None:
    """Buckets of both layouts have equal sizes here, and would load into wrong places."""
    argv = argv_for(data, 1, *EP2, "--use-distributed-optimizer")
    load = ["--load", str(tmp_path)]
    on_ranks(2, _saved_by_rank, [*argv, *NATIVE, "--save", str(tmp_path)])
    assert on_ranks(2, refusal, [*argv, *NATIVE, *load]) == ["", ""]
    for said in on_ranks(2, refusal, [*argv, *load]):
        assert "by buckets" in said and "--no-load-optim" in said
    assert on_ranks(2, refusal, [*argv, *load, "--no-load-optim"]) == ["", ""]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt", "metadata.json"])
def test_damage_is_named_and_nothing_else_is_raised(name: str, runs: Any, tmp_path: Path) -> None:
    folder = tmp_path / f"iter_{SAVED:07d}"
    shutil.copytree(Path(runs("Adam", True), folder.name), folder)
    if name == "common.pt" and not (folder / name).exists():
        pytest.skip("this Megatron-core keeps the common state among the objects")
    meta, whole = folder / "moe_plugin.json", (folder / name).read_bytes()
    for sums in (True, False):
        if not sums:  # so that readers meet the damage
            meta.unlink()
        found = []
        for offset in range(0, len(whole), max(1, len(whole) // 15)):
            flipped = bytearray(whole)
            flipped[offset] ^= 0xFF
            for content in (whole[:offset], bytes(flipped)):
                (folder / name).write_bytes(content)
                try:
                    with open_source(folder) as source:
                        for key in source.entries:
                            source.read(key)
                        for read in source.values["megatron"]["objects"].values():
                            read()
                    found.append(False)
                except (CheckpointError, UntrustedFile):
                    found.append(True)
        assert any(found) and (not sums or all(found[::2]))
    (folder / name).write_bytes(whole)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_no_code_runs_from_a_converted_checkpoint(name: str, runs: Any, tmp_path: Path) -> None:
    folder, target = tmp_path / f"iter_{SAVED:07d}", tmp_path / "code has run"
    shutil.copytree(Path(runs("Adam", True), folder.name), folder)
    (folder / "moe_plugin.json").unlink()
    metadata, bad = pickle.loads((folder / ".metadata").read_bytes()), Payload(target)
    if name == ".metadata":
        metadata.planner_data = bad
        (folder / name).write_bytes(pickle.dumps(metadata))
    elif name == "common.pt":
        torch.save({"progress": bad}, folder / name)
    else:
        stream = io.BytesIO()
        torch.save(bad, stream)
        for place in metadata.storage_data.values():
            place.relative_path, place.offset, place.length = name, 0, len(stream.getvalue())
        (folder / name).write_bytes(stream.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UntrustedFile, match="makedirs"), open_source(folder) as source:
        source.read(next(iter(source.entries)))
    assert not target.exists()
