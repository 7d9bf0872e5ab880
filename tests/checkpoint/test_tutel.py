"""Tutel's checkpoints become ours and back: its formula's numbers, several numbers of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import moe_plugin
from moe_plugin.checkpoint import CheckpointError
from moe_plugin.checkpoint.conversion import Conversion
from moe_plugin.checkpoint.formats import all as checkpoint_formats  # noqa: F401 - registers
from moe_plugin.checkpoint.formats.base import CheckpointSizes, detect, open_source
from moe_plugin.checkpoint.trust import UntrustedFile
from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer

E, M, H, P = 4, 6, 16, 5
PREFIX = "blocks.1.moe_ffn."
NORM = "blocks.1.norm.weight"


class Code:
    """A class that no reader lists."""


def whole_state(gate: str = "top") -> dict[str, Tensor]:
    """The state dict of one process of Tutel."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    state = {NORM: draw(M), PREFIX + "_num_global_experts": torch.tensor(E),
             PREFIX + "experts.batched_fc1_w": draw(E, H, M),
             PREFIX + "experts.batched_fc2_w": draw(E, H, M),
             PREFIX + "experts.batched_fc1_bias": draw(E, H),
             PREFIX + "experts.batched_fc2_bias": draw(E, M)}
    if gate == "top":
        return {**state, PREFIX + "gates.0.wg.weight": draw(E, M)}
    return {**state, PREFIX + "gates.0.temperature": torch.log(torch.full([1], 2.0)),
            PREFIX + "gates.0.cosine_projector.weight": draw(P, M),
            PREFIX + "gates.0.cosine_projector.bias": draw(P),
            PREFIX + "gates.0.sim_matrix": draw(P, E)}


