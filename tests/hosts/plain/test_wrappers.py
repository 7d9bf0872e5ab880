"""Wrappers of torch that would take a rank's experts for copies of other ranks' are refused; hooks
of gradients stay with the parameters.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from moe_plugin import MoEBlock, MoELayer
from moe_plugin.comm import LocalComm
from moe_plugin.hosts.plain.sharding import ddp_model, fully_shard_model
from moe_plugin.training.gradients.sync import reduce_experts
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed


def model(*comm: LocalComm) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), MoEBlock(8, *comm, num_experts=4), nn.Linear(8, 4))


def fsdp1(module: nn.Module, **options: bool) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def called(wrap) -> str:  # noqa: ANN001
    try:
        wrap()(torch.ones(3, 4) * dist.get_rank())
    except ValueError as error:
        return str(error)
    return "fine"


def run_wrappers() -> dict[str, str]:
    return {
        "fully_shard": called(lambda: fully_shard(model())),
        "FSDP1": called(lambda: fsdp1(model())),
        "FSDP1, parameters kept": called(lambda: fsdp1(model(), use_orig_params=True)),
        "ours": called(lambda: fully_shard_model(model())),
        "experts on every rank": called(lambda: fully_shard(model(LocalComm()))),
        "DDP twice": called(lambda: ddp_model(ddp_model(model()))),
        "both": called(lambda: fully_shard_model(ddp_model(model()))),
    }


def test_torchs_own_sharding_is_refused_around_experts_of_other_ranks() -> None:
    for said in run_gloo(2, run_wrappers):
        for name in ("fully_shard", "FSDP1", "FSDP1, parameters kept"):
            assert "FSDP shards the experts' parameters" in said[name], name
            assert "moe_plugin.fully_shard_model(model)" in said[name]
        assert said["ours"] == said["experts on every rank"] == "fine"
        for name in ("DDP twice", "both"):
            assert "are already reduced during backward" in said[name]


def expert_gradients(module: nn.Module, inner: nn.Module) -> torch.Tensor:
    module.train()
    module(torch.randn(9, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
           ).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in inner[1].moe.experts.parameters()])


def run_from_meta(*comm: LocalComm) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a model that was sharded with its values, and of one that got them later."""
    whole = model(*comm)
    values = [p.detach().clone() for p in whole.parameters()]
    with torch.device("meta"):
        later = model(*comm)
    fully_shard_model(later).to_empty(device="cpu")
    with torch.no_grad():
        for parameter, value in zip(later.parameters(), values, strict=True):
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
    direct = fully_shard_model(whole)
    return expert_gradients(direct, direct), expert_gradients(later, later)


@pytest.mark.parametrize("everywhere", [False, True])
def test_experts_from_the_meta_device_get_the_same_gradients(everywhere: bool) -> None:
    for direct, later in run_gloo(2, run_from_meta, *([LocalComm()] if everywhere else [])):
        torch.testing.assert_close(later, direct)
        assert direct.any()


def run_replaced() -> dict[str, str]:
    wrapped = ddp_model(model())
    x, said = torch.ones(3, 4), {"before": called(lambda: wrapped)}
    copied = copy.deepcopy(wrapped.module)
    everywhere = ddp_model(model(LocalComm())).module  # a group of ranks cannot be pickled
    wrapped.module.load_state_dict(model().state_dict(), assign=True)
    for name, module in (("assigned", wrapped.module), ("copied", copied),
                         ("pickled", pickle.loads(pickle.dumps(everywhere)))):
        said[name] = called(lambda module=module: module)
        said[f"{name}, evaluated"] = called(lambda module=module: module.eval())
        module.train()
        with torch.no_grad():
            module(x)
    said["wrapped again"] = called(lambda: ddp_model(copied))
    return said


def test_parameters_that_lost_their_hooks_do_not_train() -> None:
    for said in run_gloo(2, run_replaced):
        lost = {name for name, text in said.items() if "are not reduced over ranks" in text}
        assert lost == {"assigned", "copied", "pickled"}
        assert {text for name, text in said.items() if name not in lost} == {"fine"}, said


def shared_tokens() -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(8, num_experts=4, parallel={"replicas": 2, "schedule": "s1"})


def loaded(layer: MoELayer, **how: bool) -> MoELayer:
    layer.load_state_dict(shared_tokens().state_dict(), **how)
    return layer


REMADE = {
    "built": lambda layer: layer, "deepcopy": copy.deepcopy,
    "double": lambda layer: layer.double().float(),
    "meta": lambda layer: loaded(layer.to("meta").to_empty(device="cpu")),
    "assigned": lambda layer: loaded(layer, assign=True),
    "frozen for a while": lambda layer: copy.deepcopy(layer.requires_grad_(False)
                                                      ).requires_grad_()}


def run_remade() -> dict[str, torch.Tensor]:
    x, found = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), {}
    for name, remake in REMADE.items():
        layer = remake(shared_tokens())
        layer(x).output.square().sum().backward()
        found[name] = layer.router.weight_ED.grad
    return found


def test_every_copy_sums_gradients_of_shared_tokens() -> None:
    """S1: each of two ranks routes half of the tokens that both hold."""
    first, second = run_gloo(2, run_remade)
    assert first["built"].any()
    for name in REMADE:
        for gradient in (first[name], second[name]):
            torch.testing.assert_close(gradient, first["built"], msg=name)


def test_one_rank_alone_has_nothing_to_reduce() -> None:
    layer, x = MoELayer(8, num_experts=4), torch.randn(3, 8)
    layer.experts.requires_grad_(False)
    reduce_experts(layer)
    for module in (layer.requires_grad_(), copy.deepcopy(layer)):
        module(x).output.sum().backward()
        assert module.experts.w_in_LDF.grad.any()


def test_loaded_parameters_are_still_experts() -> None:
    block = MoEBlock(8, num_experts=4, device="meta")
    block.load_state_dict(MoEBlock(8, num_experts=4).state_dict(), assign=True)
    assert [parameter.expert for parameter in block.moe.experts.parameters()] == [True] * 4
