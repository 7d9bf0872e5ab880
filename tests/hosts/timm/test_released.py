"""The released Swin-MoE weights: their names and shapes, what a model computes with them, files of
more or fewer ranks than experts; the published configurations.

Sizes of a name are written once more here, from `models/swin_transformer_moe.py` and `utils_moe.py`
of Swin-Transformer and Tutel's layer, and `plain` computes the logits from these names alone.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.checkpoint.source import CheckpointError
from moe_plugin.comm import TorchComm
from moe_plugin.hosts.plain.blocks import auxiliary_loss, blocks_in
from moe_plugin.hosts.timm.data import Images
from moe_plugin.hosts.timm.model import PRESETS, SwinMoE, build, build_ensemble
from moe_plugin.hosts.timm.published import published_name, read_published, write_published
from moe_plugin.hosts.timm.train import main
from tests.distributed import run_gloo
from tests.hosts.timm.folders import few, image_folder
from tests.seeds import seeded

pytest.importorskip("timm")
ALL = {"dispatch.capacity_factor": None}
TINY = SwinMoE(32, 4, 16, (2, 2), (2, 4), ((1,), (1,)), experts=4, released=True,
               settings={**PRESETS["swin_moe_s"].settings, **ALL})
Shapes = dict[str, tuple[int, ...]]


def table(size: SwinMoE, classes: int, *, shards: int = 1, cosine: bool = False,
          ) -> tuple[Shapes, Shapes]:
    """Shapes by published name: of what is not an expert, and of the slices of one expert among
    `shards` ranks.
    """
    w, common, experts = size.width, {}, {}
    common |= {"patch_embed.proj.weight": (w, 3, size.patch, size.patch),
               **{f"patch_embed.{n}": (w,) for n in ("proj.bias", "norm.weight", "norm.bias")}}
    for stage, (depth, heads) in enumerate(zip(size.depths, size.heads, strict=True)):
        d, h = w * 2 ** stage, w * 2 ** stage * 4
        for b in range(depth):
            at = f"layers.{stage}.blocks.{b}."
            for norm in ("norm1", "norm2"):
                common |= {f"{at}{norm}.weight": (d,), f"{at}{norm}.bias": (d,)}
            common |= {f"{at}attn.cpb_mlp.0.weight": (512, 2), f"{at}attn.cpb_mlp.0.bias": (512,),
                       f"{at}attn.cpb_mlp.2.weight": (heads, 512),
                       f"{at}attn.qkv.weight": (3 * d, d), f"{at}attn.qkv.bias": (3 * d,),
                       f"{at}attn.proj.weight": (d, d), f"{at}attn.proj.bias": (d,)}
            if b not in size.moe_blocks[stage]:
                common |= {f"{at}mlp.fc1.weight": (h, d), f"{at}mlp.fc1.bias": (h,),
                           f"{at}mlp.fc2.weight": (d, h)}
                continue
            at, e = f"{at}mlp._moe_layer.", size.experts
            common |= {f"{at}_num_global_experts": ()}
            common |= {
                f"{at}gates.0.cosine_projector.weight": (256, d),
                f"{at}gates.0.cosine_projector.bias": (256,),
                f"{at}gates.0.sim_matrix": (256, e), f"{at}gates.0.temperature": (1,),
            } if cosine else {f"{at}gates.0.wg.weight": (e, d)}
            experts |= {f"{at}experts.batched_fc1_w": (h // shards, d),
                        f"{at}experts.batched_fc1_bias": (h // shards,),
                        f"{at}experts.batched_fc2_w": (h // shards, d),
                        f"{at}experts.batched_fc2_bias": (-(-d // shards),)}
        if stage + 1 < len(size.depths):
            common |= {f"layers.{stage}.downsample.norm.{n}": (4 * d,) for n in ("weight", "bias")}
            common |= {f"layers.{stage}.downsample.reduction.weight": (2 * d, 4 * d)}
    last = w * 2 ** (len(size.depths) - 1)
    return common | {"norm.weight": (last,), "norm.bias": (last,), "head.weight": (classes, last),
                     "head.bias": (classes,)}, experts


def states(size: SwinMoE, classes: int, ranks: int, cosine: bool = False,
           scale: float = 0.3) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Random weights: (common, of each rank's experts)."""
    shards, local = max(1, ranks // size.experts), max(1, size.experts // ranks)
    common, experts = table(size, classes, shards=shards, cosine=cosine)
    random = torch.Generator().manual_seed(2)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return scale * torch.randn(shape, generator=random)

    found = {name: torch.tensor(size.experts) if name.endswith("_experts") else draw(shape)
             for name, shape in common.items()}
    # their buffers, which are made again
    found |= {"layers.0.blocks.1.attn_mask": torch.zeros(4, 16, 16),
              "layers.0.blocks.0.attn.relative_coords_table": torch.zeros(1, 7, 7, 2),
              "layers.0.blocks.0.attn.relative_position_index": torch.zeros(16, 16).long()}
    return found, [{name: draw((local, *shape)) for name, shape in experts.items()}
                   for _ in range(ranks)]


def write(path: Path, common: dict[str, Tensor], experts: list[dict[str, Tensor]],
          master: bool = False) -> None:
    for rank, own in enumerate(experts):
        torch.save({"model": own if master else {**common, **own}, "epoch": 89},
                   f"{path}.rank{rank}")
    if master:
        torch.save({"model": common}, f"{path}.master")


def whole(experts: list[dict[str, Tensor]], name: str, count: int) -> Tensor:
    """All experts' slices put together."""
    ranks = len(experts)
    if ranks <= count:
        return torch.cat([own[name] for own in experts])
    s = ranks // count
    return torch.stack([torch.cat([experts[e * s + j][name][0] for j in range(s)])
                        for e in range(count)])


def attention(at: str, state: dict[str, Tensor], x_WWD: Tensor, heads: int,
              region_WW: Tensor) -> Tensor:
    """Of one window, one head after the other."""
    side, d = x_WWD.shape[0], x_WWD.shape[-1]
    places = list(itertools.product(range(side), repeat=2))

    def log(distance: int) -> float:
        far = 8 * distance / (side - 1)
        return float(torch.tensor(abs(far) + 1.0).log2() / 3) * (1 if far >= 0 else -1)

    between = torch.tensor([[(log(a[0] - b[0]), log(a[1] - b[1])) for b in places]
                            for a in places])
    bias_PPH = F.relu(between @ state[f"{at}cpb_mlp.0.weight"].T
                      + state[f"{at}cpb_mlp.0.bias"]) @ state[f"{at}cpb_mlp.2.weight"].T
    q, k, v = (x_WWD.reshape(-1, d) @ state[f"{at}qkv.weight"].T
               + state[f"{at}qkv.bias"]).chunk(3, -1)
    apart = region_WW.reshape(-1, 1) != region_WW.reshape(1, -1)
    found, each = [], d // heads
    for head in range(heads):
        part = slice(head * each, (head + 1) * each)
        scores = q[:, part] @ k[:, part].T / each ** 0.5 + bias_PPH[..., head]
        found.append((scores - 100 * apart).softmax(-1) @ v[:, part])
    mixed = torch.cat(found, -1) @ state[f"{at}proj.weight"].T + state[f"{at}proj.bias"]
    return mixed.reshape(x_WWD.shape)


def mlp(at: str, common: dict[str, Tensor], experts: list[dict[str, Tensor]], x_D: Tensor,
        top_k: int) -> Tensor:
    """Of one token."""
    layer = f"{at}_moe_layer."
    if f"{at}fc1.weight" in common:
        h = F.gelu(common[f"{at}fc1.weight"] @ x_D + common[f"{at}fc1.bias"])
        return common[f"{at}fc2.weight"] @ h
    if f"{layer}gates.0.wg.weight" in common:
        score_E = (common[f"{layer}gates.0.wg.weight"] @ x_D).softmax(0)
    else:
        gate = {n: common[f"{layer}gates.0.{n}"] for n in (
            "cosine_projector.weight", "cosine_projector.bias", "sim_matrix", "temperature")}
        p = gate["cosine_projector.weight"] @ x_D + gate["cosine_projector.bias"]
        cosines = F.normalize(gate["sim_matrix"], dim=0).T @ F.normalize(p, dim=0)
        score_E = (cosines * gate["temperature"].clamp(max=4.6052).exp()).softmax(0)
    out = torch.zeros_like(x_D)
    for score, e in zip(*score_E.topk(top_k), strict=True):
        w1, b1, w2, b2 = (whole(experts, f"{layer}experts.batched_{n}", len(score_E))[e] for n in (
            "fc1_w", "fc1_bias", "fc2_w", "fc2_bias"))
        out = out + score * (F.gelu(w1 @ x_D + b1) @ w2 + b2[:len(x_D)])
    return out


def plain(size: SwinMoE, common: dict[str, Tensor], experts: list[dict[str, Tensor]],
          image: Tensor, top_k: int = 1) -> Tensor:
    """Logits of one image [3, S, S]."""
    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], common[f"{name}.weight"], common[f"{name}.bias"])

    x = F.conv2d(image[None], common["patch_embed.proj.weight"], common["patch_embed.proj.bias"],
                 stride=size.patch)[0].permute(1, 2, 0)
    x = norm("patch_embed.norm", x)
    for stage, (depth, heads) in enumerate(zip(size.depths, size.heads, strict=True)):
        side = min(size.window, x.shape[0])
        for b in range(depth):
            at = f"layers.{stage}.blocks.{b}."
            shift = side // 2 if b % 2 and x.shape[0] > side else 0
            # patches of one side of the image's edge do not see those of the other
            line = torch.arange(x.shape[0])
            zone = (line >= x.shape[0] - side).long() + (line >= x.shape[0] - shift) * bool(shift)
            region = zone[:, None] * 3 + zone if shift else torch.zeros(x.shape[:2])
            moved = norm(f"{at}norm1", x).roll((-shift, -shift), (0, 1))
            out = torch.zeros_like(x)
            for i, j in itertools.product(range(0, x.shape[0], side), repeat=2):
                cut = slice(i, i + side), slice(j, j + side)
                out[cut] = attention(f"{at}attn.", common, moved[cut], heads, region[cut])
            x = x + out.roll((shift, shift), (0, 1))
            tokens = norm(f"{at}norm2", x).reshape(-1, x.shape[-1])
            x = x + torch.stack([mlp(f"{at}mlp.", common, experts, t, top_k)
                                 for t in tokens]).reshape(x.shape)
        if stage + 1 < len(size.depths):
            at = f"layers.{stage}.downsample."
            x = torch.cat([x[0::2, 0::2], x[1::2, 0::2], x[0::2, 1::2], x[1::2, 1::2]], -1)
            x = norm(f"{at}norm", x) @ common[f"{at}reduction.weight"].T
    return common["head.weight"] @ norm("norm", x).mean((0, 1)) + common["head.bias"]


