"""Any number of ranks to any other, atomic writes, and a clear error for what cannot be read."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_plugin import MoELayer
from moe_plugin.checkpoint import CheckpointError, load, merge, save, split
from moe_plugin.comm import Comm, LocalComm, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.training.gradients.sync import sync_gradients
from moe_plugin.utils import checksums
from tests.seeds import seeded

SIZES = [1, 2, 4, 8]


class Model(nn.Module):
    """Two MoE layers (more and fewer experts than ranks) around a linear one."""

    def __init__(self, comm: Comm, experts: int = 4, seed: int = 0,
                 shards: int | None = None) -> None:
        super().__init__()
        with seeded(seed):
            self.first = MoELayer(8, comm, num_experts=8, parallel={"shards": shards},
                                  experts={"kind": "gated_ffn", "hidden_dim": 16})
            self.middle = nn.Linear(8, 8)
            self.second = MoELayer(8, comm, num_experts=experts, experts={"hidden_dim": 16})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.middle(self.first(x).output)).output


def train(model: Model, optimizer: torch.optim.Optimizer, comm: Comm, start: int,
          steps: int) -> list[float]:
    """Steps on a batch that does not depend on the number of ranks."""
    curve = []
    for step in range(start, start + steps):
        x = torch.randn(16, 8,
                        generator=torch.Generator().manual_seed(step)).chunk(comm.size)[comm.rank]
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        sync_gradients(model, comm)
        optimizer.step()
        curve.append(comm.all_reduce(loss.detach()).item() / comm.size)
    return curve


def save_trained(folder: Path, comm: Comm, steps: int, shards: int | None) -> None:
    """A checkpoint after some steps."""
    model = Model(comm, shards=shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, comm, 0, steps)
    save(folder, model, optimizer, comm, {"step": steps})


def resumed(folder: Path, comm: Comm, steps: int, shards: int | None) -> list[float]:
    """Losses of further steps, of a model and an optimizer that began otherwise."""
    model = Model(comm, seed=99, shards=shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    extra = load(folder, model, optimizer, comm)
    return train(model, optimizer, comm, extra["step"], steps)


@pytest.mark.parametrize("old,new,cut", [
    *((old, new, (None, None)) for old, new in itertools.product(SIZES, SIZES)), (4, 2, (2, 2)),
    (2, 4, (None, 4)), (4, 4, (4, 2)), (8, 1, (2, None))
])
def test_resume_at_any_size_continues_the_curve(tmp_path: Path, old: int, new: int,
                                                cut: tuple[int | None, int | None]) -> None:
    """cut: ranks over which the first layer's experts are cut, before and after."""
    def whole(comm: Comm) -> list[float]:
        model = Model(comm)
        return train(model, torch.optim.AdamW(model.parameters(), lr=0.01), comm, 0, 6)[3:]

    run_simulated(old, lambda comm: save_trained(tmp_path / "ckpt", comm, 3, cut[0]))
    got = run_simulated(new, lambda comm: resumed(tmp_path / "ckpt", comm, 3, cut[1]))[0]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(run_simulated(1, whole)[0]),
                               rtol=1e-4, atol=1e-5)


def test_states_of_other_shards_do_not_load_by_themselves() -> None:
    def rank(comm: Comm) -> None:
        whole, cut = Model(comm), Model(comm, shards=2)
        for model, state, words in [(whole, cut,
                                     "checkpoint has shards=2, but this layer has shards=None"),
                                    (cut, whole, "checkpoint has shards=None")]:
            with pytest.raises(ValueError, match=words):
                model.load_state_dict(state.state_dict())

    run_simulated(2, rank)
    with pytest.raises(ValueError, match="cannot be divided among 4 ranks with shards=3"):
        split(Model(LocalComm()).state_dict(), 0, 4, shards={"first.": 3})


def test_merge_and_split_are_inverse_also_for_custom_experts() -> None:
    layer = MoELayer(from_dict({"model_dim": 4, "num_experts": 4}),
                     experts=lambda index: nn.Linear(4, 4))
    whole = layer.state_dict()
    for size in (1, 2, 4):
        back = merge([split(whole, rank, size) for rank in range(size)])
        assert back.keys() == whole.keys()
        assert all(
            torch.equal(back[k], v) if isinstance(v, torch.Tensor) else back[k] == v
            for k, v in whole.items())
    with pytest.raises(ValueError, match="cannot be divided among 3 ranks"):
        split(whole, 0, 3)
    with pytest.raises(ValueError, match="pass the states of all ranks"):
        merge([split(whole, rank, 4) for rank in (1, 0, 2, 3)])


def saved(tmp_path: Path) -> Path:
    run_simulated(2, lambda comm: save(tmp_path / "ckpt", Model(comm), None, comm))
    return tmp_path / "ckpt"


