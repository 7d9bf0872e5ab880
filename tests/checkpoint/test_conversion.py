"""Conversion of checkpoints: any number of ranks to any other bit for bit, resumable, in little
memory, never over something else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

from moe_plugin import MoELayer
from moe_plugin.checkpoint import CheckpointError, load, save, split, torch_files
from moe_plugin.checkpoint.conversion import Conversion
from moe_plugin.checkpoint.formats.base import CheckpointSizes, WriteProgress, detect, open_source
from moe_plugin.checkpoint.formats.plain import part_name, write_index
from moe_plugin.checkpoint.reshard import moe_layers
from moe_plugin.checkpoint.source import Derived, TensorEntry, blocks, window_shape
from moe_plugin.cli.checkpoints import COLUMNS, SCREEN, inspection_lines
from moe_plugin.cli.main import main
from moe_plugin.comm import LocalComm, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.utils import checksums

SIZES = (1, 2, 3, 4, 8)


class Model(nn.Module):
    """One MoE layer whose 24 experts fit all of SIZES, one whose experts are cut, a custom one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, experts in (("many", 24), ("few", 1)):
            self.add_module(name, MoELayer(24, num_experts=experts, router={"top_k": 1},
                                           experts={"kind": "gated_ffn", "hidden_dim": 48}))
        self.custom = MoELayer(from_dict({"model_dim": 24, "num_experts": 24}),
                               experts=lambda index: nn.Linear(24, 24))
        self.head = nn.Linear(24, 24, dtype=torch.bfloat16)


@cache
def trained() -> tuple[dict[str, Any], dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Model state; optimizer state by field; the optimizer's groups. Nothing changes them."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    fields: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        for field, value in optimizer.state[parameter].items():
            fields.setdefault(field, {})[name] = value
    groups = [{key: value for key, value in group.items() if key != "params"}
              for group in optimizer.state_dict()["param_groups"]]
    return model.state_dict(), fields, groups


def expected(rank: int, size: int) -> dict[str, Any]:
    """A rank's part, cut in memory."""
    state, fields, groups = trained()
    layers = moe_layers(state)
    by_name: dict[str, dict[str, Any]] = {}
    for field, column in fields.items():
        for name, value in split(column, rank, size, layers).items():
            by_name.setdefault(name, {})[field] = value
    return {"model": split(state, rank, size), "optimizer": {"by_name": by_name, "groups": groups}}


def write(folder: Path, size: int) -> Path:
    folder.mkdir()
    for rank in range(size):
        state = expected(rank, size)
        checksums.write_sealed(folder / part_name(rank, size), lambda out: torch.save(state, out))
    write_index(folder, size, {"step": 5})
    return folder


def same(mine: Any, theirs: Any, where: str = "") -> None:
    """Equal bit for bit: keys, types, data types, values."""
    assert type(mine) is type(theirs) or isinstance(mine, dict), where
    if isinstance(mine, torch.Tensor):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), where
    elif isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), where
        for key, value in mine.items():
            same(value, theirs[key], f"{where}/{key}")
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs), where
        for index, value in enumerate(mine):
            same(value, theirs[index], f"{where}/{index}")
    else:
        assert mine == theirs, where


def convert(source: Path, target: Path, **options: Any) -> Conversion:
    layout = CheckpointSizes(**{
        name: options.pop(name) for name in ("ep", "world", "shards", "dtype") if name in options})
    with open_source(source) as opened:
        conversion = Conversion(opened, target, options.pop("to", "plain"), layout, **options)
        conversion.written = conversion.run()
        return conversion


@pytest.mark.parametrize("old", SIZES)
def test_any_size_to_any_other_bit_for_bit_with_optimizer_state(tmp_path: Path, old: int) -> None:
    source = write(tmp_path / "source", old)
    assert detect(source) == "plain"
    for new in SIZES:
        target = tmp_path / str(new)
        convert(source, target, ep=new)
        for rank in range(new):
            same(torch.load(target / part_name(rank, new), weights_only=True), expected(rank, new))
        assert checksums.verify(target / part_name(0, new))


