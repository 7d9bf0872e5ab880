"""Ensembles of Swin transformers: the model, its gradients, its counts, and training."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.cli.main import main as moe_plugin_main
from moe_plugin.hosts.timm.arguments import parser
from moe_plugin.hosts.timm.ensemble import last_of_stage, place_of, steps_of
from moe_plugin.hosts.timm.model import SwinMoE, build, build_ensemble
from moe_plugin.hosts.timm.tasks import BINS, VisionTask
from moe_plugin.hosts.timm.train import Trainer, main
from moe_plugin.training.cmcl import EnsembleSettings, uniform_divergence
from tests.distributed import run_gloo
from tests.hosts.timm.folders import few, image_folder

pytest.importorskip("timm")
SMALL = SwinMoE(8, 2, 12, (1, 1), (1, 2), ((), (0,)), patch=2, experts=2, settings={
    "router.top_k": 1, "losses": {"switch": 0.01}})
CMCL = EnsembleSettings(3, 0, 0.0, 2, 0.75, "exact", True)


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def least_loss(logits_MC: Tensor, y: Tensor, k: int, beta: float) -> Tensor:
    """Of one image, over all choices of k members."""
    members = range(len(logits_MC))
    ce = [F.cross_entropy(logits_MC[m], y) for m in members]
    kl = [uniform_divergence(logits_MC[m][None, None])[0, 0] for m in members]
    return min((sum((ce[m] if m in chosen else beta * kl[m] for m in members))
                for chosen in itertools.combinations(members, k)), key=lambda loss: loss.item())


@pytest.mark.parametrize("begin", ["head", "layers.1", "patch_embed"])
def test_logits_and_gradients_equal_those_of_plain_models(begin: str) -> None:
    """A plain model for each member; what members share has the sum of the gradients."""
    torch.manual_seed(0)
    ours = build_ensemble(SMALL, 4, 3, begin=begin)
    plain = []
    for m in range(3):
        model = copy.deepcopy(ours.members[0])
        own = ours.members[m if begin != "head" else 0]
        for name in ours.steps[ours.begin:]:
            model.get_submodule(name).load_state_dict(own.get_submodule(name).state_dict())
        plain.append(model)
    heads = ours.head.heads.w_out_MHC.detach().clone().requires_grad_()
    x, y = images(), torch.tensor([0, 1, 2, 3, 0])
    logits = torch.stack([model.forward_features(x).mean((1, 2)) @ heads[m]
                          for m, model in enumerate(plain)], 1)
    torch.testing.assert_close(ours(x), logits)
    torch.stack([least_loss(logits[n], y[n], 2, 0.75) for n in range(5)]).mean().backward()
    VisionTask(CMCL).losses(ours(x), y, training=True).mean().backward()
    close = {"atol": 1e-6, "rtol": 1e-4}
    torch.testing.assert_close(ours.head.heads.w_out_MHC.grad, heads.grad, **close)
    for number, name in enumerate(ours.steps):
        shared = number < ours.begin
        for m, member in enumerate(ours.members[:1] if shared else ours.members):
            wanted = [dict(model.get_submodule(name).named_parameters())
                      for model in (plain if shared else plain[m:m + 1])]
            for key, parameter in member.get_submodule(name).named_parameters():
                want = torch.stack([found[key].grad for found in wanted]).sum(0)
                torch.testing.assert_close(parameter.grad, want, **close)


def test_features_are_shared_after_any_module() -> None:
    torch.manual_seed(0)
    model = build_ensemble(SMALL, 4, 2, begin="layers.0", share_after="layers.0", sharing=0.5)
    x = images(2)
    first = [member.layers[0](member.patch_embed(x) if not m else model.members[0].patch_embed(x))
             for m, member in enumerate(model.members)]
    model.eval()
    shared = [first[0] + 0.5 * first[1], first[1] + 0.5 * first[0]]
    pooled = [member.norm(member.layers[1](h)).mean((1, 2))
              for member, h in zip(model.members, shared, strict=True)]
    want = torch.stack([h @ model.head.heads.w_out_MHC[m] for m, h in enumerate(pooled)], 1)
    torch.testing.assert_close(model(x), want)
    torch.testing.assert_close(model(x), model(x), rtol=0, atol=0)
    model.train()
    assert not torch.allclose(model(x), model(x))  # drawn
    with pytest.raises(ValueError, match="share_after=patch_embed .*at ensemble_from=layers.1"):
        build_ensemble(SMALL, 4, 2, begin="layers.1", share_after="patch_embed", sharing=0.5)
    with pytest.raises(ValueError, match="ensemble_from=layers.7 is not a module"):
        build_ensemble(SMALL, 4, 2, begin="layers.7")


@pytest.mark.fast
def test_steps_are_the_modules_of_the_model() -> None:
    model = build(SMALL, 4, dense=True)
    steps = steps_of(model)
    assert steps == ["patch_embed", "layers.0.downsample", "layers.0.blocks.0",
                     "layers.1.downsample", "layers.1.blocks.0", "norm"]
    h = x = images()
    for name in steps:
        h = model.get_submodule(name)(h)
    torch.testing.assert_close(h, model.forward_features(x))
    assert [name for i, name in enumerate(steps) if last_of_stage(steps, i)] == [
        "layers.0.blocks.0", "norm"]
    assert place_of(steps, "layers.1", "x") == (3, 4) and place_of(steps, "head", "x") == (6, 6)


@pytest.mark.fast
def test_counts_of_an_evaluation() -> None:
    task = VisionTask(EnsembleSettings(2, 0, 0.0, 1, 0.75, "stochastic", True))
    # the first member knows class 0, the second class 1, and the mean follows the surer one
    logits = torch.tensor([[[4.0, 0.0], [0.2, 0.0]], [[0.0, 0.3], [0.0, 3.0]],
                           [[5.0, 0.0], [0.0, 0.1]], [[9.0, 0.0], [9.0, 0.0]]])
    y, real = torch.tensor([0, 1, 1, 1]), torch.tensor([True, True, True, False])
    found = task.results(task.counts(logits, y, real))
    assert found["top1_error"] == pytest.approx(1 / 3) and found["oracle_error"] == 0
    assert found["member_error"] == pytest.approx(1 / 6)
    assert found["accuracy"] == pytest.approx(2 / 3)
    want = torch.stack([least_loss(logits[n], y[n], 1, 0.75) for n in range(3)]).mean()
    assert found["valid_loss"] == pytest.approx(float(want), rel=1e-5)
    # sure members of the first two images (0.98, 0.95), the unsure one (0.52) of the third
    assert found["confidence"]["responsible"] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 2]
    assert found["confidence"]["other"] == [0, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert sum(found["confidence"]["ensemble"]) == 3 and BINS == 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few(image_folder(tmp_path_factory), tmp_path_factory.mktemp("few") / "images", 5)


def _step(data: Path, out: Path, ranks: int) -> list[tuple[str, Tensor]]:
    """Gradients of a step of three images, which two ranks of two images do not divide."""
    args = parser(None).parse_args([
        "--data", str(data), "--out", str(out), "--batch-size", str(4 // ranks), "--clip", "1e9",
        "--ensemble-heads", "2", "--ensemble-from", "layers.1", "--moe-router-noise", "0",
        "--moe-losses", "none", "--moe-capacity-factor", "none"])
    trainer = Trainer(args)
    x = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    y, rank, size = torch.tensor([0, 1, 2]), trainer.comm.rank, 4 // ranks
    at = torch.arange(rank * size, (rank + 1) * size)
    trainer.wrapped.train()
    trainer.steps((x[at % 3], y[at % 3], at < 3, 3))
    mean = trainer.comm.all_reduce(trainer.loss.clone()) / ranks
    return [("loss", mean), *((name, p.grad) for name, p in trainer.model.named_parameters()
                              if ".experts." not in name)]


@pytest.mark.distributed
def test_two_ranks_compute_what_one_does(folder: Path, tmp_path: Path) -> None:
    [one] = run_gloo(1, _step, folder, tmp_path, 1)
    two, again = run_gloo(2, _step, folder, tmp_path, 2)
    for (name, want), (_, found), (_, other) in zip(one, two, again, strict=True):
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-3, msg=name)
        assert torch.equal(found, other), name


def test_a_run_trains_and_is_reported(folder: Path, tmp_path: Path,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    flags = ["--data", str(folder), "--out", str(out), "--epochs", "1", "--batch-size", "8",
             "--ensemble-heads", "2", "--ensemble-hidden", "4", "--ensemble-sharing", "0.7",
             "--oracle-labels", "stochastic"]
    assert main(flags) == 0
    assert "oracle error" in capsys.readouterr().out
    found = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert sum(found["confidence"]["ensemble"]) == 15
    assert sum(found["confidence"]["responsible"]) == sum(found["confidence"]["other"]) == 15
    assert 0 <= found["oracle_error"] <= found["top1_error"] == pytest.approx(1 - found["accuracy"])
    assert main([*flags[:4], "--epochs", "2", *flags[6:]]) == 0  # continues
    assert "continues after epoch 1" in capsys.readouterr().out
    assert moe_plugin_main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "Errors of the ensemble" in page and "Confidence of members that are" in page


@pytest.mark.parametrize("flags, message", [
    (["--oracle-k", "2"], "--oracle-k has no effect without an ensemble"),
    (["--ensemble-from", "layers.0"], "--ensemble-from has no effect without an ensemble"),
    (["--ensemble-heads", "2", "--oracle-k", "3"], "oracle_k=3 is out of bounds: must be in 1..2"),
    (["--ensemble-heads", "2", "--ensemble-sharing", "0.5"], "use --ensemble-hidden, or"),
    (["--ensemble-heads", "2", "--ensemble-share-after", "layers.0"], "use --ensemble-sharing"),
    (["--ensemble-heads", "2", "--label-smoothing", "0.1"], "label_smoothing=0.1 is out of"),
    (["--label-smoothing", "1.5"], "label_smoothing=1.5 is out of bounds"),
])
def test_bad_arguments(flags: list[str], message: str, tmp_path: Path,
                       capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path / "none"), "--out", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err