def test_ranks_that_do_not_share_the_experts_write_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path)
    before = (tmp_path / "ckpt" / "index.json").read_bytes()

    def rank(comm: Comm) -> str:
        with pytest.raises(CheckpointError) as error:
            save(tmp_path / "ckpt", Model(LocalComm()), None, comm)
        return str(error.value)

    said = run_simulated(2, rank)
    assert "are spread over 1 ranks, but 2 ranks write the" in said[0], said
    assert (tmp_path / "ckpt" / "index.json").read_bytes() == before


def load_here(path: Path, experts: int = 4, optimizer: bool = False) -> None:
    def rank(comm: Comm) -> None:
        model = Model(comm, experts)
        before = {
            k: v.clone() for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)
        }
        try:
            load(path, model, torch.optim.SGD(model.parameters(), 0.1) if optimizer else None, comm)
        finally:
            assert all(
                torch.equal(v, before[k]) for k, v in model.state_dict().items()
                if k in before), "a failed load changed the model"

    run_simulated(1, rank)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_here(tmp_path / "nothing")


def of_version_9(index: bytes) -> bytes:
    return checksums.seal_json({**checksums.open_json(index.decode())[0], "version": 9}).encode()


@pytest.mark.parametrize(("name", "change", "words"), [
    ("part-00001-of-00002.pt", lambda data: data[:len(data) // 2],
     "part-00001-of-00002.pt.*truncated"),
    ("part-00000-of-00002.pt", lambda data: b"x" * len(data),
     "part-00000-of-00002.pt.*cannot be read"),
    ("index.json", of_version_9, "version 9")])
def test_damaged_files(tmp_path: Path, name: str, change: Callable[[bytes], bytes],
                       words: str) -> None:
    file = saved(tmp_path) / name
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=words):
        load_here(tmp_path / "ckpt")


def test_other_expert_count(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError,
                       match="num_experts=4 in layer 'second.', but the model has 8"):
        load_here(saved(tmp_path), experts=8)


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod"])
def test_a_wrapper_on_one_side_is_named_with_the_remedy(wrapper: str, tmp_path: Path) -> None:
    """DDP and `torch.compile` put a name in front of all others."""
    model, around = Model(LocalComm()), nn.Module()
    around.add_module(wrapper, model)
    save(tmp_path / "plain", model)
    save(tmp_path / "wrapped", around)
    with pytest.raises(CheckpointError, match=f"model is in a wrapper: pass model.{wrapper}"):
        load(tmp_path / "plain", around)
    with pytest.raises(CheckpointError, match=f"wrapped model: save model.{wrapper}, or load"):
        load(tmp_path / "wrapped", model)
    load(tmp_path / "plain", getattr(around, wrapper))