def scattered(state: dict[str, Tensor], ranks: int) -> list[dict[str, Tensor]]:
    """What each rank's `state_dict()` has: rank i * s + j holds slice j of expert i."""
    shards, parts = max(1, ranks // E), []
    for rank in range(ranks):
        part = {}
        for name, value in state.items():
            if ".experts." in name:
                value = value[rank * E // ranks:max(rank * E // ranks + 1, (rank + 1) * E // ranks)]
                if shards > 1:
                    fill = -value.shape[1] % shards if name.endswith("fc2_bias") else 0
                    whole = F.pad(value, (0, fill)) if fill else value
                    value = whole.chunk(shards, 1)[rank % shards]
            part[name] = value.clone()
        parts.append(part)
    return parts


def saved(folder: Path, state: dict[str, Tensor], ranks: int, pattern: str) -> Path:
    for rank, part in enumerate(scattered(state, ranks)):
        path = folder / pattern.replace("{rank}", str(rank)).replace("{size}", str(ranks))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(part, path)
    return folder


def convert(source: Path, target: Path, to: str, origin: str | None = None,
            **sizes: int) -> Path:
    with open_source(source, origin) as opened:
        assert Conversion(opened, target, to, CheckpointSizes(**sizes)).run()
    return target


def outputs(state: dict[str, Tensor], x_TM: Tensor) -> Tensor:
    """Tutel's formula: top-2 of the gate, divided by their sum; every expert on every token."""
    gate = {name.removeprefix(PREFIX + "gates.0."): value for name, value in state.items()}
    if "wg.weight" in gate:
        logits_TE = x_TM @ gate["wg.weight"].T
    else:
        scale = gate["temperature"].clamp(max=torch.log(torch.tensor(1 / 0.01))).exp()
        x_TP = x_TM @ gate["cosine_projector.weight"].T + gate["cosine_projector.bias"]
        logits_TE = F.normalize(x_TP, dim=1) @ F.normalize(gate["sim_matrix"], dim=0) * scale
    top_TK, ids_TK = torch.softmax(logits_TE, 1).topk(2, 1)
    fc1_w, fc2_w, fc1_bias, fc2_bias = (state[PREFIX + "experts.batched_" + name] for name in (
        "fc1_w", "fc2_w", "fc1_bias", "fc2_bias"))
    y_ETH = torch.relu(torch.matmul(x_TM, fc1_w.permute(0, 2, 1)) + fc1_bias[:, None])
    y_ETM = torch.matmul(y_ETH, fc2_w) + fc2_bias[:, None]
    y_TKM = torch.stack([y_ETM[ids_TK[:, k], torch.arange(len(x_TM))] for k in range(2)], 1)
    return (y_TKM * (top_TK / top_TK.sum(1, keepdim=True))[..., None]).sum(1)


class Model(torch.nn.Module):
    """A model with our layer by the names of the checkpoint's."""

    def __init__(self, router: dict[str, Any]) -> None:
        super().__init__()
        layer = MoELayer(M, num_experts=E, experts={"hidden_dim": H, "activation": "relu"},
                         router={"top_k": 2, "normalize": "before_drop", **router})
        block = torch.nn.ModuleDict({"moe_ffn": layer, "norm": torch.nn.RMSNorm(M)})
        self.blocks = torch.nn.ModuleList([torch.nn.Identity(), block])


@pytest.mark.parametrize("gate", ["top", "cosine"])
@pytest.mark.parametrize(("ranks", "pattern"), [
    (1, "model.pt"), (2, "{rank}.pt"), (4, "model-{rank}-of-{size}.pth"), (8, "{rank}/{size}.pt"),
    (16, "part{rank}.bin")])
def test_our_layer_computes_what_tutel_s_does(tmp_path: Path, gate: str, ranks: int,
                                              pattern: str) -> None:
    state = whole_state(gate)
    source = saved(tmp_path / "tutel", state, ranks, pattern)
    named = "/" in pattern
    assert named or detect(source) == "tutel"
    path = tmp_path / "tutel" / pattern if named else source
    converted = convert(path, tmp_path / "ours", "plain", "tutel", world=1)
    model = Model({} if gate == "top" else {"name": "cosine", "cosine_dim": P}).eval()
    moe_plugin.checkpoint.load(converted, model)
    x_TM = torch.randn(33, M)
    with torch.no_grad():
        torch.testing.assert_close(model.blocks[1].moe_ffn(x_TM).output, outputs(state, x_TM))
    assert torch.equal(model.blocks[1].norm.weight, state[NORM])
    back = convert(converted, tmp_path / "back", "tutel", world=ranks)
    for rank, part in enumerate(scattered(state, ranks)):
        found = torch.load(back / f"{rank}-of-{ranks}.pt", weights_only=True)
        assert found.keys() == part.keys()
        assert all(torch.equal(found[name], value) for name, value in part.items())


def test_tutel_s_files_for_other_numbers_of_ranks(tmp_path: Path) -> None:
    state = whole_state()
    path = saved(tmp_path / "2", state, 2, "{rank}-of-{size}.pt")
    for ranks in (8, 1, 4):
        path = convert(path, tmp_path / f"to{ranks}", "tutel", world=ranks)
        assert len(list(path.glob("*.pt"))) == ranks
    found = [torch.load(path / f"{rank}-of-4.pt", weights_only=True) for rank in range(4)]
    for rank, part in enumerate(scattered(state, 4)):
        assert all(torch.equal(found[rank][name], value) for name, value in part.items())


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    state = whole_state()

    def refused(words: str, path: Path, to: str = "plain", **sizes: int) -> None:
        with pytest.raises(ValueError, match=words):
            convert(path, tmp_path / "never", to, "tutel", **sizes)

    lost = saved(tmp_path / "lost", state, 4, "{rank}.pt")
    os.remove(lost / "1.pt")
    refused("no file of rank 1; restore", lost / "{rank}.pt")
    os.remove(lost / "2.pt")
    os.remove(lost / "3.pt")
    refused("files are missing", lost)
    refused("gates.1.wg.weight'; its tensors are",
            saved(tmp_path / "two", {**state, PREFIX + "gates.1.wg.weight": torch.zeros(E, M)}, 1,
                  "a.pt"))
    refused("no MoE layer of Tutel", saved(tmp_path / "none", {NORM: state[NORM]}, 1, "a.pt"))
    refused("is invalid for 4 experts", saved(tmp_path / "one", state, 1, "a.pt"), "tutel", world=3)
    refused("inner width 16, which cannot be divided among 32 ranks", tmp_path / "one", "tutel",
            world=128)
    several = saved(tmp_path / "several", state, 2, "a{rank}.pt")
    saved(several, state, 2, "b{rank}.pt")
    refused("several patterns.*select one", several)
    assert detect(tmp_path / "one" / "a.pt") == "tutel"
    torch.save({**state, "code": Code()}, tmp_path / "one" / "a.pt")
    with pytest.raises(UntrustedFile, match="refused"):
        open_source(tmp_path / "one", "tutel")


def test_a_gated_layer_and_optimizer_state_are_refused(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"moe": MoELayer(from_dict({
        "model_dim": M, "num_experts": E, "experts": {"hidden_dim": H, "kind": "gated_ffn"}}))})
    moe_plugin.checkpoint.save(tmp_path / "gated", model)
    with pytest.raises(CheckpointError, match="Tutel's layer has no counterpart for tensor "
                                              "'moe.experts.w_gate_LDF'"):
        convert(tmp_path / "gated", tmp_path / "never", "tutel")
    model = Model({})
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    moe_plugin.checkpoint.save(tmp_path / "adam", model, optimizer)
    with pytest.raises(CheckpointError, match="no optimizer state.*--model-only"):
        convert(tmp_path / "adam", tmp_path / "never", "tutel")


def test_tutel_itself_loads_what_we_write(tmp_path: Path) -> None:
    tutel = pytest.importorskip("tutel.moe", reason="Tutel is not installed")
    layer = tutel.moe_layer(
        gate_type={"type": "top", "k": 2, "capacity_factor": 0.0}, model_dim=M,
        experts={"type": "ffn", "num_experts_per_device": E, "hidden_size_per_expert": H})
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(
        [torch.nn.Identity(), torch.nn.ModuleDict({"moe_ffn": layer})])})
    state = {name: value for name, value in whole_state().items() if name != NORM}
    path = convert(saved(tmp_path / "tutel", state, 2, "{rank}.pt"), tmp_path / "one", "tutel",
                   world=1)
    model.load_state_dict(torch.load(path / "0-of-1.pt", weights_only=True))
    x_TM = torch.randn(1, 33, M)
    torch.testing.assert_close(layer(x_TM)[0], outputs(state, x_TM[0]))
