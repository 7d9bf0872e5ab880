"""`ExpertMuon`: the update of `torch.optim.Muon` for every expert's matrix, wherever it lies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from moe_plugin import MoEBlock, MoELayer, fully_shard_model, optimizer_groups
from moe_plugin.checkpoint import load, save
from moe_plugin.checkpoint.layers import full_state
from moe_plugin.comm import Comm, LocalComm, TorchComm, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.training.gradients.muon import ExpertMuon, muon_groups
from moe_plugin.training.gradients.sync import sync_gradients
from tests.distributed import run_gloo
from tests.seeds import seeded

OPTIONS: list[dict[str, Any]] = [{}, {"nesterov": False, "momentum": 0.8},
                                 {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
                                 {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)}]


class Stacks(nn.Module):
    """Experts as `transformers` declares them: `use_experts_implementation` sets these."""

    def __init__(self, transposed: bool, concatenated: bool) -> None:
        super().__init__()
        self.is_transposed, self.is_concatenated = transposed, concatenated
        first, second = (3, 12, 8), (3, 8, 6)
        if transposed:
            first, second = (3, 8, 12), (3, 6, 8)
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(shape))
                                             for shape in (first, second))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(3, 12))


def matrices_of(module: nn.Module, value: Tensor, name: str) -> Iterator[Tensor]:
    """[out, in] of each expert, gate and up apart: written out by hand, as views."""
    for matrix in value:
        if isinstance(module, Stacks) and name == "gate_up_proj":
            both = matrix.t() if module.is_transposed else matrix
            yield from (both[:6], both[6:]) if module.is_concatenated else (both[::2], both[1::2])
        elif isinstance(module, Stacks):
            yield matrix.t() if module.is_transposed else matrix
        else:
            yield matrix.t()


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    made: dict[str, nn.Module] = {
        f"transposed {a}, concatenated {b}": Stacks(a, b)
        for a in (True, False) for b in (True, False)}
    for kind in ("ffn", "gated_ffn"):
        block = MoEBlock(8, num_experts=3, expert_kind=kind, expert_bias=True,
                         expert_hidden_dim=12)
        made[kind] = block.moe.experts
    return made


@pytest.mark.fast
@pytest.mark.parametrize("options", OPTIONS)
def test_each_matrix_gets_the_update_of_torch(options: dict[str, Any]) -> None:
    """Three steps; the oracle is torch's optimizer over a list of matrices."""
    for label, module in modules().items():
        names = [name for name, p in module.named_parameters() if p.ndim == 3]
        parameters = dict(module.named_parameters())
        apart = {name: [nn.Parameter(m.detach().clone().contiguous())
                        for m in matrices_of(module, parameters[name], name)] for name in names}
        oracle = torch.optim.Muon([m for each in apart.values() for m in each], lr=0.05, **options)
        groups = muon_groups(module, 0.05, 1e-3)
        for group in groups:
            if group["muon"]:
                group.update({"weight_decay": 0.1, **options})
        optimizer = ExpertMuon(groups)
        for step in range(3):
            torch.manual_seed(step)
            for name, p in parameters.items():
                p.grad = torch.randn_like(p)
                for one, g in zip(apart.get(name, ()), matrices_of(module, p.grad, name)):
                    one.grad = g.clone()
            optimizer.step()
            oracle.step()
        for name in names:
            assert optimizer.state[parameters[name]]["momentum_buffer"].shape == parameters[
                name].shape
            for got, want in zip(matrices_of(module, parameters[name], name), apart[name],
                                 strict=True):
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7,
                                           msg=f"{label} {name}: {{}}".format)