@pytest.mark.parametrize("ranks, master, cosine, top_k", [
    (4, False, False, 1), (8, True, False, 1), (2, True, True, 1), (1, False, False, 2)])
@torch.no_grad()
def test_released_files_give_the_logits_of_a_plain_loop(
        ranks: int, master: bool, cosine: bool, top_k: int, tmp_path: Path) -> None:
    common, experts = states(TINY, 3, ranks, cosine)
    if master:  # the programs put what does not train into the common file, from rank 0 alone
        bias = [name for name in experts[0] if name.endswith("fc2_bias")]
        common |= {name: torch.zeros_like(experts[0][name]) for name in bias}
        shown = [{**own, **{name: common[name] for name in bias}} for own in experts]
        experts = [{name: own[name] for name in own if name not in bias} for own in experts]
    else:
        shown = experts
    write(tmp_path / "a.pth", common, experts, master)
    with seeded(1):
        model = build(TINY, 3, settings={"router.name": "cosine" if cosine else "topk",
                                         "router.top_k": top_k}).eval()
    read_published(model, tmp_path / "a.pth")
    image = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(4))
    want = plain(TINY, common, shown, image, top_k)
    torch.testing.assert_close(model(image[None])[0], want, rtol=1e-4, atol=1e-4)
    moe = next(blocks_in(model))[1].moe
    assert torch.equal(moe.experts.w_out_LFD, whole(
        shown, "layers.0.blocks.1.mlp._moe_layer.experts.batched_fc2_w", 4))
    again = write_published(model, tmp_path / "again.pth")
    names = set(torch.load(again)["model"])
    assert names == {*common, *shown[0]} - {n for n in common if "relative" in n or "mask" in n}


