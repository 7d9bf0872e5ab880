"""Tensors in files: lazy sources, windows of any strides, views, and files that are cut short."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from moe_plugin.checkpoint import file_workers, save
from moe_plugin.checkpoint.conversion import Conversion
from moe_plugin.checkpoint.derived import (
    cast,
    in_memory,
    item_of,
    joined,
    part_of,
    stacked,
    transposed,
)
from moe_plugin.checkpoint.formats import all as checkpoint_formats  # noqa: F401 - registers all formats
from moe_plugin.checkpoint.formats.base import CheckpointSizes, Format, open_source
from moe_plugin.checkpoint.formats.megatron.common import optimizer_parts, regrouped
from moe_plugin.checkpoint.formats.megatron.neutral import _kv_heads, _table, _without_name
from moe_plugin.checkpoint.neutral import DecoderSettings, NeutralModel, check_names, masters
from moe_plugin.checkpoint.source import (
    MODEL,
    CheckpointError,
    Source,
    TensorEntry,
    View,
    Window,
    full_window,
)
from tests.fuzz.hostile import bounded

pytestmark = pytest.mark.fast


# Lazy sources: windows, views and what they read.


class InMemory(Source):
    """Tensors in memory; counts the elements that were read."""

    def __init__(self, **tensors: Tensor) -> None:
        self.format, self.values, self.layers, self.elements = "plain", {}, {}, 0
        self.tensors = {("model", name): value for name, value in tensors.items()}
        self.entries = {key: TensorEntry(tuple(value.shape), value.dtype)
                        for key, value in self.tensors.items()}

    def _read(self, key: tuple[str, str], window: Window) -> Tensor:
        value = self.tensors[key][window]
        self.elements += value.numel()
        return value


def test_derived_tensors_equal_torch_on_every_window_and_read_it_alone():
    a, b = torch.randn(4, 3, 5), torch.randn(4, 3, 5)
    source = InMemory(a=a, b=b)
    first, second = source.tensor(("model", "a")), source.tensor(("model", "b"))
    cases = {
        "same": (first, a),
        "transposed": (transposed(first, (2, 0, 1)), a.permute(2, 0, 1)),
        "part": (part_of(first, (slice(1, 3), slice(0, 2), slice(2, 5))), a[1:3, :2, 2:]),
        "joined": (joined([first, second], 1), torch.cat([a, b], 1)),
        "stacked": (stacked([first, second]), torch.stack([a, b])),
        "item": (item_of(first, 2), a[2]),
        "cast": (cast(first, torch.bfloat16), a.bfloat16()),
    }
    view = View(source, [one.renamed(name) for name, (one, _) in cases.items()])
    for name, (_, expected) in cases.items():
        key = ("model", name)
        assert view.entries[key] == TensorEntry(tuple(expected.shape), expected.dtype)
        for axis, size in enumerate(expected.shape):
            for start in range(size + 1):
                for stop in range(start, size + 1):
                    window = (slice(None),) * axis + (slice(start, stop),)
                    source.elements = 0
                    assert torch.equal(view.read(key, window), expected[window])
                    assert source.elements == expected[window].numel()


def test_a_parameter_in_memory_is_read_without_its_gradient():
    value = torch.nn.Parameter(torch.randn(2, 3))
    read = in_memory(("model", "a"), value).read((slice(0, 1), slice(0, 3)))
    assert torch.equal(read, value[:1]) and not read.requires_grad


def test_windows_and_names_that_do_not_fit_are_refused():
    source = InMemory(a=torch.zeros(2, 3))
    for window in ((slice(0, 3),), (slice(0, 2, 2),), (slice(None),) * 3, (slice(-1, 2),)):
        with pytest.raises(ValueError, match="window"):
            source.read(("model", "a"), window)
    with pytest.raises(CheckpointError, match="no tensor 'c'"):
        source.read(("model", "c"))
    one = source.tensor(("model", "a"))
    with pytest.raises(CheckpointError, match="two tensors"):
        View(source, [one, one])
    with pytest.raises(CheckpointError, match="cannot be joined"):
        joined([one, transposed(one, (1, 0))], 0)
    with pytest.raises(CheckpointError, match="'a' has no framework-independent name"):
        check_names(["embed.weight", "a"])


def test_a_layout_that_a_format_does_not_know_is_refused_by_name():

    class Two(Format):
        name, sizes = "two", frozenset({"world", "ep"})

        def detect(self, path):
            return False

        def open(self, path, trust=False):
            raise NotImplementedError

    Two().check(CheckpointSizes(world=2, ep=1))
    with pytest.raises(ValueError, match="'two' does not support --tp; .* options: --ep, --world"):
        Two().check(CheckpointSizes(tp=2))
    with pytest.raises(ValueError, match="layout tp=0 .* at least 1"):
        CheckpointSizes(tp=0)


# Tensors in files: windows of any strides, and files that are cut short while they are read.


AXES = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), max_size=4)


@given(AXES, st.data(), st.sampled_from([(1 << 23, 1 << 16), (64, 16), (4, 4)]))
@bounded(200)
def test_strided_tensors_are_read_as_they_lie(
        tmp_path: Path, axes: list[tuple[int, int]], data: st.DataObject,
        limits: tuple[int, int]) -> None:
    """Axes in any order, with gaps between them or all at one place, in one piece or many."""
    order, stride, step = data.draw(st.permutations(range(len(axes)))), [0] * len(axes), 1
    for axis in order:
        stride[axis] = data.draw(st.sampled_from([step, step, step, 0]))
        step *= max(axes[axis][0], 1) * axes[axis][1]
    shape, offset = [size for size, _ in axes], data.draw(st.integers(0, 9))
    numbers_N = torch.arange(offset + 6**4 * 3**4 + 1, dtype=torch.int32)[:offset + step + 1]
    path = tmp_path / "numbers"
    path.write_bytes(b"odd" + numbers_N.numpy().tobytes())
    with pytest.MonkeyPatch.context() as patch, open(path, "rb") as file:
        patch.setattr(file_workers, "SPAN", limits[0])
        patch.setattr(file_workers, "GAP", limits[1])
        found = file_workers.read_strided(file.fileno(), 3 + 4 * offset, shape, stride, torch.int32)
    assert torch.equal(found, numbers_N[offset:].as_strided(shape, stride))


def _plain(folder: Path) -> Path:
    save(folder, nn.Linear(1000, 1000, bias=False))
    return folder / "part-00000-of-00001.pt"


def _hugging_face(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.randn(1000, 1000)}, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("write", [_plain, _hugging_face])
def test_a_file_that_is_cut_while_it_is_read_is_named(
        write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path / "in")
    with open_source(tmp_path / "in") as source:
        first = source.read((MODEL, "weight"), (slice(0, 1),))
        os.truncate(path, path.stat().st_size // 2)
        assert torch.equal(source.read((MODEL, "weight"), (slice(0, 1),)), first)
        with pytest.raises(CheckpointError, match=f"{path.name}.*truncated while it was"):
            source.read((MODEL, "weight"))
        with pytest.raises(CheckpointError, match=path.name):
            Conversion(source, tmp_path / "out", source.format, CheckpointSizes()).run()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_master_copies_are_the_weights_in_float32(dtype: torch.dtype):
    """Of those parameters alone that are trained in 16 bits."""
    source = InMemory(trained=torch.tensor([1.0, 1 / 3]).to(dtype), wide=torch.ones(2),
                      frozen=torch.ones(2, dtype=dtype))
    for name in ("trained", "wide"):
        source.entries["exp_avg", name] = TensorEntry((2,), torch.float32)
    [copy] = masters(source)
    assert copy.key == ("master", "trained") and copy.entry == TensorEntry((2,), torch.float32)
    read = copy.read((slice(0, 2),))
    assert read.dtype == torch.float32
    assert torch.equal(read, source.tensors["model", "trained"].float())


@pytest.mark.parametrize(("groups", "scores", "top_k", "group_top_k", "expected"), [
    (None, None, 8, None, None), (8, None, 8, 4, 2), (8, None, 2, 4, 1), (8, 3, 8, 4, 3)])
def test_scores_of_a_group(groups, scores, top_k, group_top_k, expected):
    settings = SimpleNamespace(groups=groups, group_scores=scores, top_k=top_k,
                               group_top_k=group_top_k)
    assert NeutralModel.group_scores.fget(SimpleNamespace(settings=settings)) == expected


@pytest.mark.parametrize("part", ["mlp.", "mlp.shared_experts."])
@pytest.mark.parametrize("gated", [True, False])
def test_first_matrices_of_megatron(part: str, gated: bool):
    """One matrix has the rows of the gate before those of the input."""
    name = f"decoder.layers.1.{part}linear_fc1.weight"
    ours = part.replace("mlp.shared_experts", "moe.shared")
    model = DecoderSettings(heads=2, kv_heads=2, norm="rmsnorm", norm_eps=1e-5, activation="silu",
                            gated=gated, positions="rotary", tied=True)
    rows = torch.arange(12.0).view(4, 3)
    found = {one.key[1]: one.read(full_window(one.entry.shape)) for one in
             _table(model).neutral([in_memory((MODEL, name), rows)], _without_name)}
    wanted = dict(zip(("w_gate", "w_in"), rows.chunk(2), strict=True)) if gated else {"w_in": rows}
    assert list(found) == [f"layers.1.{ours}{each}.weight" for each in wanted]
    assert all(map(torch.equal, found.values(), wanted.values()))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_key_and_value_heads_of_megatron(kv_heads: int):
    """Four query heads of width 3."""
    at = "decoder.layers.0.self_attention.linear_"
    source = InMemory(**{f"{at}proj.weight": torch.zeros(5, 12),
                         f"{at}qkv.weight": torch.zeros((4 + 2 * kv_heads) * 3, 5)})
    assert _kv_heads(source, 4) == kv_heads


def test_optimizers_of_a_common_state_of_megatron():
    one, other = {"param_groups": []}, {"optimizer": {}}
    assert optimizer_parts(one) == [one] and optimizer_parts({1: other, 0: one}) == [one, other]
    assert [optimizer_parts(value) for value in (None, {}, [1], "text")] == [[]] * 4


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_groups_of_a_separate_optimizer_for_experts(own: bool, biases: bool):
    """Dense groups are the templates of groups that experts did not have."""
    dense = [{"lr": 1.0, "wd_mult": 1.0}, {"lr": 1.0, "wd_mult": 0.0}]
    experts = {"lr": 2.0, "wd_mult": 1.0, "is_expert_parallel": True}
    state = {number: {"optimizer": {"param_groups": groups}}
             for number, groups in enumerate([dense, [experts]])}
    found = regrouped(state, own, biases)
    parts = [found[0], found[1]] if own else [found]
    groups = [part["optimizer"]["param_groups"] for part in parts]
    bias = [{**dense[1], "is_expert_parallel": True}] if biases else []
    assert groups == [dense, [experts, *bias]][:len(parts)]
