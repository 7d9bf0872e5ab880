"""Checkpoints are read into a file of experts one expert at a time."""

from __future__ import annotations

import resource

import pytest
import torch

from moe_plugin.checkpoint import CheckpointError, load, save, torch_files
from moe_plugin.checkpoint.formats.base import open_source
from moe_plugin.checkpoint.layers import load_layer, write_experts
from moe_plugin.checkpoint.source import MODEL, Derived, DerivedSource, TensorEntry
from moe_plugin.comm import run_simulated
from moe_plugin.memory.experts.store import FileWeights
from tests.memory.test_stored_experts import EXPERT, D, E, F, bits, layer_of, tokens

pytestmark = pytest.mark.fast


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
