"""SwinV2-MoE on a folder of images: the model, its data, its files, and training for real."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.checkpoint import load
from moe_plugin.checkpoint import save as checkpoint_save
from moe_plugin.checkpoint.source import CheckpointError
from moe_plugin.cli.main import main as moe_plugin_main
from moe_plugin.comm import Comm, TorchComm
from moe_plugin.hosts.plain.blocks import auxiliary_loss, blocks_in
from moe_plugin.hosts.timm import train as vision_train
from moe_plugin.hosts.timm.arguments import parser
from moe_plugin.hosts.timm.data import Images
from moe_plugin.hosts.timm.model import PRESETS, build, freeze_experts
from moe_plugin.hosts.timm.published import published_name, read_published, write_published
from moe_plugin.hosts.timm.train import Trainer, main
from tests.distributed import run_gloo
from tests.hosts.timm.folders import few, image_folder, some
from tests.observe import wandb_files
from tests.seeds import seeded

pytest.importorskip("timm")
TINY = PRESETS["tiny"]
EXACT = {"dispatch.capacity_factor": None, "router.noise": 0.0, "losses": {"switch": 0.01}}


def tiny(comm: Comm | None = None, seed: int = 0, **settings: object) -> nn.Module:
    with seeded(seed):
        return build(TINY, 10, comm=comm, settings={**EXACT, **settings})


def images(count: int = 6) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(3))


class PlainMoE(nn.Module):
    """Cosine scores, one expert a token, one token after the other."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = (moe,)

    def forward(self, x: Tensor) -> Tensor:
        moe = self.moe[0]
        router, experts = moe.router, moe.experts
        rows = []
        for x_D in x.reshape(-1, x.shape[-1]):
            p_P = F.normalize(router.project_PD @ x_D + router.project_P, dim=0)
            score_E = F.normalize(router.direction_EP, dim=1) @ p_P
            gate_E = (score_E * router.temperature.clamp(max=math.log(100)).exp()).softmax(0)
            e = int(gate_E.argmax())
            h_F = F.gelu(x_D @ experts.w_in_LDF[e] + experts.bias_in_LF[e])
            rows.append(gate_E[e] * (h_F @ experts.w_out_LFD[e] + experts.bias_out_LD[e]))
        return torch.stack(rows).reshape(x.shape)


