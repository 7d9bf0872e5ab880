"""Experts' gradients are divided by the same number as those that a wrapper reduces; gradients and
checkpoints of layers that share experts, or some of their parameters.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from moe_plugin import MoEBlock, TorchComm
from moe_plugin.checkpoint.save_load import load, save
from moe_plugin.comm import LocalComm
from moe_plugin.experts import is_expert
from moe_plugin.hosts.plain.sharding import ddp_model, fully_shard_model
from moe_plugin.training.gradients.part_gradients import plain
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed


def block(ep: int) -> nn.Module:
    torch.manual_seed(0)
    comm = TorchComm().contiguous_subgroup(ep) if ep > 1 else LocalComm()
    return nn.Sequential(nn.Linear(4, 8), nn.ModuleList([MoEBlock(8, comm, num_experts=4)])[0],
                         nn.Linear(8, 4)).double()


def gradients(wrapped: nn.Module, bare: nn.Module) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(dist.get_rank())
    wrapped(torch.randn(9, 4, generator=g, dtype=torch.float64)).square().sum().backward()
    return [plain(p.grad) if is_expert(p) else getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
            for p in bare.parameters()]


def run_fsdp(ep: int) -> None:
    whole = block(ep)
    mean = gradients(fully_shard_model(whole), whole)
    for divisor, units in ((1.0, []), (3.0, [1])):
        own = block(ep)
        fully_shard_model(own, units=[own[number] for number in units])
        for unit in [own, *(own[number] for number in units)]:
            unit.set_gradient_divide_factor(divisor)
            unit.set_force_sum_reduction_for_comms(True)
        for got, wanted in zip(gradients(own, own), mean, strict=True):
            torch.testing.assert_close(got, wanted * dist.get_world_size() / divisor)


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (2, 1), (4, 2)])
def test_experts_follow_the_divisor_of_fsdp2(world: int, ep: int) -> None:
    run_gloo(world, run_fsdp, ep)


def summed(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def averaged(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    bucket.buffer().div_(dist.get_world_size())
    return summed(group, bucket)


averaged.averages = True  # type: ignore[attr-defined]


def run_hooks(ep: int) -> None:
    whole = block(ep)
    mean = gradients(ddp := ddp_model(whole), whole)
    assert ddp is not None
    for hook in (summed, noop_hook, averaged, default_hooks.allreduce_hook):
        own = block(ep)
        wrapped = ddp_model(own)
        wrapped.register_comm_hook(None, hook)
        if hook in (averaged, default_hooks.allreduce_hook):
            torch.testing.assert_close(gradients(wrapped, own), mean)
        else:
            with pytest.raises(ValueError, match=f"hook '{hook.__name__}' .*averages=True"):
                gradients(wrapped, own)


@pytest.mark.parametrize("ep", [2, 1])
def test_hooks_of_ddp_that_may_sum_are_refused(ep: int) -> None:
    run_gloo(2, run_hooks, ep)


TIED = ("experts", "w_in_LDF", "layer")


def model(tied: str, comm: TorchComm | LocalComm) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 8), MoEBlock(8, comm, num_experts=4), nn.Tanh(),
                         MoEBlock(8, comm, num_experts=4), nn.Linear(8, 4)).double()
    first, second = made[1].moe, made[3].moe
    if tied == "experts":
        second.experts = first.experts
    elif tied == "layer":
        made[3].moe = first
    else:
        setattr(second.experts, tied, getattr(first.experts, tied))
    return made


def batch(rank: int) -> Tensor:
    g = torch.Generator().manual_seed(rank)
    return torch.randn(9, 4, generator=g, dtype=torch.float64)


def parts(named: dict[str, Tensor], comm: TorchComm | LocalComm) -> dict[str, Tensor]:
    """The experts of this rank, and everything else."""
    return {name: value.chunk(comm.size)[comm.rank] if ".experts." in name else value
            for name, value in named.items()}


def run_gradients(ep: int) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    comm = TorchComm().contiguous_subgroup(ep) if ep > 1 else LocalComm()
    for tied in TIED:
        dense = model(tied, LocalComm())
        sum(dense(batch(i)).square().sum() for i in range(world)).div(world).backward()
        every = dict(dense.named_parameters(remove_duplicate=False))
        wanted = parts({name: p.grad for name, p in every.items()}, comm)
        for wrap in (ddp_model, fully_shard_model):
            ours = model(tied, comm)
            own = dict(ours.named_parameters(remove_duplicate=False))
            with torch.no_grad():
                for name, value in parts(every, comm).items():
                    own[name].copy_(value)
            wrapped = wrap(ours)
            wrapped(batch(rank)).square().sum().backward()
            for name, parameter in ours.named_parameters(remove_duplicate=False):
                gradient = parameter.grad
                gradient = plain(gradient) if is_expert(parameter) else getattr(
                    gradient, "full_tensor", lambda gradient=gradient: gradient)()
                torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-9,
                                           msg=lambda m: f"{tied}, {wrap}, {name}: {m}")  # noqa: B023


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2), (2, 1)])
def test_gradients_are_those_of_one_dense_process(world: int, ep: int) -> None:
    run_gloo(world, run_gradients, ep)


def step(wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    wrapped(batch(dist.get_rank())).square().sum().backward()
    optimizer.step()


def run_saved(folder: Path) -> None:
    for tied in TIED:
        runs = []
        for again in (False, True):
            ours = model(tied, TorchComm())
            wrapped = ddp_model(ours)
            optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
            if again:
                load(folder / tied, ours, optimizer)
            else:
                step(wrapped, optimizer)
                save(folder / tied, ours, optimizer)
            step(wrapped, optimizer)
            runs.append([p.detach() for p in ours.parameters()])
        torch.testing.assert_close(*runs, rtol=0, atol=0, msg=tied)


def test_checkpoints_of_tied_experts_go_on_in_the_same_way(tmp_path: Path) -> None:
    run_gloo(2, run_saved, tmp_path)


def run_two_groups() -> str:
    ours = nn.Sequential(MoEBlock(8, TorchComm(), num_experts=4),
                         MoEBlock(8, LocalComm(), num_experts=4))
    ours[1].moe.experts.w_in_LDF = ours[0].moe.experts.w_in_LDF
    with pytest.raises(ValueError, match="share parameters of experts.*the same `comm`") as caught:
        ddp_model(nn.Sequential(nn.Linear(2, 2), ours))
    return str(caught.value)


def test_experts_tied_between_groups_are_refused() -> None:
    assert all(run_gloo(2, run_two_groups))