class Model(nn.Module):
    """Experts whole and cut, and what goes to AdamW."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        with seeded(5):
            self.embed = nn.Embedding(16, 8, dtype=torch.float64)
            self.first = self._layer(comm, 8, kind="gated_ffn", bias=True)
            self.middle = nn.Linear(8, 8, dtype=torch.float64)
            shards = {"parallel": {"shards": 2}} if comm.size > 1 else {}
            self.second = self._layer(comm, 4, kind="gated_ffn", bias=True, **shards)
            self.lm_head = nn.Linear(8, 16, bias=False, dtype=torch.float64)

    def _layer(self, comm: Comm, experts: int, parallel: Any = None, **more: Any) -> MoELayer:
        config = {"model_dim": 8, "num_experts": experts, "router": {"name": "topk", "top_k": 2},
                  "parallel": parallel or {}, "experts": {"hidden_dim": 16, **more}}
        return MoELayer(from_dict(config), comm, dtype=torch.float64)

    def forward(self, ids_T: Tensor) -> Tensor:
        x_TD = self.first(self.embed(ids_T)).output
        return self.lm_head(self.second(self.middle(x_TD)).output)


def step(model: nn.Module, optimizer: ExpertMuon, comm: Comm, number: int) -> None:
    """On this rank's part of the batch; gradients are those of the mean over all of it."""
    generator = torch.Generator().manual_seed(number)
    ids_T = torch.randint(16, (32,), generator=generator).chunk(comm.size)[comm.rank]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(ids_T), (3 * ids_T + 1) % 16).backward()
    if comm.size > 1:
        sync_gradients(model, comm)
    optimizer.step()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return muon_groups(model, lr=0.02, adamw_lr=0.01, weight_decay=0.1)


def whole_state(model: Model) -> dict[str, Tensor]:
    found = {f"first.{name}": value for name, value in full_state(model.first).items()}
    found |= {f"second.{name}": value for name, value in full_state(model.second).items()}
    return {**{name: value for name, value in model.state_dict().items()
               if isinstance(value, Tensor) and not name.startswith(("first", "second"))}, **found}


def trained(comm: Comm, folder: Path | None = None) -> dict[str, Tensor]:
    """After four steps. folder: a checkpoint is written after two."""
    model = Model(comm)
    optimizer = ExpertMuon(groups(model))
    for number in range(4):
        if number == 2 and folder is not None:
            save(folder, model, optimizer)
        step(model, optimizer, comm, number)
    return whole_state(model)


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12,
                                   msg=f"{name}: {{}}".format)


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    return trained(LocalComm())


def test_a_step_moves_every_parameter(alone: dict[str, Tensor]) -> None:
    start = whole_state(Model(LocalComm()))
    assert all(not torch.equal(start[name], value) for name, value in alone.items())


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_and_shards_of_experts_change_nothing(ranks: int, alone: dict[str, Tensor]) -> None:
    """The second layer's experts are split into two: their matrices are orthogonalized whole."""
    for found in run_simulated(ranks, trained):
        close(found, alone)


def resumed(comm: Comm, folder: Path) -> dict[str, Tensor]:
    model = Model(comm)
    optimizer = ExpertMuon(groups(model))
    load(folder, model, optimizer)
    for number in (2, 3):
        step(model, optimizer, comm, number)
    return whole_state(model)


@pytest.mark.distributed
def test_a_checkpoint_goes_on_at_another_number_of_ranks(
        tmp_path: Path, alone: dict[str, Tensor]) -> None:
    """Momentum of experts that were cut, on one rank, and the other way round."""
    for found in run_gloo(2, over_gloo, trained, tmp_path / "two"):
        close(found, alone)
    close(resumed(LocalComm(), tmp_path / "two"), alone)
    trained(LocalComm(), tmp_path / "one")
    for found in run_gloo(2, over_gloo, resumed, tmp_path / "one"):
        close(found, alone)


def over_gloo(function: Any, folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = function(TorchComm(), folder)
    return found


def sharded() -> dict[str, Tensor]:
    """Under FSDP2: dense matrices are DTensors, with momentum in parts."""
    comm = TorchComm()
    model = fully_shard_model(Model(comm))
    optimizer = ExpertMuon(groups(model))
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        ids_T = torch.randint(16, (32,), generator=generator).chunk(2)[comm.rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids_T), (3 * ids_T + 1) % 16).backward()
        optimizer.step()
    weight: Any = model.middle.weight
    assert optimizer.state[weight]["momentum_buffer"].to_local().shape == (4, 8)
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in whole_state(model).items()}


@pytest.mark.distributed
def test_dense_matrices_in_parts(alone: dict[str, Tensor]) -> None:
    for found in run_gloo(2, sharded):
        close(found, alone)


