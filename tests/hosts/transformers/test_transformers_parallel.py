"""`ep_implementation="moe_plugin"` on the meshes of `transformers`: losses and gradients of one
process.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers", minversion="5.20")

from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: E402

import moe_plugin.hosts.transformers as ours  # noqa: E402
from moe_plugin.comm import TorchComm  # noqa: E402
from moe_plugin.config import ObserveConfig  # noqa: E402
from moe_plugin.hosts.transformers.register import PluginEP  # noqa: E402
from moe_plugin.observe import StatsRecorder  # noqa: E402
from moe_plugin.planner.spill import SpillPlan  # noqa: E402
from tests.checkpoint.hf_models import tiny, tokens  # noqa: E402
from tests.distributed import run_gloo  # noqa: E402
from tests.exactness.spills import planned  # noqa: E402

SETTINGS = {"moe_plugin": {}, "pieces, once": {"parallel.d": 2, "dispatch.send": "ranks"},
            "gathered": {"parallel.r": 0}, "tuned": {"parallel.mode": "auto"},
            "lent": {"parallel.spill": "least_loaded"}}


def reference(folder: Path, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor],
                                                        dict[str, list[int]]]:
    """(loss, gradients, choices by expert of each layer)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder,
                                                              experts_implementation="eager")
    loss = model(ids, labels=ids).loss
    loss.backward()
    # in a pass of its own: with them the model adds its balance loss
    logits = model(ids, output_router_logits=True).router_logits
    k, experts = model.config.num_experts_per_tok, logits[0].shape[-1]
    loads = {f"model.layers.{i}.mlp": logits_TE.topk(k).indices.flatten().bincount(
        minlength=experts).tolist() for i, logits_TE in enumerate(logits)}
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}, loads


def lent(counts: list[list[int]]) -> SpillPlan:
    """Rank 1 computes half of the rows of expert 0; other ranks neither lend nor borrow."""
    rows = sum(row[0] for row in counts)
    return SpillPlan(counts, {0: [rows - rows // 2, rows // 2, *[0] * (len(counts) - 2)]})


def _rank(*args: Any) -> None:
    with planned(lent) as made:
        _compare(*args)
    assert made or "lent" not in args[2]


def _compare(folder: Path, mesh: dict[str, int], names: list[str], ids: torch.Tensor,
             want: tuple[float, dict[str, torch.Tensor], dict[str, list[int]]]) -> None:
    shared, sources = mesh.get("tp_size", 1), mesh.get("fsdp_size", 1)
    mine = ids.chunk(sources)[dist.get_rank() // shared]
    for name in names:
        ours.use(SETTINGS[name], name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=transformers.distributed.DistributedConfig(
                **mesh, ep_implementation=name)).train()
        recorder = StatsRecorder(ObserveConfig(), TorchComm())
        recorder.add_model(model)
        if name == "tuned":  # layouts change from call to call, and a recomputation repeats them
            model.activation_checkpointing_enable()
            for _ in range(6):
                model.zero_grad()
                model(mine, labels=mine).loss.backward()
            model.zero_grad()
            assert {record["calls"] for record in recorder.reduce().values()} == {12}
        loss = model(mine, labels=mine).loss
        loss.backward()
        assert {layer: record["load"] for layer, record in recorder.reduce().items()} == {
            layer: [shared * count for count in load] for layer, load in want[2].items()}
        if sources == 1:
            assert abs(float(loss.detach()) - want[0]) <= 1e-6 * want[0]
        for key, parameter in model.named_parameters():
            grad: Any = parameter.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            error = (whole - want[1][key]).abs().max() / want[1][key].abs().max()
            assert error <= 5e-6, (name, key, float(error))


@pytest.mark.distributed
@pytest.mark.parametrize("kind,mesh,names", [
    ("mixtral", {"tp_size": 2, "ep_size": 2}, ["moe_plugin", "pieces, once", "lent"]),
    ("qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, ["moe_plugin", "gathered", "tuned"]),
    ("mixtral", {"fsdp_size": 3, "ep_size": 3}, ["lent"]),
    ("mixtral", {"fsdp_size": 4, "ep_size": 2}, ["moe_plugin", "gathered"]),
    ("qwen3_moe", {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}, ["moe_plugin", "pieces, once"]),
    ("qwen3_moe", {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}, ["moe_plugin"])])
def test_gradients_are_those_of_one_process(kind: str, mesh: dict[str, int], names: list[str],
                                            tmp_path: Path) -> None:
    tiny(kind).save_pretrained(tmp_path)
    ids = tokens(tiny(kind), batch=12, length=5)
    ranks = mesh.get("tp_size", 1) * mesh.get("fsdp_size", 1)
    run_gloo(ranks, _rank, tmp_path, mesh, names, ids, reference(tmp_path, ids))


def _settings() -> None:
    mesh = SimpleNamespace(get_group=lambda: dist.group.WORLD, size=lambda: 2)
    experts = MixtralExperts(tiny("mixtral").config)
    made = PluginEP({"comm.timeout_s": 7}, experts, mesh, mesh)
    assert [comm.timeout.total_seconds() for comm in (made.comm, made.sharing)] == [7, 7]
    with pytest.raises(ValueError, match="dispatch.name='bounded' can.*2 ranks.*name='ragged'"):
        PluginEP({"dispatch.name": "bounded"}, experts, mesh, mesh)


@pytest.mark.distributed
def test_settings_over_ranks() -> None:
    run_gloo(2, _settings)