def _logits_at_ranks(path: Path) -> tuple[int, Tensor]:
    model = build(TINY, 3, comm=TorchComm()).eval()
    read_published(model, path)
    image = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        return next(blocks_in(model))[1].moe.placement.local, model(image[None])[0]


@pytest.mark.distributed
def test_two_ranks_read_files_of_eight(tmp_path: Path) -> None:
    common, experts = states(TINY, 3, 8)
    write(tmp_path / "a.pth", common, experts)
    image = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(4))
    want = plain(TINY, common, experts, image)
    for local, logits in run_gloo(2, _logits_at_ranks, tmp_path / "a.pth"):
        assert local == 2
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


def test_incomplete_files_change_nothing(tmp_path: Path) -> None:
    common, experts = states(TINY, 3, 8)
    model = build(TINY, 3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    write(tmp_path / "a.pth", common, experts[:6])
    with pytest.raises(CheckpointError, match="4 experts .* the 6 files contain 6"):
        read_published(model, tmp_path / "a.pth")
    write(tmp_path / "a.pth", common, experts)
    with pytest.raises(CheckpointError, match="preset swin_moe_s or swin_moe_b"):
        read_published(build(replace(TINY, released=False), 3), tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="Build the model with the same router"):
        read_published(build(TINY, 3, settings={"router.name": "cosine"}), tmp_path / "a.pth")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def shapes_of(model: nn.Module) -> tuple[Shapes, Shapes]:
    """Of a model: by published name outside of experts, and of its experts by ours."""
    inside = tuple(name for name, _ in blocks_in(model))
    every = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return ({published_name(name): shape for name, shape in every.items()
             if not name.startswith(inside or ("-",))},
            {name: shape for name, shape in every.items() if inside and name.startswith(inside)})


@pytest.mark.parametrize("preset, experts, cosine", [
    ("swin_moe_s", 2, False), ("swin_moe_b", 2, True),
    *(pytest.param(f"swin_moe_{size}", experts, cosine, marks=pytest.mark.slow)
      for size, experts, cosine in [("s", 8, False), ("s", 32, True), ("b", 16, False)])])
def test_published_configurations(preset: str, experts: int, cosine: bool) -> None:
    size = replace(PRESETS[preset], experts=experts)
    model = build(size, 1000, settings={"router.name": "cosine"} if cosine else {})
    common, slices = table(size, 1000, cosine=cosine)
    ours, inside = shapes_of(model)
    assert ours == {name: s for name, s in common.items() if "_moe_layer" not in name}
    for name, block in blocks_in(model):
        config = block.moe.config
        assert (config.router.top_k, config.router.normalize) == (1, "none")
        assert (config.dispatch.capacity_factor, config.num_experts) == (1.25, experts)
        found = slices[f"{name}._moe_layer.experts.batched_fc1_w"]
        assert inside[f"{name}.moe.experts.w_in_LDF"] == (experts, *found[::-1])
        assert not block.moe.experts.bias_out_LD.requires_grad
    assert len(inside) == 10 * (4 + (4 if cosine else 1))
    with torch.device("meta"):
        dense = build(size, 1000, dense=True)
    assert not shapes_of(dense)[1] and "layers.3.blocks.1.mlp.fc2.bias" not in shapes_of(dense)[0]


def train_and_classify(model: nn.Module, size: SwinMoE, images: int, rate: float) -> None:
    """One step lowers the loss of its images, leaves the experts' output biases as they are, and
    changes everything else.
    """
    x = torch.randn(images, 3, size.image, size.image, generator=torch.Generator().manual_seed(1))
    y = torch.arange(images) % 3
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = F.cross_entropy(model.eval()(x), y)
    loss = F.cross_entropy(model.train()(x), y) + auxiliary_loss(model)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.data -= rate * p.grad
    same = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert {name for name in same if "bias_out" in name} == {
        name for name in before if name.endswith("bias_out_LD")}
    assert not [name for name in same if "bias_out" not in name]
    with torch.no_grad():
        found = model.eval()(x)
    assert F.cross_entropy(found, y) < first and found.shape == (images, 3)


def test_a_step_lowers_the_loss() -> None:
    with seeded(3):
        model = build(TINY, 3, settings={"experts.init_std": 0.02})
        train_and_classify(model, TINY, 6, 0.1)
        members = build_ensemble(TINY, 3, 2, begin="layers.1", share_after="layers.1", sharing=0.5)
    assert members(torch.randn(2, 3, 32, 32)).shape == (2, 2, 3)


@pytest.mark.slow
def test_the_published_size_reads_trains_and_classifies(tmp_path: Path) -> None:
    size = replace(PRESETS["swin_moe_s"], experts=8, drop_path=0.0)
    common, experts = states(size, 3, 32, scale=0.02)  # four ranks an expert, as on 32 GPUs
    write(tmp_path / "a.pth", common, experts, master=True)
    with seeded(3):
        model = build(size, 3, settings=ALL)
    read_published(model, tmp_path / "a.pth")
    name = "layers.2.blocks.17.mlp"
    x_TD = torch.randn(5, 384, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got = model.get_submodule(name).eval()(x_TD)
        want = torch.stack([mlp(f"{name}.", common, experts, x_D, 1) for x_D in x_TD])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    del experts
    train_and_classify(model, size, 2, 0.01)


def test_the_command_begins_with_released_files(
        tmp_path_factory: pytest.TempPathFactory, tmp_path: Path,
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    data = few(image_folder(tmp_path_factory), tmp_path / "few", 4)
    monkeypatch.setitem(PRESETS, "swin_moe_s", TINY)
    common, experts = states(TINY, 5, 4)
    write(tmp_path / "a.pth", common, experts, master=True)
    dense = replace(TINY, moe_blocks=((), ()))
    weights, _ = states(dense, 3, 1)
    torch.save({"model": weights}, tmp_path / "b.pth.global")
    run = ["--data", str(data), "--preset", "swin_moe_s", "--epochs", "1", "--batch-size", "6"]
    assert main([*run, "--out", str(tmp_path / "out"), "--init", str(tmp_path / "a.pth"),
                 "--moe-activations", "recompute"]) == 0
    assert "the head starts with random weights for 3 other classes" in capsys.readouterr().out
    found = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    assert 0 <= found[-1]["accuracy"] <= 1
    assert main([*run, "--out", str(tmp_path / "dense"), "--dense", "--evaluate", "--init",
                 str(tmp_path / "b.pth")]) == 0
    found = json.loads((tmp_path / "dense" / "evaluations.jsonl").read_text())
    valid = Images(data / "val", 32, training=False, flips=False)
    with torch.no_grad():
        losses = [F.cross_entropy(plain(dense, weights, [], image), label)
                  for image, label in (valid[i] for i in range(len(valid)))]
    assert found["valid_loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)