@pytest.mark.fast
def test_groups_tell_matrices_from_stacks_of_vectors() -> None:
    model = Model(LocalComm())
    named = {id(p): name for name, p in model.named_parameters()}
    kinds = {named[id(p)]: (group["muon"], group["weight_decay"] > 0)
             for group in groups(model) for p in group["params"]}
    assert len(kinds) == len(named)
    for name, kind in kinds.items():
        matrix = ".w_" in name or name == "middle.weight"
        decays = matrix or name.endswith(("router.weight_ED", "embed.weight", "lm_head.weight"))
        assert kind == (matrix, decays), name
    assert not any(named[id(p)] == "middle.weight" for group in muon_groups(
        model, 0.1, 0.1, dense=False) if group["muon"] for p in group["params"])


@pytest.mark.fast
def test_biases_of_experts_of_transformers_have_no_weight_decay() -> None:
    """And matrices of experts that are modules, which have no axis of experts, have."""
    module = Stacks(False, True)
    for found in (optimizer_groups(module, 0.1, weight_decay=0.1), groups(module)):
        [group] = [g for g in found if g["weight_decay"] == 0]
        assert [id(p) for p in group["params"]] == [id(module.gate_up_proj_bias)]
    custom = MoEBlock(8, num_experts=2, experts=lambda index: nn.Linear(8, 8))
    [decays] = [g for g in optimizer_groups(custom, 0.1, weight_decay=0.1)
                if g["name"] == "experts"]
    assert {p.ndim for p in decays["params"]} == {2} and len(decays["params"]) == 2


@pytest.mark.fast
def test_a_schedule_and_a_copy_of_the_state_reach_both_kinds() -> None:
    model = Model(LocalComm())
    optimizer = ExpertMuon(groups(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number)
    step(model, optimizer, LocalComm(), 0)
    schedule.step()
    other = copy.deepcopy(model)
    again = ExpertMuon(groups(other))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {group["lr"] for group in again.param_groups} == {0.01, 0.005}
    for each, made in ((model, optimizer), (other, again)):
        step(each, made, LocalComm(), 1)
    close(whole_state(other), whole_state(model))
    fields = {frozenset(state) for state in optimizer.state.values()}
    assert fields == {frozenset({"momentum_buffer"}), frozenset({"step", "exp_avg", "exp_avg_sq"})}


@pytest.mark.fast
def test_its_adamw_is_made_once_and_steps_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's hooks of all optimizers see one step of one optimizer; a copy steps alike."""
    made, stepped, init = [], [], torch.optim.AdamW.__init__

    def counted(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "__init__", counted)
    model = Model(LocalComm())
    optimizer = ExpertMuon(groups(model))
    hook = register_optimizer_step_post_hook(lambda each, *_: stepped.append(each))
    try:
        for number in range(3):
            step(model, optimizer, LocalComm(), number)
    finally:
        hook.remove()
    assert stepped == [optimizer] * 3 and len(made) == 1
    other, again = copy.deepcopy((model, optimizer))
    for each, its in ((model, optimizer), (other, again)):
        step(each, its, LocalComm(), 3)
    close(whole_state(other), whole_state(model))


@pytest.mark.fast
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_takes_more_groups(copied: Callable[[Any], Any]) -> None:
    """With the options that the copied optimizer was made with."""
    made = copied(ExpertMuon([nn.Parameter(torch.zeros(3, 3))], lr=0.5, momentum=0.25))
    for muon in (True, False):
        made.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))], "muon": muon})
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.5, 1e-3]
    assert made.param_groups[1]["momentum"] == 0.25
    for group in made.param_groups:
        group["params"][0].grad = torch.eye(3)
    made.step()
    assert all((group["params"][0].diagonal() < 1).all() for group in made.param_groups)


@pytest.mark.fast
def test_what_muon_cannot_do_is_refused() -> None:
    vector, matrix = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"shape \(3,\) is not a matrix.*muon=False"):
        ExpertMuon([vector])
    with pytest.raises(ValueError, match="halves='up' must be one of none, concatenated"):
        ExpertMuon([matrix], halves="up")
    with pytest.raises(ValueError, match="momentum=-1 must be >= 0"):
        ExpertMuon([matrix], momentum=-1)
    with pytest.raises(ValueError, match="betas=.* is not an option of Muon"):
        ExpertMuon([matrix], betas=(0.9, 0.9))
    with pytest.raises(ValueError, match="Embedding has no matrix for Muon.*torch.optim.AdamW"):
        muon_groups(nn.Embedding(3, 3), 0.1, 0.1)
