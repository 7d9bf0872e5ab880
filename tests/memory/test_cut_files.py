"""Files of experts and weights: how checkpoints are read into them, and what damaged ones do."""

from __future__ import annotations

import os
import resource
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moe_plugin.checkpoint import CheckpointError, load, save, torch_files
from moe_plugin.checkpoint.formats.base import open_source
from moe_plugin.checkpoint.layers import load_layer, write_experts
from moe_plugin.checkpoint.source import MODEL, Derived, DerivedSource, TensorEntry
from moe_plugin.comm import run_simulated
from moe_plugin.layer import MoELayer
from moe_plugin.memory.experts.store import FileWeights
from moe_plugin.memory.safetensors_file import SafetensorsFile
from moe_plugin.memory.tiers import HostTier, TierError
from moe_plugin.memory.weights.files import load_weights, save_weights
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.utils import checksums
from tests.memory.test_stored_experts import EXPERT, D, E, F, bits, layer_of, tokens

pytestmark = pytest.mark.fast


# Checkpoints are read into a file of experts one expert at a time.


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """Bytes of each read of a checkpoint's tensor with as many values as an expert's matrix."""
    sizes, original = [], torch_files.StoredTensor.read

    def counting(self, window):
        found = original(self, window)
        if found.dim() == 3:
            sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(torch_files.StoredTensor, "read", counting)
    return sizes


@pytest.mark.parametrize("writers, readers", [(1, 1), (2, 1), (1, 2)])
def test_a_checkpoint_of_any_number_of_ranks(tmp_path, read, writers, readers):
    def write(comm):
        layer = layer_of(comm=comm)
        with torch.no_grad():
            for p in layer.experts.parameters():
                p.normal_(generator=torch.Generator().manual_seed(comm.rank))
        layer.router.weight_ED.data.copy_(torch.arange(E * D).view(E, D) % 7 / 7)
        save(tmp_path / "saved", layer, comm=comm)

    def use(comm, store):
        layer = layer_of(store, comm, tmp=tmp_path / "experts")
        if store == "disk":
            assert not layer.experts.store.weights.written
        load(tmp_path / "saved", layer, comm=comm)
        if store == "disk" and comm.rank == 0:
            assert len(read) >= 2 * E // readers and max(read) == D * F * 4
        return bits(layer, tokens(7, comm.rank))

    run_simulated(writers, write)
    found = run_simulated(readers, lambda comm: use(comm, "disk"))
    for a, b in zip(found, run_simulated(readers, lambda comm: use(comm, "device")), strict=True):
        assert torch.equal(a, b)


def test_a_layer_of_a_neutral_source(tmp_path):
    want, sizes = layer_of(), []
    state = {name: value for name, value in want.state_dict().items()
             if isinstance(value, torch.Tensor)}
    names = {"router.weight_ED": "router.weight"}

    def one(name, value):
        def window(w):
            sizes.append(value[w].numel())
            return value[w]

        key = (MODEL, "layers.0.moe." + names.get(name, name))
        return Derived(key, TensorEntry(tuple(value.shape), value.dtype), window)

    source = DerivedSource([one(*each) for each in state.items()], "test", {}, {})
    got = layer_of("disk", tmp=tmp_path)
    got.router.weight_ED.data.zero_()
    load_layer(got, source, "layers.0.moe.")
    assert max(sizes) == D * F < EXPERT
    assert torch.equal(bits(got, tokens()), bits(want, tokens()))