def test_no_optimizer_state(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no optimizer state"):
        load_here(saved(tmp_path), optimizer=True)


def test_another_optimizer_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    adamw = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.LinearLR(sgd)  # has a setting of its own in the groups
    model(torch.randn(3, 2)).sum().backward()
    for optimizer in (sgd, adamw):
        optimizer.step()
        save(tmp_path / type(optimizer).__name__, model, optimizer)
    with pytest.raises(CheckpointError, match="to another optimizer: .* momentum, .* with the "
                       "state momentum_buffer, and this AdamW has betas, eps with the state exp_"):
        load(tmp_path / "SGD", model, adamw)
    with pytest.raises(CheckpointError, match="with the state exp_avg, .* this SGD has dampening"):
        load(tmp_path / "AdamW", model, sgd)
    del adamw.param_groups[0]["fused"]  # as of another version
    save(tmp_path / "SGD", model, torch.optim.SGD(model.parameters(), 0.2))
    load(tmp_path / "SGD", model, sgd)
    load(tmp_path / "AdamW", model, adamw)


def test_extra_that_is_not_json_is_named_before_anything_is_written(tmp_path: Path) -> None:
    extra = {"step": 1, "a": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"extra\['a'\] is a Tensor, .* contain numbers and text"
                       ) as error:
        save(tmp_path / "ckpt", nn.Linear(2, 2), extra=extra)
    assert "free space" not in str(error.value) and not list(tmp_path.iterdir())


def errors_of_saves(path: Path, size: int) -> list[str]:
    """What `save` says on each rank."""
    def rank(comm: Comm) -> str:
        with pytest.raises(CheckpointError) as error:
            save(path, Model(comm, seed=5), None, comm)
        return str(error.value)

    return run_simulated(size, rank)


def test_a_rank_that_cannot_write_ends_the_save_on_all_and_keeps_the_old_checkpoint(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = saved(tmp_path), checksums.write_sealed
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    def full(file: Path, save_to: Callable[[Any], None]) -> None:
        if "part-00001" in file.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, save_to)

    monkeypatch.setattr(checksums, "write_sealed", full)
    first, second, *others = errors_of_saves(path, 4)
    assert "rank 1 could not write" in second and "disk is full" in second
    assert "MiB free): free space" in second
    assert all("error on rank(s) 1;" in text for text in (first, *others))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = errors_of_saves(tmp_path / "file" / "ckpt", 2)
    assert "rank 0 could not write" in first and "choose another folder" in first
    assert "error on rank(s) 0;" in second


def test_killed_between_the_two_renames(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.rename(path.with_name("ckpt.old"))
    run_simulated(1, lambda comm: load(path, Model(comm), None, comm))


@pytest.mark.parametrize("name", ["index.json", "part-00000-of-00002.pt", "part-00001-of-00002.pt"])
def test_every_single_bit_flip_and_every_cut_is_detected(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path)
    whole, model = (path / name).read_bytes(), Model(LocalComm())
    edges = [*range(64), *range(len(whole) - 64, len(whole))]
    for offset in sorted({*edges, *range(0, len(whole), max(1, len(whole) // 300))}):
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << offset % 8
        (path / name).write_bytes(flipped)
        with pytest.raises(CheckpointError):
            load(path, model)
    # without its last line break index.json is still whole
    for size in range(0, len(whole) - 1, max(1, len(whole) // 50)):
        (path / name).write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            load(path, model)
    (path / name).write_bytes(whole)
    load(path, model)


def unsealed(path: Path) -> None:
    """Turn a checkpoint into one of a release without checksums."""
    index = checksums.open_json((path / "index.json").read_text())[0]
    for rank, size in enumerate(index["bytes"]):
        os.truncate(path / f"part-{rank:05d}-of-{index['parts']:05d}.pt", size - 27)
    index["bytes"] = [size - 27 for size in index["bytes"]]
    (path / "index.json").write_text(json.dumps(index))


def test_a_checkpoint_without_checksums_loads_with_one_warning(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warned() -> list[str]:
        """Of the loader alone: other loggers of the process may speak at any time."""
        name = "moe_plugin.checkpoint.save_load"
        return [record.getMessage() for record in caplog.records
                if (record.name, record.levelname) == (name, "WARNING")]

    caplog.set_level("WARNING")  # commands in this process may have left another one
    path = saved(tmp_path)
    load(path, Model(LocalComm()))
    assert not warned()
    unsealed(path)
    load(path, Model(LocalComm()))
    [text] = warned()
    assert "without checksums" in text


def test_a_damaged_copy_gives_way_to_its_predecessor(tmp_path: Path,
                                                     caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path)
    shutil.copytree(path, path.with_name("ckpt.old"))
    os.truncate(path / "part-00001-of-00002.pt", 100)
    load(path, Model(LocalComm()))
    assert "part-00001-of-00002.pt" in caplog.text and "ckpt.old" in caplog.text


def test_the_checkpoint_before_is_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    model = Model(LocalComm())
    for step in (1, 2, 3):
        save(tmp_path / "ckpt", model, extra={"step": step}, keep_old=step < 3)
        assert (tmp_path / "ckpt.old").exists() == (step == 2)
        if step == 2:
            shutil.copytree(tmp_path, tmp_path / "two")
    os.truncate(tmp_path / "two" / "ckpt" / "part-00000-of-00001.pt", 100)
    assert load(tmp_path / "two" / "ckpt", model) == {"step": 1}
    assert load(tmp_path / "ckpt", model) == {"step": 3}


def test_parts_in_each_others_place(tmp_path: Path) -> None:
    """Whole files, but not those of the index: the older checkpoint is taken, where there is one.
    """
    path = saved(tmp_path)
    shutil.copytree(path, path.with_name("kept"))
    shutil.copyfile(path / "part-00000-of-00002.pt", path / "part-00001-of-00002.pt")
    with pytest.raises(CheckpointError, match="part-00001-of-00002.pt.*to a different rank"):
        load(path, Model(LocalComm()))
    path.with_name("kept").rename(path.with_name("ckpt.old"))
    load(path, Model(LocalComm()))


@pytest.mark.parametrize("content", [
    b'{"version": 1,', b"\xff\xfe\x00\x01", b"[1, 2]", b"", b'{"version": 1}',
    b'{"version": 1, "parts": 1}', b'{"version": 1, "parts": -1, "bytes": [], "extra": {}}',
    b'{"version": 1, "parts": 2, "bytes": [1], "extra": {}}', b"[" * 2000 + b"]" * 2000,
    b"[" * 200_000])
def test_an_index_that_is_not_ours_is_named(tmp_path: Path, content: bytes) -> None:
    (saved(tmp_path) / "index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="index.json is damaged") as error:
        load_here(tmp_path / "ckpt")
    assert len(str(error.value)) < 600


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize(("options", "words"), [("size=64k", "disk is full"),
                                                ("size=64k,ro", "read-only")])
def test_full_and_read_only_disks_end_with_the_remedy(tmp_path: Path, options: str,
                                                      words: str) -> None:
    (tmp_path / "disk").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs",
                              str(tmp_path / "disk")], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        model = nn.Linear(200, 200)
        with pytest.raises(CheckpointError, match=words):
            save(tmp_path / "disk" / "ckpt", model)
        assert not (tmp_path / "disk" / "ckpt").exists()
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)