def test_forward_and_gradients_equal_a_plain_reference() -> None:
    ours = tiny()
    reference = copy.deepcopy(ours)
    for name, block in list(blocks_in(reference)):
        parent, _, child = name.rpartition(".")
        layer = block.moe
        setattr(reference.get_submodule(parent), child, PlainMoE(layer))
        reference.get_submodule(name).add_module("layer", layer)  # its parameters get gradients
    for model in (ours, reference):
        model.eval()
        model(images()).square().sum().backward()
    torch.testing.assert_close(ours(images()), reference(images()), atol=1e-5, rtol=1e-4)
    theirs = {name.replace(".layer.", ".moe."): p.grad for name, p in reference.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, theirs[name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["swin_s", "swin_b"])
def test_published_sizes(name: str) -> None:
    with torch.device("meta"):
        blocks = [f"layers.{s}.blocks.{b}.mlp" for s, found in enumerate(PRESETS[name].moe_blocks)
                  for b in found]
        dense = build(PRESETS[name], 21841, dense=True)
    assert len(blocks) == 10 and all(dense.get_submodule(block) for block in blocks)
    # 49 and 88 million are the paper's, with 1,000 classes
    count = sum(p.numel() for n, p in dense.named_parameters() if not n.startswith("head.fc"))
    assert round(count / 1e6) == {"swin_s": 49, "swin_b": 87}[name]


@pytest.mark.parametrize("change, message", [
    ({"window": 3}, "image=16, patch=2 and window=3 cannot be combined: image must be"),
    ({"moe_blocks": ((2,), ())}, "block 2 of stage 0, but this stage has only 2"),
])
def test_sizes_that_do_not_fit(change: dict, message: str) -> None:
    from dataclasses import replace
    with pytest.raises(ValueError, match=message):
        build(replace(TINY, **change), 10)
    with pytest.raises(ValueError, match="1 classes"):
        build(TINY, 1)


def test_frozen_experts_stay() -> None:
    model = tiny()
    before = {name: p.clone() for name, p in model.named_parameters()}
    frozen = freeze_experts(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    (model(images()).square().mean() + auxiliary_loss(model)).backward()
    optimizer.step()
    same = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    experts = [name for name in before if ".experts." in name]
    assert set(experts) <= set(same) and len(same) < len(before)
    assert frozen == sum(before[name].numel() for name in experts)
    with pytest.raises(ValueError, match="no experts to freeze"):
        freeze_experts(build(TINY, 10, dense=True))


def test_published_names() -> None:
    assert published_name("layers.1.downsample.reduction.weight") == (
        "layers.0.downsample.reduction.weight")
    assert published_name("head.fc.weight") == "head.weight"
    assert published_name("layers.1.blocks.0.attn.q_bias") == "layers.1.blocks.0.attn.q_bias"


def _write(folder: Path) -> tuple[int, Tensor]:
    model, comm = tiny(TorchComm()), TorchComm()
    write_published(model.eval(), folder / "ckpt.pth", comm)
    return next(blocks_in(model))[1].moe.placement.local, model(images()).detach()


@pytest.mark.distributed
def test_files_of_ranks_are_read_anywhere(tmp_path: Path) -> None:
    (local, first), (_, second) = run_gloo(2, _write, tmp_path)
    assert local == 2 and torch.allclose(first, second)
    state = torch.load(tmp_path / "ckpt.pth.rank1", weights_only=True)["model"]
    assert state["layers.0.blocks.1.mlp._moe_layer.experts.batched_fc1_w"].shape == (2, 192, 48)
    assert "layers.0.downsample.reduction.weight" in state and "head.bias" in state
    model = tiny(seed=5).eval()
    assert not torch.allclose(model(images()), first)
    read_published(model, tmp_path / "ckpt.pth")
    torch.testing.assert_close(model(images()), first)


def test_other_files_are_refused(tmp_path: Path) -> None:
    model = tiny()
    path = tmp_path / "ckpt.pth"
    with pytest.raises(CheckpointError, match="neither .*rank0 nor"):
        read_published(model, path)
    file = write_published(model, path)
    state = torch.load(file, weights_only=True)
    before = copy.deepcopy(model.state_dict())
    broken = dict(state["model"])
    broken["layers.0.blocks.0.attn.qkv.bias"] = torch.zeros(3)  # of the weights that are offered
    torch.save({"model": broken}, file)
    with pytest.raises(CheckpointError, match="'layers.0.blocks.0.attn.qkv.bias' exists only in"):
        read_published(model, path)
    broken = {**state["model"], "head.bias": torch.zeros(3)}
    torch.save({"model": broken}, file)
    with pytest.raises(CheckpointError, match=r"'head.bias' has shape \(3,\) in"):
        read_published(model, path)
    file.write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_published(model, path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()
               if isinstance(value, Tensor))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory)


def test_batches_have_every_image_once(digits: Path, tmp_path: Path) -> None:
    found = Images(few(digits, tmp_path / "few", 5) / "val", 16, training=False, flips=False)
    assert (len(found), found.classes) == (15, ["0", "1", "2"])
    by_rank = [list(found.batches(4, rank, 2)) for rank in range(2)]
    assert [len(batches) for batches in by_rank] == [2, 2]
    labels = torch.cat([y_B[real_B] for batches in by_rank for _, y_B, real_B in batches])
    assert sorted(labels.tolist()) == [0] * 5 + [1] * 5 + [2] * 5
    assert by_rank[0][0][0].shape == (4, 3, 16, 16)
    with pytest.raises(ValueError, match="none is not a folder"):
        Images(tmp_path / "none", 16, training=False, flips=False)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("flags, message", [
    (["--weights-on", "host"],
     "offload.weights='host' is not supported .* value must be device; leave --weights-on out"),
    (["--pipeline-schedule", "terapipe"], "pipeline.schedule='terapipe' .*no pipeline stages"),
    (["--moe-check-twins", "5"], "guard.twins=5 .* leave --moe-check-twins out, or use Training"),
])
def test_settings_of_a_whole_model_are_refused(flags: list[str], message: str, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path / "none"), "--out", str(tmp_path / "out"), *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("flags, message", [
    (["--epochs", "0"], "epochs=0 is out of bounds: must be >= 1; use --evaluate"),
    (["--clip", "0"], "clip=0.0 is out of bounds: must be > 0"),
    (["--log-every", "0"], "log_every=0 is out of bounds"),
    (["--batch-size", "0"], "batch_size=0 is out of bounds"),
    (["--warm-up", "3"], r"warm_up=3.0 is out of bounds: must be in 0..1"),
    (["--dense", "--moe-top-k", "2"], "router.top_k has no effect with --dense"),
    (["--dense", "--experts", "8"], "experts=8 has no effect with --dense"),
    (["--moe-config", "experts.yaml", "--experts", "8"], "experts 8 contradicts num_experts=4"),
    (["--moe-config", "interval.yaml"], "observe.interval=7 .* or use --log-every"),
])
def test_arguments_out_of_bounds_or_without_effect(flags: list[str], message: str, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("interval.yaml").write_text("observe: {interval: 7}\n")
    Path("experts.yaml").write_text("num_experts: 4\n")
    assert main(["--data", "none", "--out", "out", *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_activations_and_a_timeline_change_no_loss(digits: Path, tmp_path: Path) -> None:
    data = few(digits, tmp_path / "few", 4)

    def losses(out: str, *more: str) -> list[float]:
        assert main(["--data", str(data), "--out", str(tmp_path / out), "--epochs", "1",
                     "--batch-size", "6", "--log-every", "1", *more]) == 0
        return [r["lm_loss"] for r in lines(tmp_path / out)]

    kept = losses("kept")
    found = losses("recomputed", "--moe-activations", "recompute", "--moe-stats-timeline", "2")
    assert found == kept and len(kept) > 2
    stats = (tmp_path / "recomputed" / "stats.jsonl").read_text()
    assert '"spans"' in stats or '"timeline"' in stats


def test_defaults_of_a_whole_model_are_no_reason_to_refuse(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path / "none"), "--out", str(tmp_path / "out"),
                 "--weights-on", "device"]) == 2
    assert "train is not a folder" in capsys.readouterr().err


def test_a_run_trains_resumes_and_is_reported(digits: Path, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    data = few(digits, tmp_path / "few")

    def run(out: str, epochs: int, *more: str) -> int:
        return main(["--data", str(data), "--out", str(tmp_path / out), "--epochs", str(epochs),
                     "--batch-size", "12", "--log-every", "1", *more])

    assert run("whole", 2) == 0
    assert "epoch 2/2 | valid loss" in capsys.readouterr().out
    whole = lines(tmp_path / "whole")
    assert [r["iteration"] for r in whole if r["lm_loss"] is not None] == [1, 2, 3, 4, 5, 6]
    assert 0 <= whole[-1]["accuracy"] <= 1
    assert moe_plugin_main(["report", str(tmp_path / "whole")]) == 0
    assert "layers.1.blocks.1.mlp" in (tmp_path / "whole" / "report.html").read_text()
    assert run("whole", 2) == 0  # nothing is left to do
    assert len(lines(tmp_path / "whole")) == len(whole)
    assert run("dense", 1, "--dense") == 0 and run("fraction", 1, "--moe-eval-capacity-factor",
                                                   "0.5", "--freeze-experts") == 0
    assert run("wrong", 1, "--moe-top-k", "9") == 2
    assert "router.top_k=9 is out of bounds" in capsys.readouterr().err


def test_weights_and_biases_gets_layers_and_the_training_log(digits: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    data, out = few(digits, tmp_path / "few"), tmp_path / "out"
    # their package starts a service and replaces standard output
    subprocess.run(
        [sys.executable, "-m", "moe_plugin.hosts.timm.train", "--data", str(data), "--out",
         str(out), "--epochs", "1", "--batch-size", "12", "--log-every", "1",
         "--moe-stats-wandb", "moe"],
        check=True, timeout=300, capture_output=True, stdin=subprocess.DEVNULL,
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)})
    found, name = wandb_files.rows(tmp_path), "moe/layers.1.blocks.1.mlp"
    written = [r["lm_loss"] for r in lines(out) if r["lm_loss"] is not None]
    assert len(written) == 3
    assert [row["moe/training/loss"] for row in found if "moe/training/loss" in row] == written
    layer = [row for row in found if f"{name}/tokens" in row]
    assert len(layer) == 3
    assert all(sum(row[key] for key in row if key.startswith(f"{name}/share/")) == pytest.approx(1)
               for row in layer)


def test_the_rate_follows_epochs_where_a_run_continues_with_other_batches(
        digits: Path, tmp_path: Path) -> None:
    data = few(digits, tmp_path / "few", 4)  # of three classes

    def rates(out: str, batch: int, epochs: int = 3) -> list[float]:
        command = ["--data", str(data), "--out", str(tmp_path / out), "--batch-size", str(batch),
                   "--epochs", "3", "--log-every", "1"]
        trainer = run_gloo(1, _train_until, command, epochs)
        assert trainer == [epochs]
        return [r["lr"] for r in lines(tmp_path / out) if "lr" in r]

    whole = rates("whole", 6)
    assert len(rates("smaller", 2, 1)) == 6  # steps of one epoch
    assert rates("smaller", 6)[6:] == pytest.approx(whole[2:])


def _train_until(command: list[str], epochs: int) -> int:
    trainer, last = Trainer(parser().parse_args(command)), 0

    def save(*given: object) -> None:
        nonlocal last
        done = given[4]
        assert isinstance(done, dict)
        last = done["epoch"]
        checkpoint_save(*given)
        if last == epochs:
            raise StopIteration

    vision_train.save = save  # type: ignore[assignment]
    with contextlib.suppress(StopIteration):
        trainer.run()
    return last


def test_initial_weights_and_evaluation_alone(digits: Path, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    data = few(digits, tmp_path / "few", 4)

    def run(out: str, *more: str) -> int:
        return main(["--data", str(data), "--out", str(tmp_path / out), "--batch-size", "8", *more])

    def found(out: str) -> list[dict]:
        file = tmp_path / out / "evaluations.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]

    assert run("first", "--epochs", "1") == 0
    trained, checkpoint = lines(tmp_path / "first")[-1], str(tmp_path / "first" / "checkpoint")
    assert run("first", "--evaluate") == 0  # the run's own
    assert run("first", "--evaluate", "--moe-eval-capacity-factor", "0.25") == 0
    whole, fraction = found("first")
    assert whole["valid_loss"] == pytest.approx(trained["valid_loss"])
    assert whole["drop_fraction"] < fraction["drop_fraction"] > 0.5
    assert whole["valid_loss"] != fraction["valid_loss"]
    assert lines(tmp_path / "first")[-1] == trained  # an evaluation is no step of the run
    assert run("second", "--evaluate", "--init", checkpoint) == 0
    assert found("second")[0]["valid_loss"] == pytest.approx(whole["valid_loss"])
    capsys.readouterr()
    # a rate of nearly 0 leaves the weights as they were
    assert run("third", "--init", checkpoint, "--epochs", "1", "--lr", "1e-12") == 0
    assert f"starts with the weights of {checkpoint}" in capsys.readouterr().out
    assert lines(tmp_path / "third")[-1]["valid_loss"] == pytest.approx(whole["valid_loss"],
                                                                        rel=1e-4)
    assert run("none", "--evaluate") == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    assert run("other", "--evaluate", "--init", checkpoint, "--experts", "8") == 2
    assert "num_experts=4" in capsys.readouterr().err


def test_initial_weights_of_other_classes(digits: Path, tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    data = {"three": few(digits, tmp_path / "three", 4), "two": tmp_path / "two",
            "named": tmp_path / "named"}
    for name, keep, of in (("two", "01", "01"), ("named", "012", "abc")):
        for part in ("train", "val"):
            for label, new in zip(keep, of, strict=True):
                shutil.copytree(data["three"] / part / label, data[name] / part / new)

    def run(images: str, out: str, *more: str) -> int:
        return main(["--data", str(data[images]), "--out", str(tmp_path / out), "--batch-size",
                     "8", *more])

    def weights(out: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = build(TINY, 2 if out == "fewer" else 3)
        load(tmp_path / out / "checkpoint", model)
        return dict(model.state_dict())

    checkpoint = str(tmp_path / "first" / "checkpoint")
    frozen = ["--init", checkpoint, "--epochs", "1", "--lr", "1e-12"]
    assert run("three", "first", "--epochs", "1") == 0
    first = weights("first")
    capsys.readouterr()
    for images, out, count in (("two", "fewer", 2), ("named", "others", 3)):
        assert run(images, out, *frozen) == 0
        assert (f"starts with the weights of {checkpoint}; the head starts with random weights for "
                f"{count} other classes") in capsys.readouterr().out
        found = weights(out)
        heads = {"head.fc.weight", "head.fc.bias"}
        assert found["head.fc.weight"].shape == (count, 96)
        assert not torch.isclose(found["head.fc.weight"][:2], first["head.fc.weight"][:2]).all()
        for name in set(first) - heads:
            if isinstance(first[name], Tensor):
                torch.testing.assert_close(found[name], first[name])
    assert run("three", "same", *frozen) == 0
    assert "random weights" not in capsys.readouterr().out
    torch.testing.assert_close(weights("same")["head.fc.weight"], first["head.fc.weight"])
    # neither an evaluation nor a run that goes on has other classes than its weights
    assert run("two", "none", "--evaluate", "--init", checkpoint) == 2
    assert "'head.fc.weight' has shape (3, 96)" in capsys.readouterr().err
    for more in (["--evaluate", "--init", checkpoint], []):
        assert run("named", "first", *more) == 2
        assert "was trained on the classes ['0', '1', '2'], but --data" in capsys.readouterr().err
    path = tmp_path / "published"  # whose files have no names of classes
    write_published(build(TINY, 3), path)
    assert run("two", "of files", "--init", str(path), *frozen[2:]) == 0
    assert "the head starts with random weights for 2 other classes" in capsys.readouterr().out


def _settings(data: Path, out: Path) -> tuple[int, int, str]:
    config = next(blocks_in(Trainer(parser().parse_args([
        "--data", str(data), "--out", str(out), "--moe-config", "configs/moe/dropless.yaml",
        "--moe-top-k", "1"])).model))[1].moe.config
    return config.num_experts, config.router.top_k, config.dispatch.name


def test_files_of_settings(digits: Path, tmp_path: Path) -> None:
    data = few(digits, tmp_path / "few", 2)
    assert run_gloo(1, _settings, data, tmp_path) == [(8, 1, "ragged")]


def test_images_with_masks_are_no_classes(tmp_path_factory: pytest.TempPathFactory,
                                          tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    masked = some(image_folder(tmp_path_factory, "digits-with-masks"), tmp_path / "masked", 2)
    assert main(["--data", str(masked), "--out", str(tmp_path / "out")]) == 2
    assert re.search("train has the folders images and .*--task segment", capsys.readouterr().err)


def _continues(data: Path, out: Path, rank_out: Path) -> str:
    comm = TorchComm()
    trainer = Trainer(parser().parse_args([
        "--data", str(data), "--out", str(rank_out if comm.rank else out)]))
    try:
        trainer.run()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_a_rank_without_the_checkpoint_is_an_error_on_all(digits: Path, tmp_path: Path) -> None:
    data = few(digits, tmp_path / "few", 2)
    assert main(["--data", str(data), "--out", str(tmp_path / "out"), "--epochs", "1"]) == 0
    first, second = run_gloo(2, _continues, data, tmp_path / "out", tmp_path / "elsewhere")
    assert "the log of another rank names the file" in first and "elsewhere" in second


def test_published_files_are_initial_weights(digits: Path, tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = build(TINY, 3)
    write_published(model, tmp_path / "ckpt.pth")
    data = few(digits, tmp_path / "few", 4)
    assert main(["--data", str(data), "--out", str(tmp_path / "out"), "--evaluate", "--init",
                 str(tmp_path / "ckpt.pth")]) == 0
    found = json.loads((tmp_path / "out" / "evaluations.jsonl").read_text())
    valid = Images(data / "val", 16, training=False, flips=False)
    with torch.no_grad():
        x, y, _ = next(valid.batches(12, 0, 1))
        want = F.cross_entropy(model.eval()(x), y)
    assert found["valid_loss"] == pytest.approx(float(want), rel=1e-4)
