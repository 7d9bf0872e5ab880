"""fairseq's checkpoints, read at other numbers of ranks and with the optimizer's state as one
vector.
"""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.checkpoint import split
from moe_plugin.checkpoint.conversion import Conversion
from moe_plugin.checkpoint.formats import all as checkpoint_formats  # noqa: F401 - registers
from moe_plugin.checkpoint.formats.base import CheckpointSizes, convert, detect, open_source
from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.formats.fairseq.entries import PARAMETERS
from moe_plugin.checkpoint.formats.fairseq.format import survey
from moe_plugin.checkpoint.reshard import GROUPS, moe_layers
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Source
from moe_plugin.config import from_dict
from tests.checkpoint.test_conversion import same
from tests.former_names import former
from tests.hosts.fairseq.commands import run_command
from tests.hosts.fairseq.conftest import Corpus, Result, fork, train

SIZES = (1, 2, 3, 4, 8)


def states(world: int, ep: int, iterations: int = 24) -> list[dict[str, Any]]:
    """What each rank writes of a tiny model, cut in memory."""
    torch.manual_seed(0)
    layer = MoELayer(from_dict({"model_dim": 24, "num_experts": 24,
                                "experts": {"hidden_dim": 48}}))
    model = {f"decoder.layers.0.moe.{name}": value for name, value in layer.state_dict().items()}
    embedding = torch.randn(10, 24)
    model |= {"decoder.embed.weight": embedding, "decoder.output.weight": embedding,
              "decoder.version": torch.tensor([3.0])}
    layers = moe_layers(model)
    names = [f"decoder.layers.0.moe.{name}" for name, _ in layer.named_parameters()]
    names = [*names, "decoder.embed.weight"]
    fields = {field: {name: torch.randn(model[name].shape) for name in names}
              for field in ("exp_avg", "exp_avg_sq")}
    return [_state(rank, world, ep, split(model, rank % ep, ep, layers),
                   {field: split(column, rank % ep, ep, layers)
                    for field, column in fields.items()}, names, iterations)
            for rank in range(world)]


def _state(rank: int, world: int, ep: int, model: dict[str, Any],
           fields: dict[str, dict[str, Any]], names: list[str], iterations: int) -> dict[str, Any]:
    by_index = {index: {"step": 6, **{field: column[name] for field, column in fields.items()}}
                for index, name in enumerate(names)}
    return {
        "args": None, "cfg": {"model": {"_name": "transformer_lm"}}, "model": model,
        "criterion": None, "optimizer_history": [{"num_updates": 6, "optimizer_name": "Adam"}],
        "task_state": {}, "extra_state": {"train_iterator": {
            "version": 2, "epoch": 1, "iterations_in_epoch": iterations, "shuffle": True}},
        "last_optimizer_state": {"state": by_index, "loss_scale": 128.0, "param_groups": [
            {"lr": 0.1, "betas": (0.9, 0.98), "params": list(range(len(names)))}]},
        files.MANIFEST: {"version": 1, "num_experts": 24, "world_size": world, "rank": rank,
                         "expert_parallel_size": ep, "num_updates": 6, PARAMETERS: names},
    }


def name_of(rank: int, world: int) -> str:
    return "checkpoint_last.pt" if world == 1 else f"checkpoint_last-rank-{rank}.pt"


def write_files(folder: Path, world: int, ep: int) -> Path:
    folder.mkdir()
    for rank, state in enumerate(states(world, ep)):
        files.write(state, str(folder / name_of(rank, world)))
    return folder


def convert_files(source: Path, target: Path, **layout: Any) -> None:
    with open_source(source) as opened:
        Conversion(opened, target, "fairseq", CheckpointSizes(**layout)).run()


def check(folder: Path, world: int, ep: int, iterations: int) -> None:
    for rank, state in enumerate(states(world, ep, iterations)):
        path = str(folder / name_of(rank, world))
        found = files.read(path)
        same(found, state)
        shared = [found["model"][f"decoder.{name}.weight"] for name in ("embed", "output")]
        assert shared[0].data_ptr() == shared[1].data_ptr()


