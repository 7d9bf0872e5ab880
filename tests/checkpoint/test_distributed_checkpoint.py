"""Checkpoints of wrapped models with experts on several ranks, by torch and by `save`: every expert
by its global index, at any number of ranks.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from moe_plugin import MoEBlock, MoELayer, TorchComm, auxiliary_loss
from moe_plugin.checkpoint import load, merge, save
from moe_plugin.comm import LocalComm
from moe_plugin.hosts.plain.sharding import ddp_model, fully_shard_model
from moe_plugin.layer import layers_in
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed
WIDTH = 8
Saved = dict[str, Any]


def ready(kind: str, ep: int = 0, experts: int = 4, seed: int = 0,
          **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in its wrapper, and its optimizer. ep: ranks of an expert-parallel group; 0: all.
    """
    torch.manual_seed(seed)
    comm = None if not dist.is_initialized() or not ep else TorchComm().contiguous_subgroup(ep)
    block = MoEBlock(WIDTH, comm, num_experts=experts, top_k=min(2, experts), **settings)
    model = nn.Sequential(nn.Linear(5, WIDTH), block, nn.Linear(WIDTH, 3))
    called = {"fsdp": fully_shard_model, "ddp": ddp_model}.get(kind, nn.Identity())(model)
    return called, torch.optim.AdamW(called.parameters(), lr=0.01)


def step(called: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))  # the same on all ranks
    loss = called(x).square().mean()
    optimizer.zero_grad()
    (loss + auxiliary_loss(called)).backward()
    optimizer.step()
    return loss.item()


def layer_of(called: nn.Module) -> MoELayer:
    [layer] = layers_in(called)
    return layer