def test_building_a_model_writes_and_draws_nothing(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("not before it is needed")

    for name in ("fetch", "fill", "mapped"):
        monkeypatch.setattr(FileWeights, name, refuse)
    layer = layer_of("disk", tmp=tmp_path)
    state = torch.random.get_rng_state()
    layer_of()
    assert torch.equal(torch.random.get_rng_state(), state)  # as many draws as on the device
    assert not layer.experts.store.weights.written


@pytest.mark.parametrize("writers", [1, 2])
def test_a_file_of_a_checkpoints_experts(tmp_path, writers):
    def write(comm):
        layer = layer_of(comm=comm)
        save(tmp_path / "saved", layer, comm=comm)

    run_simulated(writers, write)
    path = tmp_path / "experts.safetensors"
    with open_source(tmp_path / "saved") as source:
        write_experts(source, path)
    got, want = layer_of("disk", tmp=path), layer_of()
    load(tmp_path / "saved", want)
    got.router.load_state_dict(want.router.state_dict())
    assert torch.equal(bits(got, tokens()), bits(want, tokens()))
    with pytest.raises(CheckpointError, match="cannot be written"), open_source(
            tmp_path / "saved") as source:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (EXPERT, before[1]))
        try:
            write_experts(source, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(bits(got, tokens(seed=1)), bits(want, tokens(seed=1)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["experts.safetensors", "saved"]


def test_a_checkpoint_without_experts_is_named(tmp_path):
    save(tmp_path / "saved", torch.nn.Linear(2, 2))
    with open_source(tmp_path / "saved") as source, pytest.raises(
            CheckpointError, match="has no feed-forward experts"):
        write_experts(source, tmp_path / "experts.safetensors")


# A file of experts or weights that is cut short, or has a flipped bit, while it is in use.


WIDE = {"hidden_dim": 4096}  # experts of many pages: what is cut is in no page that was read


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of another program's with a layer's experts."""
    monkeypatch.setattr("moe_plugin.memory.experts.stored.user_cache", lambda _: tmp_path / "cache")
    path = tmp_path / "model.safetensors"
    state = layer_of(number=0, **WIDE).experts.state_dict()
    save_file({f"experts.{name}": value for name, value in state.items()}, path)
    return path


def _cut(path: Path | str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


def test_a_given_file_that_is_cut_is_named_where_experts_compute(given: Path) -> None:
    layer = layer_of("disk", tmp=given, number=0, **WIDE)
    bits(layer, tokens())
    _cut(given)
    layer.experts.store.forget()
    with pytest.raises(TierError, match=r"model.safetensors ends \d+ bytes before the end of a "
                                        "tensor"):
        bits(layer, tokens())


def test_a_given_file_that_is_cut_is_named_where_states_are_saved(given: Path) -> None:
    layer = layer_of("disk", tmp=given, number=0, **WIDE)
    _cut(given)
    with pytest.raises(TierError, match="model.safetensors ends .* changed or truncated"):
        layer.state_dict()


def test_a_state_stays_when_the_given_file_is_cut_afterwards(given: Path) -> None:
    # the library maps what it gives
    want = {name: x.clone() for name, x in load_file(given).items()}
    layer = layer_of("disk", tmp=given, number=0, dtype=torch.bfloat16, **WIDE)
    state = layer.experts.state_dict()
    _cut(given)
    for name, x in state.items():
        assert x.dtype == torch.float32  # as in the file
        assert torch.equal(x, want[f"experts.{name}"]), name
    assert not any((given.parent / "cache").rglob("*.safetensors"))


def _own(tmp_path: Path) -> MoELayer:
    layer = layer_of("disk", tmp=tmp_path, **WIDE)
    bits(layer, tokens())
    return layer


def test_our_own_file_that_is_cut_is_named(tmp_path: Path) -> None:
    layer = _own(tmp_path)
    layer.state_dict()
    os.ftruncate(layer.experts.store.weights.file.held(0)["w_in_LDF"].file, 4096)
    with pytest.raises(TierError, match=r"has 4096 bytes instead of \d+: it was truncated"):
        layer.state_dict()


def _trainer() -> StreamedTrainer:
    return StreamedTrainer(
        [nn.Linear(64, 64) for _ in range(3)], lambda out, target: (out - target).square().mean(),
        partial(torch.optim.SGD, lr=0.1), HostTier("cpu"))


def test_saved_weights_that_are_cut_are_named(tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between the check of all files and the reading of one."""
    save_weights(_trainer(), tmp_path / "saved")
    later, read = _trainer(), SafetensorsFile.read

    def cut_before(file: SafetensorsFile, name: str) -> torch.Tensor:
        _cut(file.name)
        return read(file, name)

    monkeypatch.setattr(SafetensorsFile, "read", cut_before)
    with pytest.raises(TierError, match=r"block_00000.safetensors ends \d+ bytes before"):
        load_weights(later, tmp_path / "saved")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"block_00000.safetensors cannot be read \(it ends before "
                                         r"its last tensor does\)"):
        load_weights(later, tmp_path / "saved")


def test_a_file_is_read_as_the_library_wrote_it(tmp_path: Path) -> None:
    want = {"a": torch.randn(3, 5), "b.c": torch.arange(7), "none": torch.empty(0, 4),
            "one": torch.tensor(2.5, dtype=torch.bfloat16), "bits": torch.tensor([True, False])}
    save_file(want, tmp_path / "x.safetensors", {"step": "3"})
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.metadata == {"step": "3"} and file.held.keys() == want.keys()
        for name, x in want.items():
            found = file.read(name)
            assert found.dtype == x.dtype and torch.equal(found, x), name


@pytest.mark.parametrize(("header", "message"), [
    (b"[]", "does not describe tensors"), (b'{"a": 1}', "does not describe tensors"),
    (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "4 bytes, which does not"),
    (b'{"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}', "has dtype"),
    (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "integers"),
    (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}', "integers"),
    (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}', "ends before"),
    (b"[" * 100_000, "does not describe tensors"), (b"\xff\xff", "can't decode")])
def test_damaged_headers_are_named(header: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=message):
        SafetensorsFile(path)


def _flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 64]))


def test_a_flipped_bit_is_named_where_a_sealed_file_is_opened_and_not_later(
        given: Path, tmp_path: Path) -> None:
    """As docs/offload.md says: the checksum is verified once, when the layer is built."""
    sealed = tmp_path / "sealed.safetensors"
    save_file(load_file(given), sealed, checksums.METADATA)
    checksums.seal(sealed)
    layer, x = layer_of("disk", tmp=sealed, number=0, **WIDE), tokens()
    want = bits(layer, x)
    place = layer.experts.store.weights.file.held(0)["w_in_LDF"].offset + 3  # of each expert
    _flip(sealed, place)
    layer.experts.store.forget()
    assert not torch.equal(bits(layer, x), want)  # also without a checksum, as `given` has none
    with pytest.raises(ValueError, match="sealed.safetensors.* is not a complete safetensors"):
        layer_of("disk", tmp=sealed, number=0, **WIDE)
    _flip(sealed, place)
    assert torch.equal(bits(layer_of("disk", tmp=sealed, number=0, **WIDE), x), want)
