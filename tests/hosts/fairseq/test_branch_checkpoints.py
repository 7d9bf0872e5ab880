"""Checkpoints of fairseq's `moe` branch become ours and back, optimizer state included."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.checkpoint.conversion import Conversion
from moe_plugin.checkpoint.formats import all as checkpoint_formats  # noqa: F401 - registers
from moe_plugin.checkpoint.formats.base import CheckpointSizes, detect, open_source
from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.trust import UntrustedFile
from moe_plugin.config import from_dict
from moe_plugin.hosts.fairseq import resume
from moe_plugin.layer import MoELayer
from tests.attacks.payload import Payload
from tests.hosts.fairseq.branch_files import rank_model, write
from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE, Corpus, Result, run

EXPERTS = 4


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, str]:
    """A run of 8 steps of Adam with a checkpoint after 4, and its command line."""
    home = tmp_path_factory.mktemp("ours")
    flags = LANGUAGE_MODEL.replace("--optimizer sgd --momentum 0.9 --lr 0.1",
                                   "--optimizer adam --lr 0.01")
    arguments = f"{corpus.lm} {flags} {MOE} {DROPLESS} --max-update 8 --disable-validation"
    result = run("fairseq-train", f"{arguments} --save-interval-updates 4 --save-dir {home}")
    return home, result.ok(), arguments


@pytest.fixture(scope="module")
def branch(trained: tuple[Path, Result, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The branch's files of two ranks after 4 steps."""
    folder = tmp_path_factory.mktemp("branch")
    write(folder, ours(trained), 2)
    return folder


def ours(trained: tuple[Path, Result, str]) -> dict[str, Any]:
    return torch.load(trained[0] / "checkpoint_1_4.pt", weights_only=False)


def convert(source: Path, target: Path, to: str, **sizes: int) -> Path:
    with open_source(source) as opened:
        assert Conversion(opened, target, to, CheckpointSizes(**sizes)).run()
    return target


def same(found: Any, wanted: Any, where: str = "") -> None:
    """Nested values are equal bit by bit."""
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype, where
    elif isinstance(wanted, dict):
        assert list(map(str, found)) == list(map(str, wanted)) or set(found) == set(wanted), where
        for key, value in wanted.items():
            same(found[key], value, f"{where}/{key}")
    else:
        assert found == wanted, where


def test_a_run_goes_on_from_the_branch_s_files(trained: tuple[Path, Result, str], branch: Path,
                                               tmp_path: Path) -> None:
    """Same losses as without a stop: parameters, Adam's state, the place in the data."""
    assert detect(branch) == "fairseq_branch"
    converted = convert(branch, tmp_path / "converted", "fairseq", world=1)
    resumed = run("fairseq-train", f"{trained[2]} --no-save --save-dir {tmp_path / 'new'} "
                  f"--restore-file {converted / 'checkpoint_last.pt'}").ok()
    assert resumed.losses == pytest.approx(trained[1].losses[4:], abs=2e-3)
    assert len(resumed.losses) == 4


def test_ours_become_the_branch_s_files_and_the_other_way_round(
        trained: tuple[Path, Result, str], branch: Path, tmp_path: Path) -> None:
    converted = convert(branch, tmp_path / "ours", "fairseq", world=1)
    found, wanted = (torch.load(path, weights_only=False) for path in (
        converted / "checkpoint_last.pt", trained[0] / "checkpoint_1_4.pt"))
    for key in ("model", "last_optimizer_state"):
        same({name: value for name, value in found[key].items() if "_extra" not in name},
             {name: value for name, value in wanted[key].items() if "_extra" not in name}, key)
    assert found[files.MANIFEST]["parameters"] == wanted[files.MANIFEST]["parameters"]
    for ranks in (2, 4):
        back = convert(converted, tmp_path / f"back{ranks}", "fairseq_branch", ep=ranks)
        again = tmp_path / f"written{ranks}"
        write(again, wanted, ranks)
        names = sorted(path.name for path in again.iterdir())
        assert len(names) == ranks + 1
        for name in names:
            there, expected = (torch.load(folder / name, weights_only=False)
                               for folder in (back, again))
            for key in ("model", "last_optimizer_state", "cfg"):
                same(there[key], expected[key], f"{name} {key}")
            assert list(there["model"]) == list(expected["model"])


def test_experts_compute_what_the_branch_s_do(trained: tuple[Path, Result, str],
                                              branch: Path) -> None:
    model = rank_model(ours(trained), EXPERTS)
    with open_source(branch) as source:
        prefix = "decoder.layers.1.moe_layer."
        model.load_state_dict({name: source.read(("model", name)) for _, name in source.entries
                               if ("model", name) in source.entries}, strict=False)
        from moe_plugin.checkpoint.formats.base import convert as view_as

        view = view_as(source, "fairseq")
        state = {name.removeprefix(prefix + "moe."): view.read((field, name))
                 for field, name in view.entries if field == "model" and prefix in name}
    layer = MoELayer(from_dict({
        "model_dim": 32, "num_experts": EXPERTS,
        "experts": {"hidden_dim": 64, "activation": "relu"},
        "router": {"top_k": 2, "normalize": "before_drop"}})).eval()
    missing, unexpected = layer.load_state_dict(state, strict=False)
    assert not unexpected and missing == ["_extra_state"]
    x_TD = torch.randn(19, 32)
    with torch.no_grad():
        wanted_TD = model.decoder.layers[1].moe_layer(x_TD)
        torch.testing.assert_close(layer(x_TD).output, wanted_TD)


