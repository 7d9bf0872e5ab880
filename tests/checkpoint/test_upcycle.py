"""Upcycled models compute what the dense ones did."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.checkpoint.formats.base import convert, open_source
from moe_plugin.checkpoint.source import MODEL
from moe_plugin.checkpoint.upcycle import Upcycling, upcycle
from moe_plugin.cli.main import main
from moe_plugin.hosts.plain.blocks import auxiliary_loss
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks
from tests.checkpoint.hf_models import logits, tiny, tokens

transformers = pytest.importorskip("transformers", minversion="5.20")

# dense model, options, family of the result
CASES = {
    "copy": ("llama", ["--experts", "4", "--top-k", "2"], "mixtral"),
    "copy, three of five": ("qwen3", ["--experts", "5", "--top-k", "3"], "qwen3_moe"),
    "granular": ("llama", ["--experts", "12", "--top-k", "4", "--granularity", "4"], "mixtral"),
    "granular, two groups": (
        "qwen3", ["--experts", "12", "--top-k", "6", "--granularity", "3"], "qwen3_moe"),
    "shared": ("qwen2", ["--experts", "4", "--top-k", "2", "--shared", "0.5", "--shared-gate"],
               "qwen2_moe"),
    "granular, shared": (
        "qwen2", ["--experts", "8", "--top-k", "4", "--granularity", "2", "--shared", "0.25",
                  "--shared-gate"], "qwen2_moe"),
    "every other layer": ("qwen3", ["--experts", "4", "--top-k", "2", "--every", "2"],
                          "qwen3_moe"),
}


@pytest.mark.parametrize("case", CASES)
def test_first_logits_are_the_dense_models(case: str, tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    kind, options, family = CASES[case]
    dense = tiny(kind)
    dense.save_pretrained(tmp_path / "dense")
    assert main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "moe"), *options]) == 0
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert made.config.model_type == family
    layers = 1 if "every" in case else 3
    assert f"{layers} MoE layers of {options[1]} experts" in capsys.readouterr().out
    ids = tokens(dense)
    want = logits(dense, ids)
    off = 1e-5 * float(want.abs().max())
    torch.testing.assert_close(logits(made, ids), want, rtol=1e-5, atol=off)
    assert len(swap_moe_blocks(made)) == layers
    torch.testing.assert_close(logits(made, ids), want, rtol=1e-5, atol=off)


def test_nothing_is_replaced_or_left_half(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama").save_pretrained(tmp_path / "dense")
    argv = ["upcycle", str(tmp_path / "dense"), str(tmp_path / "moe"), "--experts", "4", "--top-k",
            "2"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        assert main(argv) == 2
        assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    assert main(argv) == 0
    made = (tmp_path / "moe" / "model.safetensors").read_bytes()
    assert main([*argv, "--seed", "1"]) == 2
    assert "already exists; choose another folder" in capsys.readouterr().err
    assert (tmp_path / "moe" / "model.safetensors").read_bytes() == made


def _full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_experts_are_the_pieces_and_groups_share_their_rows(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    dense = convert(open_source(tmp_path), "neutral")
    made = upcycle(dense, Upcycling(experts=6, top_k=4, granularity=2, router_std=0.5))
    prefix = "layers.1.moe."
    w_in_FD = dense.read((MODEL, "layers.1.mlp.w_in.weight"))
    w_out_DF = dense.read((MODEL, "layers.1.mlp.w_out.weight"))
    for expert in range(6):
        piece = slice(24 * (expert % 2), 24 * (expert % 2) + 24)
        window = (slice(expert, expert + 1),)
        assert torch.equal(made.read((MODEL, prefix + "experts.w_in_LDF"), window)[0],
                           w_in_FD[piece].T)
        assert torch.equal(made.read((MODEL, prefix + "experts.w_out_LFD"), window)[0],
                           2 * w_out_DF[:, piece].T)
    router_ED = made.read((MODEL, prefix + "router.weight"))
    assert torch.equal(router_ED[0::2], router_ED[1::2])
    assert len(router_ED.unique(dim=0)) == 3
    assert 0.3 < float(router_ED.std()) < 0.7
    other = made.read((MODEL, "layers.2.moe.router.weight"))
    assert not torch.equal(router_ED, other)


def test_an_upcycled_model_trains(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "dense")
    assert main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "moe"), "--experts", "4",
                 "--top-k", "2"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe").train()
    swap_moe_blocks(model, settings={"losses": {"switch": 0.01}})
    optimizer, ids, losses = torch.optim.SGD(model.parameters(), lr=0.1), tokens(model), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss + auxiliary_loss(model)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(("settings", "message"), [
    ({"top_k": 1}, "upcycling top_k=1: must be from 2 to experts=8"),
    ({"granularity": 3}, "upcycling experts=8: must be at least 2 and a multiple of"),
    ({"granularity": 4, "top_k": 2}, "upcycling top_k=2: must be .* multiple of granularity=4"),
    ({"shared": 1.0}, "upcycling shared=1.0: must be from 0 to below 1"),
    ({"shared_gate": True}, "upcycling shared_gate=True"),
])
def test_plans_that_would_change_the_output_are_refused(settings: dict[str, Any],
                                                        message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Upcycling(**{"experts": 8, "top_k": 2, **settings})


def test_models_that_cannot_be_upcycled_are_named(tmp_path: Path) -> None:
    tiny("mixtral").save_pretrained(tmp_path / "moe")
    tiny("llama").save_pretrained(tmp_path / "dense")
    moe, dense = (convert(open_source(tmp_path / name), "neutral") for name in ("moe", "dense"))
    with pytest.raises(CheckpointError, match="'layers.0.moe.' already has experts"):
        upcycle(moe, Upcycling(experts=4, top_k=2))
    with pytest.raises(CheckpointError, match="inner width 48, which is not a multiple of gran"):
        upcycle(dense, Upcycling(experts=10, top_k=5, granularity=5))
    with pytest.raises(CheckpointError, match="no layer would become an MoE layer with every=4"):
        upcycle(dense, Upcycling(experts=4, top_k=2, every=4))
    plain_shared = upcycle(dense, Upcycling(experts=4, top_k=2, shared=0.5))
    with pytest.raises(CheckpointError, match="mixtral: shared expert=plain .the family has none"):
        convert(plain_shared, "hf")
