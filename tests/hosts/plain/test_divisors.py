"""Experts' gradients are divided by the same number as those that a wrapper reduces."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from moe_plugin import MoEBlock, TorchComm
from moe_plugin.comm import LocalComm
from moe_plugin.experts import is_expert
from moe_plugin.hosts.plain.sharding import ddp_model, fully_shard_model
from moe_plugin.training.gradients.part_gradients import plain
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed


def model(ep: int) -> nn.Module:
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
    whole = model(ep)
    mean = gradients(fully_shard_model(whole), whole)
    for divisor, units in ((1.0, []), (3.0, [1])):
        own = model(ep)
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
    whole = model(ep)
    mean = gradients(ddp := ddp_model(whole), whole)
    assert ddp is not None
    for hook in (summed, noop_hook, averaged, default_hooks.allreduce_hook):
        own = model(ep)
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