@pytest.mark.parametrize("old", SIZES)
def test_any_number_of_ranks_to_any_other_bit_for_bit(tmp_path: Path, old: int) -> None:
    source = write_files(tmp_path / "source", old, old)
    assert detect(source) == detect(source / "checkpoint_last.pt") == "fairseq"
    for new in SIZES:
        convert_files(source, tmp_path / str(new), world=new)
        check(tmp_path / str(new), new, new, 24 * old // new)
    convert_files(tmp_path / "8", tmp_path / "back", world=old)
    check(tmp_path / "back", old, old, 24)


def test_files_with_the_former_names_of_biases(tmp_path: Path) -> None:
    """By `reshard`, with optimizer state with and without names, and as a run reads them."""
    for named in (True, False):
        home = tmp_path / str(named)
        home.mkdir()
        for rank, state in enumerate(map(former, states(4, 4))):
            if not named:
                del state[files.MANIFEST][PARAMETERS]
            state["extra_state"]["ema_fp32_params"] = dict(state["model"])
            files.write(state, str(home / name_of(rank, 4)))
        found = files.read(str(home / name_of(0, 4)))
        for column in (found["model"], found["extra_state"]["ema_fp32_params"]):
            assert list(column) == list(states(4, 4)[0]["model"])
        convert_files(home, tmp_path / f"{named}2", world=2)
        for rank, state in enumerate(states(2, 2, 48)):
            found = files.read(str(tmp_path / f"{named}2" / name_of(rank, 2)))
            same(found["extra_state"].pop("ema_fp32_params"), {
                name: value for name, value in state["model"].items()})
            same(found, state)


def test_replicas_of_experts(tmp_path: Path) -> None:
    convert_files(write_files(tmp_path / "source", 4, 2), tmp_path / "copies", world=6, ep=3)
    check(tmp_path / "copies", 6, 3, 16)
    with pytest.raises(ValueError, match="--ep 4 does not divide --world 6"):
        convert_files(tmp_path / "source", tmp_path / "x", world=6, ep=4)


def test_the_newest_complete_step_of_any_number_of_ranks_is_found(tmp_path: Path) -> None:
    home = write_files(tmp_path / "home", 4, 4)
    for rank, state in enumerate(states(2, 2)):
        state[files.MANIFEST]["num_updates"] = 9
        files.write(state, str(home / name_of(rank, 2)) + (files.PENDING if rank else ""))
    found = survey(str(home / "checkpoint_last-rank-3.pt"))
    assert [(one.step, one.world) for one in found] == [(9, 2)]  # rank 0 of the four is gone
    assert found[0].paths[1].endswith("-rank-1.pt.new")
    (home / "checkpoint_last-rank-0.pt").write_bytes(b"damaged")
    left_out: list[str] = []
    assert survey(str(home / "checkpoint_last.pt"), left_out=left_out) == []
    for said in (left_out[0], *(_refusal(home, format_) for format_ in (None, "fairseq"))):
        assert "checkpoint_last-rank-0.pt" in said and "damaged" in said, said


def _refusal(home: Path, format_: str | None) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_source(home, format_)
    return str(caught.value)


def test_optimizer_state_without_names_is_known_by_its_order(tmp_path: Path) -> None:
    home = write_files(tmp_path / "home", 4, 4)
    for rank in range(4):
        path = str(home / name_of(rank, 4))
        state = files.read(path)
        del state[files.MANIFEST][PARAMETERS]
        files.write(state, path)
    convert_files(home, tmp_path / "2", world=2)
    check(tmp_path / "2", 2, 2, 48)


def test_optimizer_state_of_flattened_parameters_is_not_dropped_silently(tmp_path: Path) -> None:
    home = write_files(tmp_path / "home", 1, 1)
    state = files.read(str(home / "checkpoint_last.pt"))
    del state[files.MANIFEST][PARAMETERS]
    flat = torch.zeros(100)
    state["last_optimizer_state"]["state"] = {0: {"step": 6, "exp_avg": flat, "exp_avg_sq": flat}}
    files.write(state, str(home / "checkpoint_last.pt"))
    with pytest.raises(CheckpointError, match="without parameter names.*--model-only"):
        convert_files(home, tmp_path / "x", world=2)
    with open_source(home) as opened:
        Conversion(opened, tmp_path / "bare", "fairseq", CheckpointSizes(world=2),
                   model_only=True).run()
    bare = files.read(str(tmp_path / "bare" / "checkpoint_last-rank-1.pt"))
    assert "last_optimizer_state" not in bare and bare["model"]


@pytest.mark.distributed
def test_a_run_resumes_at_other_numbers_of_ranks_to_the_same_losses(
        corpus: Corpus, ep2: tuple[Path, Result], tmp_path: Path) -> None:
    """From the same checkpoint of two ranks, 16 sentences a step each time; on four ranks each
    expert is cut over two.
    """
    curves: dict[int, list[float]] = {}
    for ranks in (2, 1, 4):
        home = tmp_path / str(ranks)
        shutil.copytree(ep2[0], home)
        result = train(corpus, home, f"--max-update 16 --update-freq {4 // ranks} "
                       "--disable-validation" + " --moe-expert-shards 2" * (ranks == 4), ranks,
                       save=True).ok()
        assert re.findall(r"Loaded checkpoint .*@ (\d+) updates", result.log)[0] == "12"
        curves[ranks] = result.losses
    assert len(curves[2]) == 4
    for ranks in (1, 4):
        assert curves[ranks] == pytest.approx(curves[2], abs=2e-3)  # the log's last digits
    # and its checkpoint, of four ranks, is read by one
    last = train(corpus, tmp_path / "4", "--max-update 17 --update-freq 4 --disable-validation")
    assert re.findall(r"Loaded checkpoint .*@ (\d+) updates", last.ok().log)[0] == "16"


FLAGS = ("--task language_modeling --arch transformer_lm --decoder-embed-dim 32 "
         "--decoder-ffn-embed-dim 64 --decoder-layers 1 --decoder-attention-heads 2 "
         "--decoder-input-dim 32 --decoder-output-dim 32 --decoder-normalize-before "
         "--decoder-learned-pos --share-decoder-input-output-embed --activation-fn gelu "
         "--optimizer adam --adam-betas (0.9,0.98) --lr 0.001 --tokens-per-sample 32 --batch-size "
         "4 --cpu --fp16 --fp16-init-scale 4 --clip-norm 0 --disable-validation --max-update 3 "
         "--max-target-positions 32")


def _train(flags: list[str], flat: bool) -> None:
    """`fairseq-train`; flat: as on a GPU, where fairseq itself packs all parameters."""
    from fairseq.optim import FP16Optimizer

    if flat:
        ours = FP16Optimizer.build_optimizer.__func__
        FP16Optimizer.build_optimizer = classmethod(inspect.getclosurevars(ours).nonlocals[
            "original"])
        torch.cuda.current_device = lambda: None  # the index of the CPU
    run_command("fairseq-train", flags)


@pytest.fixture(scope="module")
def runs(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run with a vector of all parameters, and without."""
    home = tmp_path_factory.mktemp("runs")
    for flat in (True, False):
        fork(1, _train, f"{corpus.lm} {FLAGS} --save-dir {home / str(flat)}".split(), flat).ok()
    return home / "True", home / "False"


def _saved(folder: Path) -> dict[str, Any]:
    return files.read(str(folder / "checkpoint_last.pt"))


def _same(one: Source, other: Source) -> None:
    assert dict(one.entries) == dict(other.entries)
    for key in one.entries:
        assert torch.equal(one.read(key), other.read(key)), key


def test_one_vector_is_the_state_of_each_parameter(runs: tuple[Path, Path],
                                                   tmp_path: Path) -> None:
    flat, apart = runs
    [vector] = _saved(flat)["last_optimizer_state"]["state"].values()
    assert vector["exp_avg"].dim() == 1 and len(_saved(apart)["last_optimizer_state"]["state"]) > 9
    with open_source(flat) as one, open_source(apart) as other:
        assert any(field == "exp_avg_sq" for field, _ in one.entries)
        _same(one, other)
        _same(convert(one, "neutral"), convert(other, "neutral"))
        key = next(key for key, entry in one.entries.items() if len(entry.shape) == 2
                   and key[0] == "exp_avg")
        window = (slice(1, 3), slice(2, 5))
        assert torch.equal(one.read(key, window), other.read(key)[window])
        assert one.values[GROUPS] == other.values[GROUPS]
        for name, source in (("flat", one), ("apart", other)):
            Conversion(source, tmp_path / name, "fairseq", CheckpointSizes()).run()
    first, second = (_saved(tmp_path / name)["last_optimizer_state"] for name in ("flat", "apart"))
    assert first["param_groups"] == second["param_groups"]
    assert list(first["state"]) == list(second["state"])


def test_a_run_goes_on_from_what_was_one_vector(runs: tuple[Path, Path], corpus: Corpus,
                                                tmp_path: Path) -> None:
    losses = []
    for name, folder in zip(("flat", "apart"), runs, strict=True):
        with open_source(folder) as source:
            Conversion(source, tmp_path / name, "fairseq", CheckpointSizes()).run()
        flags = FLAGS.replace("--max-update 3", "--max-update 5 --log-format json --log-interval 1")
        done = fork(1, _train, f"{corpus.lm} {flags} --save-dir {tmp_path / name}".split(), False)
        losses.append(done.ok().losses)
    assert len(losses[0]) == 2 and losses[0] == losses[1]


def test_a_vector_of_another_length_is_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    state = _saved(runs[0])
    vector = state["last_optimizer_state"]["state"][0]
    vector["exp_avg"] = vector["exp_avg"][:-1]
    (tmp_path / "short").mkdir()
    files.write(state, str(tmp_path / "short" / "checkpoint_last.pt"))
    with open_source(tmp_path / "short") as source:
        assert {field for field, _ in source.entries} == {MODEL}
        with pytest.raises(CheckpointError, match="--model-only"):
            Conversion(source, tmp_path / "out", "fairseq", CheckpointSizes()).run()