def test_more_ranks_than_experts_and_names_of_files(trained: tuple[Path, Result, str],
                                                    branch: Path, tmp_path: Path) -> None:
    write(tmp_path / "many", ours(trained), 8)
    with open_source(tmp_path / "many") as many, open_source(
            branch / "checkpoint_last-rank-1.pt") as two:
        assert (many.describe()["ranks"], many.describe()["ep"]) == (8, 4)
        assert many.layers == two.layers == {
            "decoder.layers.1.moe_layer.": {"num_experts": EXPERTS}}
        assert set(many.entries) == set(two.entries)
        for key in two.entries:
            assert torch.equal(many.read(key), two.read(key)), key
    assert detect(branch / "checkpoint_last.pt") == "fairseq_branch"


def test_files_that_do_not_fit_are_refused_by_name(trained: tuple[Path, Result, str],
                                                   tmp_path: Path) -> None:
    write(tmp_path, ours(trained), 4)
    path = tmp_path / "checkpoint_last-rank-1.pt"
    state = torch.load(path, weights_only=False)

    def refused(words: str, error: type = CheckpointError) -> None:
        with pytest.raises(error, match=words):
            open_source(tmp_path, "fairseq_branch")

    os.rename(path, tmp_path / "kept")
    refused("rank-1.pt', which contains experts, is missing")
    prefix = "decoder.layers.1.moe_layer.experts.0."
    torch.save({**state, "model": {**state["model"], prefix + "fc3.weight": torch.zeros(2)}}, path)
    refused("fc3.weight' is an expert parameter that MoELayer does not have")
    torch.save({**state, "optimizer_history": [{"num_updates": 3}]}, path)
    refused(r"were saved at different steps, \['3', '4'\]")
    shared = tmp_path / "checkpoint_last-shared.pt"
    whole = torch.load(shared, weights_only=False)
    torch.save(state, path)
    target = tmp_path / "code has run"
    torch.save({**whole, "cfg": Payload(target)}, shared)
    refused("makedirs.*refused", UntrustedFile)
    assert not target.exists()


@pytest.mark.parametrize(("optimizer", "why"), [
    ({"state": {0: {"exp_avg": torch.zeros(99)}}}, "of 1 parameters, but its model has"),
    ({"state": {0: {"exp_avg": torch.zeros(9)}}, "param_id_map": {0: 0, 1: 0}},
     "pieces of --ddp-backend fully_sharded"), (-1, "pieces of --ddp-backend fully_sharded")])
@pytest.mark.parametrize("to", ["fairseq", "fairseq_branch"])
def test_of_optimizer_state_in_other_pieces_the_model_alone_is_converted(
        optimizer: Any, why: str, to: str, trained: tuple[Path, Result, str], branch: Path,
        tmp_path: Path) -> None:
    shutil.copytree(branch, tmp_path / "in")
    for path in (tmp_path / "in").iterdir():  # a rank's own experts have no map of numbers
        kept = optimizer if path.stem.endswith("shared") or optimizer == -1 else {
            "state": {0: {"exp_avg": torch.zeros(99)}}}
        torch.save({**torch.load(path, weights_only=False), "last_optimizer_state": kept}, path)
    with open_source(tmp_path / "in") as source:
        assert why in source.describe()["optimizer_state"]
        with pytest.raises(CheckpointError, match="--model-only"):
            Conversion(source, tmp_path / "out", to).run()
        assert Conversion(source, tmp_path / "out", to, model_only=True).run()
    with open_source(branch) as source:
        assert Conversion(source, tmp_path / "wanted", to, model_only=True).run()
    with open_source(tmp_path / "out") as found, open_source(tmp_path / "wanted") as wanted:
        assert dict(found.entries) == dict(wanted.entries) and len(wanted.entries) > 9
        for key in wanted.entries:
            assert torch.equal(found.read(key), wanted.read(key)), key


def test_one_rank_s_part_of_every_parameter_is_no_model(trained: tuple[Path, Result, str],
                                                        tmp_path: Path) -> None:
    path = tmp_path / "checkpoint_last-shard0.pt"
    torch.save({**ours(trained), "model": {"flat_param_0": torch.zeros(9)}}, path)
    for format in (None, "fairseq"):
        with pytest.raises(CheckpointError, match="resume the run without --use-sharded-state"):
            open_source(path, format)


def test_training_and_evaluation_name_the_command(trained: tuple[Path, Result, str], branch: Path,
                                                  corpus: Corpus, tmp_path: Path) -> None:
    command = re.escape(f"moe-plugin reshard {branch / 'checkpoint_last.pt'} OUT --to fairseq")
    wanted = {"num_experts": 4, "world_size": 2, "rank": 0, "expert_parallel_size": 2}
    with pytest.raises(ValueError, match=command):
        resume.agree(str(branch / "checkpoint_last-rank-0.pt"), wanted, None)
    converted = convert(branch, tmp_path / "converted", "fairseq", world=2)
    scored = run("fairseq-eval-lm", f"{corpus.lm} --user-dir moe_plugin --cpu --gen-subset valid "
                 f"--tokens-per-sample 32 --path {converted / 'checkpoint_last.pt'}", ranks=2)
    assert "Perplexity" in scored.ok().log
