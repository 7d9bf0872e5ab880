"""Our layers in models of fairseq2, where it is installed:
`bash scripts/test_torch_versions.sh --fairseq2`.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("fairseq2", exc_type=ImportError)

from fairseq2.gang import FakeGang, Gangs, create_fake_gangs  # noqa: E402
from fairseq2.models.llama import LLaMAConfig, create_llama_model  # noqa: E402
from fairseq2.models.llama4 import Llama4Config, create_llama4_model  # noqa: E402
from fairseq2.models.llama4.config import Llama4ExpertsConfig  # noqa: E402
from fairseq2.models.llama4.moe import MoE  # noqa: E402
from fairseq2.models.transformer import (  # noqa: E402
    DauphinFeedForwardNetwork,
    GLUFeedForwardNetwork,
    StandardFeedForwardNetwork,
)
from fairseq2.nn import BatchLayout  # noqa: E402
from fairseq2.nn.data_parallel import get_data_parallel_facade  # noqa: E402

from moe_plugin import auxiliary_loss, replace_ffn  # noqa: E402
from moe_plugin.comm import TorchComm  # noqa: E402
from moe_plugin.hosts.plain.blocks import blocks_in  # noqa: E402
from moe_plugin.hosts.plain.fairseq2 import enable_checkpoints, swap_moe  # noqa: E402
from moe_plugin.hosts.plain.feed_forward import read_feed_forward  # noqa: E402
from moe_plugin.training.gradients.sync import sync_gradients  # noqa: E402
from tests.distributed import run_gloo  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "fairseq2_llama.py"
SIZES = {"model_dim": 32, "max_seq_len": 16, "vocab_size": 40, "num_layers": 4,
         "num_attn_heads": 4, "num_key_value_heads": 2, "ffn_inner_dim": 48,
         "ffn_inner_dim_multiple_of": 8}


def llama() -> Any:
    torch.manual_seed(0)
    return create_llama_model(LLaMAConfig(**SIZES)).double()


def llama4(top_k: int = 1, shared: bool = True) -> Any:
    """Their factory leaves the weights of MoE blocks undefined."""
    torch.manual_seed(0)
    model = create_llama4_model(Llama4Config(**SIZES, attention_chunk_size=8, experts=(
        Llama4ExpertsConfig(num_experts=4, use_shared_expert=shared, top_k=top_k,
                            interleave_moe_layer_step=2)))).double()
    for block in (part for part in model.modules() if isinstance(part, MoE)):
        for parameter in block.parameters():
            nn.init.normal_(parameter, 0, 0.2)
    return model


def batch(lengths: list[int] | None = None, seed: int = 1) -> tuple[Tensor, BatchLayout]:
    seqs = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(seed))
    return seqs, BatchLayout.of(seqs, lengths)


def gradients(model: nn.Module, *inputs: Any) -> dict[str, Tensor]:
    model(*inputs).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("ffn, activation", [
    (GLUFeedForwardNetwork(16, 24, True), "silu"),
    (GLUFeedForwardNetwork(16, 24, False, gate_activation=nn.GELU(), inner_dropout_p=0.1), "gelu"),
    (StandardFeedForwardNetwork(16, 24, True, inner_dropout_p=0.1), "relu"),
    (StandardFeedForwardNetwork(16, 24, False, inner_activation=nn.GELU("tanh")), "gelu_tanh"),
    (GLUFeedForwardNetwork(16, 24, True, activation_sparsity=0.9), None),
    (DauphinFeedForwardNetwork(16, 24, True), None),  # one map for values and gates
])
def test_feed_forward_networks_are_read(ffn: nn.Module, activation: str | None) -> None:
    found = read_feed_forward(ffn)
    assert (found and found.activation) == activation
    assert found is None or found.dropout == (0.1 if ffn.inner_dropout else 0.0)


def test_a_llama_is_upcycled_with_the_same_logits_and_gradients() -> None:
    dense, sparse = llama(), llama()
    assert replace_ffn(sparse, num_experts=4, every=2) == [
        "decoder.layers.1.ffn", "decoder.layers.3.ffn"]
    seqs, layout = batch()
    torch.testing.assert_close(sparse(seqs, layout), dense(seqs, layout))
    wanted, found = gradients(dense, seqs, layout), gradients(sparse, seqs, layout)
    name = "decoder.layers.1.ffn"
    torch.testing.assert_close(found[f"{name}.moe.experts.w_gate_LDF"].sum(0),
                               wanted[f"{name}.gate_proj.weight"].T)
    alike = set(found) & set(wanted)
    assert len(alike) > 20
    for name in alike:
        torch.testing.assert_close(found[name], wanted[name], msg=name)


@pytest.mark.parametrize("packed", [False, True])
def test_padding_is_not_routed(packed: bool) -> None:
    model = llama()
    replace_ffn(model, num_experts=4, every=2)
    seqs, layout = batch([12, 7])
    if packed:
        seqs = torch.cat([seqs[0], seqs[1]])
        layout = BatchLayout.of(seqs, [12, 7], packed=True)
    model(seqs, layout)
    assert [int(block.last.stats.tokens) for _, block in blocks_in(model)] == [19, 19]
    model(*batch())
    assert [int(block.last.stats.tokens) for _, block in blocks_in(model)] == [24, 24]


def theirs(name: str, found: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    """Gradients of a MoE block by our names."""
    parts = {"w_gate_LDF": ("fc_gate", "gate_proj"), "w_in_LDF": ("fc_in", "inner_proj"),
             "w_out_LFD": ("fc_out", "output_proj")}
    ours = {"router.weight_ED": found[f"{name}.router"].T}
    for ours_name, (linear, part) in parts.items():
        ours[f"experts.{ours_name}"] = found[f"{name}.experts.{part}"].unflatten(0, (experts, -1))
        if (shared := f"{name}.shared_expert.{part}.weight") in found:
            ours[f"shared_expert.{linear}.weight"] = found[shared]
    return {f"{name}.moe.{key}": value for key, value in ours.items()}


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_llama_4_is_swapped_with_the_same_logits_and_gradients(top_k: int, shared: bool) -> None:
    native, ours = llama4(top_k, shared), llama4(top_k, shared)
    names = swap_moe(ours)
    assert names == ["decoder.layers.1.ffn", "decoder.layers.3.ffn"]
    assert all(block.moe.config.experts.shared_hidden_dim > 0 for _, block in blocks_in(ours)
               ) == shared
    torch.testing.assert_close(ours(*batch()), native(*batch()))
    wanted, found = gradients(native, *batch()), gradients(ours, *batch())
    for name in names:
        wanted |= theirs(name, wanted, 4)
    assert len(found) == sum(p.requires_grad for p in ours.parameters())
    for name, grad in found.items():
        assert grad.abs().sum() > 0, name
        torch.testing.assert_close(grad, wanted[name], msg=name)


def test_llama_4_ignores_padding() -> None:
    native, ours = llama4(), llama4()
    swap_moe(ours)
    seqs, layout = batch([12, 7])
    wanted, found = native(seqs, layout), ours(seqs, layout)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1, :7], wanted[1, :7])
    assert [int(block.last.stats.tokens) for _, block in blocks_in(ours)] == [19, 19]


def test_frozen_weights_stay_frozen_and_losses_are_added() -> None:
    model = llama4()
    model.decoder.layers[1].ffn.requires_grad_(False)
    model.decoder.layers[3].ffn.router.requires_grad_(False)
    swap_moe(model, losses={"switch": 0.1})
    trained = [{name for name, p in block.named_parameters() if p.requires_grad}
               for _, block in blocks_in(model)]
    assert not trained[0] and len(trained[1]) == 6 and "moe.router.weight_ED" not in trained[1]
    model(*batch())
    assert auxiliary_loss(model) > 0


def on_ranks() -> None:
    comm = TorchComm()
    native, ours, dense = llama4(2), llama4(2), llama()
    replace_ffn(dense, num_experts=4, comm=comm)
    names = swap_moe(ours, comm)
    torch.testing.assert_close(dense(*batch(seed=comm.rank)), llama()(*batch(seed=comm.rank)))
    torch.testing.assert_close(ours(*batch(seed=comm.rank)), native(*batch(seed=comm.rank)))
    loss = sum(native(*batch(seed=rank)).square().sum() for rank in range(comm.size))
    (loss / comm.size).backward()
    wanted = {name: p.grad for name, p in native.named_parameters()}
    gradients(ours, *batch(seed=comm.rank))
    sync_gradients(ours, comm)
    for name in names:
        wanted |= theirs(name, wanted, 4)
    local = slice(2 * comm.rank, 2 * comm.rank + 2)
    for name, p in ours.named_parameters():
        value = wanted[name][local] if ".moe.experts." in name else wanted[name]
        torch.testing.assert_close(p.grad.as_subclass(Tensor), value, msg=name)


@pytest.mark.distributed
def test_two_ranks_share_the_experts() -> None:
    run_gloo(2, on_ranks)


def test_gangs_that_lose_experts_are_refused() -> None:
    device, shared = torch.device("cpu"), SimpleNamespace(size=2)
    gang, two = FakeGang(device), FakeGang(device, size=2)
    model = llama()
    replace_ffn(model, num_experts=4)
    lost = Gangs(root=two, dp=two, rdp=two, sdp=gang, tp=gang, pp=gang)
    enable_checkpoints(model, lost)  # every rank has all experts
    for _, block in blocks_in(model):
        block.moe.comm = shared
    with pytest.raises(ValueError, match="2 ranks share the experts.* create_fsdp_gangs"):
        enable_checkpoints(model, lost)


def test_every_state_is_a_tensor_and_comes_back() -> None:
    model, other = llama(), llama()
    for each in (model, other):
        replace_ffn(each, num_experts=4, upcycle=False)
        enable_checkpoints(each, create_fake_gangs(torch.device("cpu")))
    state = get_data_parallel_facade(model).state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    assert not torch.equal(other(*batch()), model(*batch()))
    get_data_parallel_facade(other).load_state_dict(state)
    assert torch.equal(other(*batch()), model(*batch()))
    name = next(name for name in state if name.endswith("_extra_state"))
    state[name] = torch.frombuffer(bytearray(pickle.dumps(Path)), dtype=torch.uint8)
    with pytest.raises(pickle.UnpicklingError):
        get_data_parallel_facade(other).load_state_dict(state)


def test_what_cannot_be_swapped_is_refused() -> None:
    with pytest.raises(ValueError, match="has no MoE block .* use moe_plugin.replace_ffn"):
        swap_moe(llama())
    model = llama4()
    model.decoder.layers[3].ffn.tp_gang = FakeGang(torch.device("cpu"))
    with pytest.raises(ValueError, match="'decoder.layers.3.ffn' is sharded over ranks"):
        swap_moe(model)
    odd = llama4()
    odd.decoder.layers[1].ffn.experts.activation = nn.Tanh()
    with pytest.raises(ValueError, match="activation Tanh is not supported"):
        swap_moe(odd)
    with pytest.raises(ValueError, match="is on the meta device"):
        swap_moe(copy.deepcopy(llama4()).to("meta"))
    sharded = GLUFeedForwardNetwork(16, 24, True)
    sharded.output_proj.sharded, sharded.output_proj.tp_gang = True, FakeGang(
        torch.device("cpu"), size=2)
    assert read_feed_forward(sharded) is None


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_trains_saves_and_resumes(tmp_path: Path, ranks: int) -> None:
    start = [sys.executable] if ranks == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]

    def losses(folder: str, steps: int) -> tuple[str, str, str]:
        done = subprocess.run(
            [*start, str(EXAMPLE), "--folder", str(tmp_path / folder), "--steps", str(steps)],
            capture_output=True, text=True, check=False, timeout=600, env={
                **os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stdout + done.stderr
        [line] = re.findall(r"steps (\d+) to \d+, loss ([\d.]+) -> ([\d.]+)", done.stdout)
        return line

    whole, first, second = losses("whole", 40), losses("parts", 20), losses("parts", 40)
    assert [line[0] for line in (whole, first, second)] == ["0", "0", "20"]
    assert second[2] == whole[2] and float(whole[2]) < float(whole[1]) - 1
    folders = [tmp_path / name / "checkpoints" / "step_40" / "model" / "pp_00" / "tp_00"
               for name in ("whole", "parts")]
    states = [[torch.load(folder / f"sdp_{rank:02}.pt") for rank in range(ranks)]
              for folder in folders]
    for one, other in zip(*states, strict=True):
        assert set(one) == set(other)
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    # ranks that clipped by different norms would drift apart
    for name, value in states[0][0].items():
        mine = ".moe.experts." in name or name.endswith("_extra_state")
        assert torch.equal(value, states[0][-1][name]) == (ranks == 1 or not mine), name
    from moe_plugin.cli.main import main

    assert main(["report", str(tmp_path / "whole")]) == 0
    page = (tmp_path / "whole" / "report.html").read_text(encoding="utf-8")
    assert all(f'id="{curve}"' in page for curve in ("loss", "max-mean"))
