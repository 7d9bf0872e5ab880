"""Experts' biases under the names that they had before load everywhere. Of fairseq and Megatron:
tests/hosts.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_plugin import MoEBlock, MoELayer
from moe_plugin.checkpoint.conversion import Conversion
from moe_plugin.checkpoint.formats.base import CheckpointSizes, open_source
from moe_plugin.checkpoint.layers import write_experts
from moe_plugin.checkpoint.source import MODEL
from moe_plugin.comm import run_simulated
from moe_plugin.config import from_dict
from moe_plugin.experts.base import FORMER, current_name, with_current_names
from moe_plugin.memory.safetensors_file import SafetensorsFile
from moe_plugin.memory.tiers import DiskTier
from moe_plugin.memory.weights.files import load_weights, save_weights
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.utils import checksums
from tests.checkpoint.test_checkpoint import resumed, save_trained
from tests.former_names import former, rewrite_folder


def _layer(**experts: Any) -> MoELayer:
    layer = MoELayer(8, num_experts=4, experts={"kind": "gated_ffn", "hidden_dim": 12, **experts})
    with torch.no_grad():
        for value in layer.parameters():
            value.normal_()
    return layer


@pytest.mark.fast
def test_which_names_are_former_ones() -> None:
    for old, now in FORMER.items():
        for begin in ("", "a.0.moe.", "experts.local_experts.1."):
            for end in ("", ".exp_avg"):
                name = f"{begin}experts.{{}}{end}"
                assert current_name(name.format(old)) == name.format(now)
                assert current_name(name.format(now)) == name.format(now)
        assert current_name(f"a.experts.base_layer.{old}") == f"a.experts.base_layer.{now}"
        for other in (old, f"a.{old}", f"experts.local_experts.0.{old}", f"my_experts.{old}",
                      f"experts.{old}2", f"experts.lora_{old}"):
            assert current_name(other) == other
    assert list(with_current_names({"experts.b_in_LF": 1, "a": 2})) == ["experts.bias_in_LF", "a"]
    with pytest.raises(ValueError, match="both 'experts.b_in_LF' and 'experts.bias_in_LF'"):
        with_current_names({"experts.b_in_LF": 1, "experts.bias_in_LF": 2})


@pytest.mark.fast
@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_state_dicts(store: str, tmp_path: Path) -> None:
    source, x = _layer(), torch.randn(9, 8)
    state = former(source.state_dict())
    assert "experts.b_gate_LF" in state
    more = {} if store == "device" else {"store": store}
    if store == "disk":
        more["store_path"] = str(tmp_path)
    for whole in (True, False):
        layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 4, "experts": {
            "kind": "gated_ffn", "hidden_dim": 12, **more}})).eval()
        if whole:
            layer.load_state_dict(state)
        else:
            layer.router.load_state_dict(source.router.state_dict())
            layer.experts.load_state_dict(former(source.experts.state_dict()))
        with torch.no_grad():
            assert torch.equal(layer(x).output, source.eval()(x).output)
        with pytest.raises(RuntimeError, match='Unexpected key.*"experts.b_in_LF"'):
            layer.load_state_dict({**source.state_dict(), "experts.b_in_LF": torch.zeros(4, 12)})
    assert "experts.b_gate_LF" in state, "the caller's own stays as it is"


@pytest.mark.parametrize(("old", "new", "cut"), [(2, 1, (None, None)), (4, 2, (2, 2))])
def test_folders_of_save(tmp_path: Path, old: int, new: int,
                         cut: tuple[int | None, int | None]) -> None:
    """Weights and optimizer state, whole or cut, at any number of ranks; what `reshard` makes."""
    folder = tmp_path / "saved"

    def after(path: Path) -> list[float]:
        return run_simulated(new, lambda comm: resumed(path, comm, 2, cut[1]))[0]

    run_simulated(old, lambda comm: save_trained(folder, comm, 2, cut[0]))
    wanted = after(folder)
    rewrite_folder(folder)
    assert after(folder) == wanted
    with open_source(folder) as source:
        names = {name for field, name in source.entries if field in (MODEL, "exp_avg")}
        assert "first.experts.bias_gate_LF" in names and former(sorted(names)) != sorted(names)
        write_experts(source, tmp_path / "experts.safetensors")
        assert Conversion(source, tmp_path / "again", "plain", CheckpointSizes(ep=2)).run()
    assert after(tmp_path / "again") == wanted


@pytest.mark.fast
def test_files_of_experts(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source, path, x = _layer(), tmp_path / "experts.safetensors", torch.randn(9, 8)
    save_file({f"any{name}": value for name, value in former(source.experts.state_dict()).items()},
              path)
    layer = _layer(store="disk", store_path=str(path)).eval()
    layer.router.load_state_dict(source.router.state_dict())
    with torch.no_grad():
        assert torch.equal(layer(x).output, source.eval()(x).output)


def test_streamed_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    def trainer(seed: int) -> StreamedTrainer:
        torch.manual_seed(seed)
        blocks = [nn.Linear(8, 8), MoEBlock(8, num_experts=4, top_k=2), nn.Linear(8, 8)]
        for p in blocks[1].parameters():
            nn.init.normal_(p)
        return StreamedTrainer(blocks, lambda y, _: y.square().mean(), torch.optim.AdamW,
                               DiskTier(tmp_path))

    saved, loaded = trainer(0), trainer(1)
    save_weights(saved, tmp_path / "saved")
    for path in (tmp_path / "saved").iterdir():
        with SafetensorsFile(path) as file:
            metadata = dict(file.metadata)
        save_file(former(load_file(path)), path, {**metadata, **checksums.METADATA})
        checksums.seal(path)
    load_weights(loaded, tmp_path / "saved")
    for one, other in zip(saved.blocks, loaded.blocks, strict=True):
        assert all(map(torch.equal, one.read(), other.read()))


def test_distributed_checkpoints_of_torch(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from moe_plugin.checkpoint.dcp import FormerNamesPlanner

    def ready(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), MoEBlock(8, num_experts=4, top_k=2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
        states = get_state_dict(model, optimizer)
        return model, optimizer, dict(zip(("model", "optimizer"), states, strict=True))

    model, optimizer, state = ready(0)
    wanted = {name: value.detach().clone() for name, value in model.named_parameters()}
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    dcp.save(former(state), checkpoint_id=tmp_path / "former")
    dcp.save(state, checkpoint_id=tmp_path / "present")
    for folder in ("former", "present"):
        model, optimizer, state = ready(5)
        dcp.load(state, checkpoint_id=tmp_path / folder, planner=FormerNamesPlanner())
        set_state_dict(model, optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        torch.testing.assert_close(dict(model.named_parameters()), wanted, rtol=0, atol=0)
        assert all(map(torch.equal, moments, (optimizer.state[p]["exp_avg"]
                                              for p in model.parameters())))


def test_swapped_models() -> None:
    """Their own state dict, and one that a `Trainer` wrote to a folder of `transformers`."""
    pytest.importorskip("transformers", minversion="5.20")
    from moe_plugin.checkpoint.formats.huggingface.format import state_source, to_neutral
    from moe_plugin.hosts.plain.huggingface import swap_moe_blocks
    from tests.checkpoint.hf_models import tiny

    model, ids = tiny("gpt_oss"), torch.arange(12)[None]
    swap_moe_blocks(model)
    wanted, state = model(ids).logits, former(copy.deepcopy(dict(model.state_dict())))
    assert any(".b_gate_LF" in name for name in state)
    source = to_neutral(state_source(state, model.config.to_dict()))
    assert (MODEL, "layers.0.moe.experts.bias_gate_LF") in source.entries
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    model.load_state_dict(state)
    torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=0)