def test_shards_are_chosen_and_the_result_loads(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def layer(comm: Any, shards: int | None) -> nn.Module:
        return MoELayer(from_dict({"model_dim": 8, "num_experts": 4, "experts": {"hidden_dim": 16},
                                   "parallel": {"shards": shards}}), comm)

    origin = layer(LocalComm(), None)
    save(whole, origin, extra={"step": 7})
    convert(whole, cut, ep=4, shards=2)

    def rank(comm: Any) -> tuple[dict[str, Any], torch.Tensor]:
        model = layer(comm, 2)
        return load(cut, model, comm=comm), model.experts.w_in_LDF

    results = run_simulated(4, rank)
    assert all(extra == {"step": 7} for extra, _ in results)
    w_in = torch.cat([torch.cat([results[2 * run][1], results[2 * run + 1][1]], 2)
                      for run in range(2)])
    assert torch.equal(w_in, origin.experts.w_in_LDF)
    with pytest.raises(ValueError, match="cannot be divided among 3 ranks with shards=2"):
        convert(whole, tmp_path / "x", ep=3, shards=2)


def test_each_rank_reads_the_slices_that_it_stores_alone(tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of other ranks are never read."""
    read, original = [], torch_files.StoredTensor.read

    def counting(self: Any, window: Any) -> torch.Tensor:
        found = original(self, window)
        read.append(found.numel())
        return found

    model = nn.ModuleList([MoELayer(from_dict({"model_dim": 8, "num_experts": 8}), LocalComm())])
    save(tmp_path / "ckpt", model)
    monkeypatch.setattr(torch_files.StoredTensor, "read", counting)

    def elements(comm: Any) -> int:
        part = nn.ModuleList([MoELayer(from_dict({"model_dim": 8, "num_experts": 8}), comm)])
        load(tmp_path / "ckpt", part, comm=comm)
        return sum(value.numel() for value in part.state_dict().values()
                   if isinstance(value, torch.Tensor))

    assert sum(run_simulated(4, elements)) == sum(read)


class Killed(Exception):
    """The process ends here."""


def test_an_interrupted_conversion_goes_on_where_it_stopped(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = write(tmp_path / "source", 2), tmp_path / "target"
    ended, original = [], torch_files.SealedWriter.write

    def dying(writer: torch_files.SealedWriter, path: Path, state: Any,
              done: Callable[[], None]) -> None:
        if path.name == part_name(2, 4):
            path.write_bytes(b"half")
            assert all(end.wait(60) for end in ended)
            raise Killed
        end = Event()
        ended.append(end)
        original(writer, path, state, lambda: (done(), end.set()))

    with monkeypatch.context() as patch:
        patch.setattr(torch_files.SealedWriter, "write", dying)
        with pytest.raises(Killed):
            convert(source, target, ep=4)
    assert not target.exists()
    scratch = target.with_name("target.converting")
    first = scratch / part_name(0, 4)
    whole, inode = first.read_bytes(), (scratch / part_name(1, 4)).stat().st_ino
    first.write_bytes(whole[:-40] + b"x" + whole[-39:])  # damaged meanwhile
    done = convert(source, target, ep=4)
    assert done.kept == [part_name(1, 4)] and not scratch.exists()
    assert (target / part_name(1, 4)).stat().st_ino == inode
    for rank in range(4):
        same(torch.load(target / part_name(rank, 4), weights_only=True), expected(rank, 4))
    assert not convert(source, target, ep=4).written  # there already


def test_nothing_else_is_replaced_and_an_unfinished_other_conversion_is_dropped(
        tmp_path: Path) -> None:
    source, target = write(tmp_path / "source", 2), tmp_path / "target"
    target.mkdir()
    (target / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="already exists.*--force"):
        convert(source, target, ep=4)
    scratch = tmp_path / "target.converting"
    scratch.mkdir()
    (scratch / part_name(0, 4)).write_text("of another conversion")
    assert convert(source, target, ep=4, force=True).kept == []
    assert not (target / "thesis.txt").exists() and not (tmp_path / "target.old").exists()
    with pytest.raises(CheckpointError, match="already exists"):
        convert(source, target, ep=2)


def test_damage_of_the_source_is_found_and_unknown_sizes_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "source", 2)
    with pytest.raises(ValueError, match="'plain' does not support --tp; .*--ep, --shards, --w"):
        with open_source(source) as opened:
            Conversion(opened, tmp_path / "target", "plain", CheckpointSizes(tp=2)).run()
    part = source / part_name(1, 2)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(CheckpointError, match="part-00001-of-00002.pt.*damaged.*checksum"):
        convert(source, tmp_path / "target", ep=1)
    assert not (tmp_path / "target").exists()


def test_the_models_data_type_changes_and_the_optimizer_stays_or_goes(tmp_path: Path) -> None:
    source = write(tmp_path / "source", 2)
    convert(source, tmp_path / "half", ep=1, dtype=torch.bfloat16)
    half = torch.load(tmp_path / "half" / part_name(0, 1), weights_only=True)
    whole = expected(0, 1)
    for name, value in whole["model"].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(half["model"][name], value.bfloat16())
    same(half["optimizer"], whole["optimizer"])
    convert(source, tmp_path / "bare", ep=1, model_only=True)
    assert torch.load(tmp_path / "bare" / part_name(0, 1),
                      weights_only=True)["optimizer"] is None


def test_inspect_prints_a_screen_and_all_of_it_when_asked() -> None:
    layer = {"num_experts": 8, "experts": {"w_in_LDF": [8, 24, 48]}}
    found = {"format": "plain", "step": 3, "layout": {}, "files": 1, "file_bytes": 10,
             "fields": {"model": {"tensors": 1, "elements": 5, "dtypes": {"float32": 20}}},
             "layers": {f"layers.{i}.": layer for i in range(30)},
             "settings": {**{f"setting_{i}": "x" * 300 for i in range(200)}, "moe_top_k": 2}}
    short, whole = inspection_lines(found, False), inspection_lines(found, True)
    assert len(short) == SCREEN and max(map(len, short)) <= COLUMNS
    assert "  and 23 more layers (--all prints them)" in short and "  moe_top_k = 2" in short
    assert short[-1] == "  and 176 more settings (--all prints them)"
    assert len(whole) == 5 + 30 + 1 + 201 and "  setting_199 = " + "x" * 300 in whole
    assert inspection_lines({**found, "layers": {}, "settings": None}, False)[-2:] == [
        "MoE layer  none", "settings   not stored"]


def test_the_commands_and_what_inspect_shows(tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write(tmp_path / "source", 2), tmp_path / "target"
    assert main(["reshard", str(source), str(target), "--ep", "4"]) == 0
    said = capsys.readouterr().out
    assert "plain to plain" in said and "peak memory" in said
    assert main(["reshard", str(source), str(target), "--ep", "4"]) == 0
    assert "already exists and is complete" in capsys.readouterr().out
    assert main(["reshard", str(source), str(target), "--ep", "8"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["inspect", str(target)]) == 0
    said = capsys.readouterr().out
    for words in ("step       5", "ranks 4, ep 4", "many. 24 experts: w_in_LDF (24, 24, 48)",
                  "bfloat16", "exp_avg_sq"):
        assert words in said, said
    assert main(["inspect", str(target), "--all"]) == 0 and len(said.splitlines()) <= SCREEN
    capsys.readouterr()
    assert main(["inspect", str(target), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"]["few."]["num_experts"] == 1 and found["files"] == 4
    assert found["tensors"]["model/head.weight"] == {"shape": [24, 24], "dtype": "bfloat16"}
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "x.bin").write_bytes(b"x")
    assert main(["inspect", str(tmp_path / "x.bin")]) == 2
    assert "matches no known format" in capsys.readouterr().err
    os.truncate(target / part_name(1, 4), 5000)
    for words in (["inspect", str(target)], ["reshard", str(target), str(tmp_path / "no")]):
        assert main(words) == 2
        assert "00001-of-00004.pt' has 5000 bytes, but its index lists" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 3, 5), (4, 0, 2)])
@pytest.mark.parametrize("limit", [1, 16, 40, 10**6])
def test_blocks_are_the_tensor_in_the_order_of_memory(shape: tuple[int, ...], limit: int) -> None:
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    found = list(blocks(TensorEntry(shape, x.dtype), limit))
    assert torch.equal(torch.cat([x[window].reshape(-1) for window in found]), x.reshape(-1))
    for window in found:
        assert torch.Size(window_shape(window)).numel() * 4 <= max(limit, 4)


def test_files_keep_shared_tensors_and_strides(tmp_path: Path) -> None:
    x = torch.randn(6, 4)
    state = {"a": x, "b": x, "t": x.t(), "cut": x[1:3, 1:], "none": torch.zeros(3, 0),
             "one": torch.tensor(3), "flags": torch.tensor([True, False]),
             "rest": [1, ("x", None)]}
    torch.save(state, tmp_path / "in.pt")
    path = tmp_path / "in.pt"
    lazy = torch_files.open_lazily(path, (), "a file")
    same(torch_files.read_all(lazy), state)
    assert isinstance(lazy["cut"], Derived) and lazy["rest"] == [1, ("x", None)]
    for given in (lazy, state, {**state, "a": lazy["a"], "b": lazy["b"]}):
        with torch_files.SealedWriter() as writer:
            writer.write(tmp_path / "out.pt", given)
        assert checksums.verify(tmp_path / "out.pt")
        back = torch.load(tmp_path / "out.pt", weights_only=True)
        same(back, state)
        assert back["a"].data_ptr() == back["b"].data_ptr()
    same(torch_files.read_all(lazy), state)
    assert os.path.getsize(tmp_path / "out.pt") < os.path.getsize(tmp_path / "in.pt") + 2000


MEMORY = """
import sys, torch
from pathlib import Path
from moe_plugin.checkpoint.formats.plain import open_folder
from moe_plugin.cli.main import main
from moe_plugin.cli.checkpoints import peak_bytes
folder = Path(sys.argv[1])
assert main(["reshard", str(folder / "small"), str(folder / "small to 2"), "--ep", "2"]) == 0
before = peak_bytes()
assert main(["reshard", str(folder / "large"), str(folder / "large to 2"), "--ep", "2"]) == 0
print("grew", peak_bytes() - before)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    origin = {"version": 1, "num_experts": 8, "ep_rank": 0, "ep_size": 1}
    for name, width in (("small", 8), ("large", 1024)):
        folder = tmp_path / name
        folder.mkdir()
        entries = {f"{kind}.weight": TensorEntry((8, width, width * 4), torch.float32)
                   for kind in ("moe.experts", "dense", "dense2")}
        model = {"moe._extra_state": origin, "moe.experts.w_in_LDF": _ones(entries["dense.weight"]),
                 "dense": _ones(entries["dense.weight"]), "dense2": _ones(entries["dense.weight"])}
        with torch_files.SealedWriter() as writer:
            writer.write(folder / part_name(0, 1), {"model": model, "optimizer": None})
        write_index(folder, 1, {})
    size = (tmp_path / "large" / part_name(0, 1)).stat().st_size
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True,
                          text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    grew = int(done.stdout.split("grew")[1])
    assert size > 380 * 2**20 and grew < size / 3, (size, grew)


def _ones(entry: TensorEntry) -> Derived:
    return Derived(("model", ""), entry, lambda window: torch.ones(window_shape(window)))


def test_a_writer_without_a_caller_keeps_nothing() -> None:
    assert not WriteProgress().keeps("a")


def test_sums_are_those_of_zlib() -> None:
    """Whatever computes them: files of before stay valid."""
    data = torch.randint(256, (100_003,), dtype=torch.uint8).numpy().tobytes()
    for size in (0, 1, 15, 4096, len(data)):
        assert checksums.crc32(data[:size], 7) == zlib.crc32(data[:size], 7)


def test_the_end_of_a_file_that_the_disk_refuses_is_an_error(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, calls, fsync = [], [], os.fsync

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with (pytest.raises(OSError, match="No space left"),
          torch_files.SealedWriter() as writer):
        for name in ("a", "b"):
            writer.write(tmp_path / name, {"x": torch.ones(3)}, lambda name=name: done.append(name))
    assert len(done) == 1 and checksums.verify(tmp_path / done[0])


def test_a_command_imports_what_its_format_needs(tmp_path: Path) -> None:
    """Neither torch's compiler nor its distributed checkpoint, which take seconds."""
    source = write(tmp_path / "source", 2)
    code = ("import sys; from moe_plugin.cli.main import main; "
            f"main(['reshard', {str(source)!r}, {str(tmp_path / 'target')!r}, '--ep', '4']); "
            "print([name for name in ('torch._dynamo', 'torch.distributed.checkpoint', 'omegaconf')"
            " if name in sys.modules])")
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout.splitlines()[-1] == "[]"