def write(kind: str, folder: Path, ep: int, experts: int) -> tuple[Saved, Saved, list[float]]:
    """(this rank's layer, its optimizer state by name, losses of the next steps)."""
    called, optimizer = ready(kind, ep, experts)
    for _ in range(2):
        step(called, optimizer)
    model_state, optimizer_state = get_state_dict(called, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    layer = layer_of(called)
    moments = {f"experts.{name}": optimizer.state[p]["exp_avg_sq"].clone()
               for name, p in layer.experts.named_parameters()}
    return copy.deepcopy(layer.state_dict()), moments, [step(called, optimizer) for _ in range(2)]


def read(kind: str, folder: Path, ep: int, experts: int) -> tuple[Saved, Saved, list[float]]:
    called, optimizer = ready(kind, ep, experts, seed=5)  # other weights than those to come
    model_state, optimizer_state = get_state_dict(called, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(called, optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optimizer"])
    layer = layer_of(called)
    moments = {f"experts.{name}": optimizer.state[p]["exp_avg_sq"].clone()
               for name, p in layer.experts.named_parameters()}
    assert all(type(value) is Tensor for value in moments.values())
    return copy.deepcopy(layer.state_dict()), moments, [step(called, optimizer) for _ in range(2)]


def whole(by_rank: list[tuple[Saved, Saved, list[float]]], ep: int) -> tuple[Saved, Saved]:
    """Tensors of all experts of the first expert-parallel group, joined by the package's own code.
    """
    states, moments = [r[0] for r in by_rank[:ep]], [r[1] for r in by_rank[:ep]]
    layers = {"": {"num_experts": states[0]["_extra_state"]["num_experts"]}}
    return ({name: value for name, value in merge(states).items()
             if name.startswith("experts.")}, merge(moments, layers))


@pytest.mark.parametrize(("world", "ep", "experts"), [(2, 2, 4), (4, 2, 4), (4, 4, 2), (2, 2, 1)])
def test_written_at_one_number_of_ranks_and_read_at_others(tmp_path: Path, world: int, ep: int,
                                                           experts: int) -> None:
    ways = ("fsdp", "ddp"), ("ddp", "fsdp")
    for kind, other in ways if world == 2 else ways[:1]:
        folder = tmp_path / kind
        written = run_gloo(world, write, kind, folder, ep, experts)
        wanted, losses = whole(written, ep), written[0][2]
        for after, ranks in ((other, 2), (kind, 4), ("none", 1)):
            if ranks == 4 and kind == "ddp":
                continue  # seen once is enough
            found = run_gloo(ranks, read, after, folder, ranks, experts)
            torch.testing.assert_close(whole(found, ranks), wanted, rtol=0, atol=0)
            assert found[0][2] == pytest.approx(losses, rel=1e-4)


def run_asynchronous(folder: Path) -> list[bool]:
    called, optimizer = ready("ddp")
    step(called, optimizer)
    saved = [p.detach().clone() for p in called.parameters()]
    state = get_state_dict(called, optimizer)
    future = dcp.async_save({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder,
                            process_group=dist.new_group())  # training uses the other meanwhile
    step(called, optimizer)  # the state was copied before
    future.result()
    model_state = get_model_state_dict(called)
    dcp.load({"model": model_state}, checkpoint_id=folder)
    set_model_state_dict(called, model_state)
    return [torch.equal(p, q) for p, q in zip(called.parameters(), saved, strict=True)]


def test_asynchronous(tmp_path: Path) -> None:
    for same in run_gloo(2, run_asynchronous, tmp_path):
        assert all(same)


def run_objects(folder: Path) -> list[bool]:
    """The model and its optimizer themselves, without names of parameters."""
    called, optimizer = ready("fsdp")
    step(called, optimizer)
    dcp.save({"model": called, "optimizer": optimizer}, checkpoint_id=folder)
    wanted = step(called, optimizer)
    again, other = ready("fsdp", seed=5)
    step(again, other)
    dcp.load({"model": again, "optimizer": other}, checkpoint_id=folder)
    return [step(again, other) == wanted, step(again, other) == step(called, optimizer)]


def test_models_and_optimizers_themselves(tmp_path: Path) -> None:
    for same in run_gloo(2, run_objects, tmp_path):
        assert all(same)


def run_full(experts: int, ep: int) -> tuple[Saved, Saved]:
    """The whole state on every rank, and what ranks make of it when they are given it."""
    called, optimizer = ready("ddp", ep, experts)
    step(called, optimizer)
    full = StateDictOptions(full_state_dict=True)
    model_state = copy.deepcopy(get_model_state_dict(called, options=full))
    optimizer_state = copy.deepcopy(get_optimizer_state_dict(called, optimizer, options=full))
    for from_first in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
        again, other = ready("ddp", ep, experts, seed=5)
        alone = from_first and dist.get_rank()
        set_model_state_dict(again, {} if alone else dict(model_state), options=options)
        set_optimizer_state_dict(again, other, {} if alone else optimizer_state, options=options)
        for p, q in zip(called.parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=0, atol=0)
            torch.testing.assert_close(other.state[q], optimizer.state[p], rtol=0, atol=0)
    return model_state, {name: values["exp_avg"]
                         for name, values in optimizer_state["state"].items()}


@pytest.mark.parametrize(("world", "ep", "experts"), [(2, 2, 4), (4, 4, 2), (4, 2, 1)])
def test_full_state_has_all_experts(world: int, ep: int, experts: int) -> None:
    found = run_gloo(world, run_full, experts, ep)
    alone, optimizer = ready("none", 0, experts)
    step(alone, optimizer)
    wanted = alone.state_dict()
    for model_state, moments in found:
        assert model_state["1.moe._extra_state"] == wanted["1.moe._extra_state"]
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(model_state[name], wanted[name], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(moments[name], optimizer.state[parameter]["exp_avg"],
                                       rtol=1e-4, atol=1e-6)


def run_local(folder: Path) -> list[str]:
    """Errors of what has one rank's experts, and of experts without an axis of experts."""
    called, optimizer = ready("ddp")
    step(called, optimizer)
    said = []
    own = called.state_dict()
    copies = {name: value.cpu().clone() for name, value in own.items()
              if isinstance(value, Tensor)}
    custom = MoELayer(WIDTH, TorchComm(), num_experts=4,
                      experts=lambda index: nn.Linear(WIDTH, WIDTH))
    for write in (lambda: dcp.save({"model": own}, checkpoint_id=folder),
                  lambda: dcp.save(copies, checkpoint_id=folder),
                  lambda: dcp.save(optimizer.state_dict(), checkpoint_id=folder),
                  lambda: dcp.save({"model": custom.state_dict()}, checkpoint_id=folder),
                  lambda: get_model_state_dict(custom)):
        with pytest.raises((ValueError, dcp.api.CheckpointException)) as error:
            write()
        said.append(str(error.value))
    return said


def test_what_has_one_ranks_experts_is_refused(tmp_path: Path) -> None:
    for *local, custom in run_gloo(2, run_local, tmp_path):
        for said in local:
            assert "contains only the experts of this rank" in said
            assert "Pass it the results of get_model_state_dict(model)" in said
        assert "Use moe_plugin.checkpoint.save and load" in custom


def run_as_ever() -> None:
    """Outside of DCP states are this rank's, plain in files, and load again."""
    called, optimizer = ready("ddp")
    step(called, optimizer)
    layer = layer_of(called)
    assert layer.state_dict()["experts.w_in_LDF"].shape[0] == 2
    file = io.BytesIO()
    torch.save({"model": called.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(type(value) is Tensor for value in state["model"].values()
               if isinstance(value, Tensor))
    again, other = ready("ddp", seed=5)
    for model, moments in ((called.state_dict(), optimizer.state_dict()),
                           (copy.deepcopy(called.state_dict()),
                            copy.deepcopy(optimizer.state_dict())),
                           (state["model"], state["optimizer"])):
        again.load_state_dict(model)
        other.load_state_dict(moments)
        for p, q in zip(called.parameters(), again.parameters(), strict=True):
            assert torch.equal(p, q) and type(p) is type(q)
            for name, value in other.state[q].items():
                assert type(value) is Tensor and torch.equal(value, optimizer.state[p][name])
    fresh = ready("none", seed=5)[0]
    fresh.load_state_dict(called.module.state_dict(), assign=True)
    assert all(type(p) is nn.Parameter for p in fresh.parameters())


def test_other_states_are_as_ever() -> None:
    run_gloo(2, run_as_ever)


def run_factored(folder: Path) -> bool:
    """Optimizer state with an axis of experts, and other axes than its parameter; and without one:
    for biases [experts, width] it is a mean over this rank's experts.
    """
    called = ready("ddp")[0]
    optimizer = torch.optim.Adafactor(called.parameters(), lr=0.01)
    step(called, optimizer)
    with pytest.raises(ValueError, match="first dimension must have size 2, the number of experts"):
        get_optimizer_state_dict(called, optimizer)
    called = ready("ddp", expert_bias=False)[0]
    optimizer = torch.optim.Adafactor(called.parameters(), lr=0.01)
    step(called, optimizer)
    state = {"optimizer": get_optimizer_state_dict(called, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    wanted = copy.deepcopy([*optimizer.state.values()])
    step(called, optimizer)
    state = {"optimizer": get_optimizer_state_dict(called, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(called, optimizer, state["optimizer"])
    torch.testing.assert_close([*optimizer.state.values()], wanted, rtol=0, atol=0)
    return state["optimizer"]["state"]["1.moe.experts.w_in_LDF"]["row_var"].shape[0] == 4


def test_factored_optimizer_state(tmp_path: Path) -> None:
    assert run_gloo(2, run_factored, tmp_path) == [True, True]


def run_on_disk(folder: Path) -> bool:
    settings = {"experts_on": "disk", "experts_store_path": str(folder)}
    models = [ready("none", seed=seed, **settings)[0].eval() for seed in (0, 5)]
    dcp.save({"model": get_model_state_dict(models[0])}, checkpoint_id=folder / "saved")
    state = get_model_state_dict(models[1])
    dcp.load({"model": state}, checkpoint_id=folder / "saved")
    set_model_state_dict(models[1], state)
    x = torch.randn(6, 5)
    return torch.equal(models[0](x), models[1](x))


def test_experts_in_files(tmp_path: Path) -> None:
    assert run_gloo(2, run_on_disk, tmp_path) == [True, True]


def test_one_rank_is_as_ever(tmp_path: Path) -> None:
    model = MoELayer(WIDTH, LocalComm(), num_experts=4)
    assert type(model.state_dict()["experts.w_in_LDF"]) is Tensor
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    other = MoELayer(WIDTH, LocalComm(), num_experts=4)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state["model"])
    torch.testing.assert_close(other.experts.w_in_LDF, model.experts.w_in_LDF)


# What `save` writes of models in FSDP2 and DDP is read at any size, too.


def inside(called: nn.Module) -> nn.Module:
    """The model in its wrapper."""
    return getattr(called, "module", called)


def saved_steps(kind: str, folder: Path) -> list[float]:
    called, optimizer = ready(kind)
    for _ in range(2):
        step(called, optimizer)
    save(folder, inside(called), optimizer)
    return [step(called, optimizer) for _ in range(2)]


def loaded_steps(kind: str, folder: Path) -> list[float]:
    called, optimizer = ready(kind, seed=5)
    load(folder, inside(called), optimizer)
    return [step(called, optimizer) for _ in range(2)]


def test_runs_go_on_in_another_wrapper(tmp_path: Path) -> None:
    for before in ("fsdp", "ddp"):
        folder = tmp_path / before
        wanted = pytest.approx(run_gloo(2, saved_steps, before, folder)[0], rel=1e-4)
        for after in ("fsdp", "ddp"):
            assert run_gloo(2, loaded_steps, after, folder)[0] == wanted
        assert loaded_steps("none", folder) == wanted


def save_alone(folder: Path) -> None:
    model = nn.ModuleList(MoEBlock(8, comm, num_experts=4) for comm in (None, LocalComm()))
    with pytest.raises(ValueError, match="layers use the groups .*pass `comm`"):
        save(folder, model)
    with pytest.raises(ValueError, match="spread over 2 ranks, but 1 ranks write the"):
        save(folder / str(dist.get_rank()), ready("fsdp")[0], comm=LocalComm())


def test_what_would_not_be_whole_is_refused(tmp_path: Path) -> None:
    run_gloo(2, save_alone, tmp_path)
