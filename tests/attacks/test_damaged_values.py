"""Files with one flipped bit: what is read is what was written, or an error names the file."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moe_plugin import LocalComm, MoELayer
from moe_plugin.checkpoint import load, save
from moe_plugin.checkpoint.conversion import Conversion
from moe_plugin.checkpoint.formats.base import open_source
from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.memory.safetensors_file import SafetensorsFile
from moe_plugin.memory.tiers import HostTier
from moe_plugin.memory.weights.files import load_weights, save_weights
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.training.resilience.swarm.stage import load_swarm, save_swarm
from moe_plugin.utils import checksums
from scripts.emulate.damage import files_of
from tests.fuzz.samples import TARGETS, format_of, sample

pytestmark = pytest.mark.fast

FLIPS = 12
SEALED = ("plain", "fairseq", "megatron", "megatron_native", "hf", "hf-float8")
# made from another format: their own tools write no checksums
CONVERTED = {"tutel": "plain", "fairseq_branch": "fairseq"}
# files without numbers of a model
OTHERS = ("config.json", "conversion.json", "latest_checkpointed_iteration.txt")
Values = dict[object, Tensor]


@cache
def converted(name: str, folder: Path) -> Path:
    """A whole checkpoint of a format, written by a conversion where only that seals its files."""
    if name not in CONVERTED:
        return sample(name)
    with open_source(sample(name)) as source:
        Conversion(source, folder / "between", CONVERTED[name]).run()
    with open_source(folder / "between") as source:
        Conversion(source, folder / name, name).run()
    return folder / name


def flip(path: Path, seed: int) -> Path:
    """Flip a bit of a file of a folder, where larger files are hit more often."""
    draw = random.Random(seed)
    files = [file for file in files_of(path) if file.name not in OTHERS]
    file = draw.choices(files, [file.stat().st_size for file in files])[0]
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return file


def check_flips(whole: Path, read: Callable[[Path], Values], folder: Path) -> None:
    """Every flip is an error that names the file, or changes nothing; some are errors."""
    want, refused = read(whole), 0
    for seed in range(FLIPS):
        path = folder / f"flipped-{seed}"
        shutil.copytree(whole, path)
        file = flip(path, seed)
        try:
            got = read(path)
        except ValueError as error:
            index = file.name == "model.safetensors.index.json"  # names other files
            assert index or file.name in str(error), (file, error)
            refused += 1
            continue
        assert got.keys() == want.keys(), file
        for name, value in want.items():
            assert _same(got[name], value), (file, name)
    assert refused >= FLIPS // 2


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bytes(
        one.contiguous().reshape(-1).view(torch.uint8).numpy()) == bytes(
            other.contiguous().reshape(-1).view(torch.uint8).numpy())


def _read(name: str, path: Path) -> Values:
    with open_source(path, format_of(name)) as source:
        return {key: source.read(key) for key in source.entries}


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_source_reads(name: str, tmp_path: Path) -> None:
    check_flips(converted(name, tmp_path), partial(_read, name), tmp_path)


def test_a_file_is_verified_once_and_not_where_the_caller_does(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    verify = checksums.verify
    monkeypatch.setattr(checksums, "verify", lambda path, *more: (
        seen.append(path), verify(path, *more))[1])
    with open_source(sample("plain")) as source:
        keys = list(source.entries)[:3]
        with checksums.verified(source.files()):
            source.read(keys[0])
        assert seen == []
        for key in keys:
            source.read(key)
    assert seen == list(source.files())


def _plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = MoELayer(8, LocalComm(), num_experts=4, experts={"hidden_dim": 12})
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.randn(5, 8)).output.sum().backward()
    optimizer.step()
    return layer, optimizer


def test_a_resume_in_plain_pytorch(tmp_path: Path) -> None:
    save(tmp_path / "saved", *_plain())

    def read(path: Path) -> Values:
        model, optimizer = _plain()
        load(path, model, optimizer)
        momenta = {index: state["momentum_buffer"]
                   for index, state in optimizer.state_dict()["state"].items()}
        return dict(model.named_parameters()) | momenta

    check_flips(tmp_path / "saved", lambda path: {
        name: value.detach() for name, value in read(path).items()}, tmp_path)


def test_a_resume_in_fairseq_with_the_same_ranks(tmp_path: Path) -> None:
    """By the functions that a run in fairseq calls, which need no fairseq."""
    (tmp_path / "saved").mkdir()
    files.write({"model": {"w": torch.randn(30, 8)}, "step": 3},
                str(tmp_path / "saved" / "checkpoint_last.pt"))

    def read(path: Path) -> Values:
        state = files.read(str(path / "checkpoint_last.pt"))
        return {**state["model"], "step": torch.tensor(state["step"])}

    check_flips(tmp_path / "saved", read, tmp_path)


def _trainer() -> StreamedTrainer:
    torch.manual_seed(0)
    return StreamedTrainer(
        [nn.Linear(8, 8) for _ in range(2)], lambda out, target: (out - target).square().mean(),
        partial(torch.optim.SGD, lr=0.1), HostTier("cpu"))


def test_streamed_weights(tmp_path: Path) -> None:
    save_weights(_trainer(), tmp_path / "saved")

    def read(path: Path) -> Values:
        trainer = _trainer()
        load_weights(trainer, path)
        return {(block.number, at): value for block in trainer.blocks
                for at, value in enumerate(block.read())}

    check_flips(tmp_path / "saved", read, tmp_path)


def test_files_of_experts_on_disk(tmp_path: Path) -> None:
    """Also that the library reads a sealed file."""
    (tmp_path / "saved").mkdir()
    path = next(file for file in files_of(sample("hf")) if file.suffix == ".safetensors")
    shutil.copy(path, tmp_path / "saved" / "experts.safetensors")
    assert checksums.seal_of(path) is not None and load_file(path)

    def read(folder: Path) -> Values:
        try:
            with SafetensorsFile(folder / "experts.safetensors", verify=True) as file:
                return {name: file.read(name) for name in file.held}
        except ValueError as error:  # the caller knows the name
            raise ValueError(f"experts.safetensors: {error}") from error

    check_flips(tmp_path / "saved", read, tmp_path)


def test_a_swarms_folder(tmp_path: Path) -> None:
    state = {"weights": torch.randn(40), "step": 3}
    save_swarm(tmp_path / "saved", 3, [state])

    def read(path: Path) -> Values:
        step, states = load_swarm(path, 1)
        assert states[0] is not None
        return {"step": torch.tensor(step), "weights": states[0]["weights"],
                "of": torch.tensor(states[0]["step"])}

    check_flips(tmp_path / "saved", read, tmp_path)


def test_what_has_no_checksum_is_said_once(tmp_path: Path,
                                           caplog: pytest.LogCaptureFixture) -> None:
    with open_source(sample("tutel")) as source:
        assert source.unsealed() == source.files()
        Conversion(source, tmp_path / "out", "plain").run()
    assert sum("have no checksum" in record.message for record in caplog.records) == 1
    caplog.clear()
    for name in SEALED:
        with open_source(sample(name)) as source:
            assert source.unsealed() == [], name
