"""Whatever copies or averages all parameters, or steps them in an unusual way, is refused around
experts of several ranks, or right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.local_sgd import LocalSGD
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

from moe_plugin import MoEBlock, TorchComm
from moe_plugin.comm import LocalComm
from moe_plugin.experts import is_expert
from moe_plugin.experts.overwrites import LAST_CALL, VALUES
from moe_plugin.hosts.plain.sharding import ddp_model, fully_shard_model
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed
STEPS = 13  # comparisons follow steps 1, 3, 6, 12


def model(*comm: Any, upcycled: bool = False, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 8), MoEBlock(8, *comm, **{"num_experts": 4, **settings}),
                         nn.Linear(8, 4))
    if upcycled:
        with torch.no_grad():
            for parameter in made[1].moe.experts.parameters():
                parameter.copy_(torch.full(parameter.shape[1:], 0.1))
        made[1].moe.load_state_dict(made[1].moe.state_dict())
    return made


def batch(step: int) -> torch.Tensor:
    seed = 100 * step + dist.get_rank()
    return torch.randn(9, 4, generator=torch.Generator().manual_seed(seed))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def all_(parameters: Any) -> Any:
    return parameters


def no_experts(parameters: Any) -> Any:
    return (p for p in parameters if not is_expert(p))


def train(wrapped: nn.Module, optimizer: Any, *, before: Callable[[], None] = lambda: None,
          after: Callable[[], None] = lambda: None, steps: int = STEPS) -> str:
    """What the error says, and after which step."""
    for step in range(steps):
        try:
            optimizer.zero_grad()
            wrapped(batch(step)).square().sum().backward()
            before()
            optimizer.step()
            after()
        except ValueError as error:
            return f"step {step}: {error}"
    return "fine"


def mean_of(tensors: Any) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def named(chosen: Callable[[Any], Any]) -> dict[str, str]:
    found = {}
    for name, make in (
            ("ZeRO", lambda p: ZeroRedundancyOptimizer(list(p), torch.optim.SGD, lr=0.05)),
            ("post-local SGD", lambda p: PostLocalSGDOptimizer(
                sgd(p), PeriodicModelAverager(period=2, warmup_steps=100)))):
        whole = model()
        found[name] = train(ddp_model(whole), make(chosen(whole.parameters())))
    return found


def run_named() -> dict[str, str]:
    return named(all_) | {f"{name}, no experts": said for name, said in named(no_experts).items()}


def test_tools_are_refused_by_name_in_the_first_step() -> None:
    for said in run_gloo(2, run_named):
        assert said["ZeRO"].startswith("step 0: torch.distributed.optim.ZeroRedundancyOptimizer")
        assert said["post-local SGD"].startswith("step 0: torch.distributed.optim.PostLocalSGD")
        assert "fully_shard_model" in said["ZeRO"]
        assert said["ZeRO, no experts"] == said["post-local SGD, no experts"] == "fine"


def stand_in_of_deepspeed() -> Any:
    """What DeepSpeed 0.19.8 does with all parameters, in a module of the same name."""
    code = """
import torch.distributed as dist
from torch import nn

class DeepSpeedEngine(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)

    def forward(self, *inputs):
        return self.module(*inputs)
"""
    made: Any = ModuleType("deepspeed.runtime.engine")
    exec(compile(code, "engine.py", "exec"), made.__dict__)
    return made


def run_deepspeed() -> dict[str, str]:
    engine = stand_in_of_deepspeed().DeepSpeedEngine
    found = {}
    for name, whole in (("several ranks", model()), ("every rank", model(LocalComm()))):
        found[name] = train(engine(whole), sgd(whole.parameters()), steps=1)
    return found


def test_deepspeed_is_refused_by_name() -> None:
    for said in run_gloo(2, run_deepspeed):
        assert said["several ranks"].startswith("step 0: deepspeed.initialize copies or averages")
        assert said["every rank"] == "fine"


def averaged_by_hand(period: int, upcycled: bool, values: Callable[[Any], Any],
                     chosen: Callable[[Any], Any] = all_) -> str:
    whole, calls = model(upcycled=upcycled), iter(range(1, 1 + STEPS))

    def average() -> None:
        if next(calls) % period == 0:
            mean_of(values(p) for p in chosen(whole.parameters()))

    grads = values(torch.ones(1)) is None
    return train(ddp_model(whole), sgd(whole.parameters()),
                 **{"before" if grads else "after": average})


def local_sgd(period: int) -> str:
    whole = model()
    wrapped = ddp_model(whole)
    accelerator = SimpleNamespace(
        distributed_type="MULTI_CPU", wait_for_everyone=lambda: None, autocast=torch.no_grad,
        reduce=lambda x, reduction: mean_of([x]) or x)
    with LocalSGD(accelerator, wrapped, period) as local:
        return train(wrapped, sgd(whole.parameters()), after=local.step)


def run_general() -> dict[str, str]:
    data, grad = (lambda p: p.data), (lambda p: p.grad)
    found = {"LocalSGD": local_sgd(3)}
    for upcycled in (False, True):
        kind = "upcycled" if upcycled else "random"
        for name, period, values in (("values", 1, data), ("gradients", 1, grad),
                                     ("each sixth step", 6, data)):
            found |= {f"{name}, {kind}": averaged_by_hand(period, upcycled, values),
                      f"{name}, no experts, {kind}": averaged_by_hand(
                          period, upcycled, values, no_experts)}
    return found | {"broadcast, upcycled": broadcast_by_hand(),
                    "no tokens": without_tokens(torch.optim.AdamW),
                    "no tokens, decay in gradients": without_tokens(torch.optim.Adam)}


def broadcast_by_hand() -> str:
    whole = model(upcycled=True)

    def spread() -> None:
        for parameter in whole.parameters():
            dist.broadcast(parameter.data, 0)

    return train(ddp_model(whole), sgd(whole.parameters()), after=spread)


def without_tokens(optimizer: Any) -> str:
    """Weight decay alone moves the experts of both ranks."""
    whole = model(upcycled=True)
    forward = whole[1].moe.forward
    whole[1].moe.forward = lambda x, *more, **how: forward(x[:0], *more, **how)
    whole[1].forward = lambda x: (x.sum() + whole[1].moe(x).output.sum()).reshape(1, 1).expand(1, 8)
    return train(ddp_model(whole), optimizer(whole.parameters(), lr=0.05, weight_decay=0.1))


def test_what_nobody_knows_by_name_is_found_by_what_it_does() -> None:
    for said in run_gloo(2, run_general):
        fine = {name for name, text in said.items() if text == "fine"}
        assert fine == {name for name in said if name.startswith("no tokens") or (
            "no experts" in name)}, said
        # found in the call after the step, or in the next comparison
        assert said["values, random"].startswith("step 1: experts of ranks 0 and 1 were diff")
        assert said["gradients, random"].startswith("step 1: ")
        assert "changed equally: something averages the gradients" in said["gradients, random"]
        for name in ("each sixth step, random", "LocalSGD"):
            assert "have become equal: something copies or averages all" in said[name], said
        for name in ("values", "gradients", "broadcast"):  # the second comparison makes it sure
            assert said[f"{name}, upcycled"].startswith(
                "step 3: experts of ranks 0 and 1 were trained and are equal"), said


def run_same_tokens() -> tuple[str, list[str]]:
    """A router that gives every expert the same tokens keeps experts equal: this may be right."""
    whole = model(upcycled=True, num_experts=2, top_k=2)
    with torch.no_grad():
        whole[1].moe.router.weight_ED.zero_()
    texts = warnings_of()
    return train(ddp_model(whole), sgd(whole.parameters())), texts


def test_a_router_that_tells_no_experts_apart_is_warned_of() -> None:
    (said, texts), (other, none) = run_gloo(2, run_same_tokens)
    assert said == other == "fine" and not none
    assert [text.partition(" were")[0] for text in texts] == ["experts of ranks 0 and 1"]
    assert "the same tokens with the same weights" in texts[0]


def run_drifting() -> dict[str, list[str]]:
    """Four ranks, two of which store the same experts."""
    texts, found = warnings_of(), {}
    for name in ("right", "experts", "shared"):
        whole = model(TorchComm().contiguous_subgroup(2), shared_expert_hidden_dim=8)
        wrapped = ddp_model(whole)

        def spoil(name: str = name, whole: nn.Module = whole) -> None:
            chosen = {"experts": whole[1].moe.experts, "shared": whole[1].moe.shared_expert}
            if name in chosen and dist.get_rank() == 2:
                for parameter in chosen[name].parameters():
                    parameter.grad = torch.ones_like(parameter)

        assert train(wrapped, sgd(whole.parameters()), before=spoil, steps=5) == "fine"
        found[name] = texts[:]
        texts.clear()
    return found


def test_replicas_that_drift_apart_are_warned_of() -> None:
    first, *others = run_gloo(4, run_drifting)
    assert not any(texts for found in others for texts in found.values())
    assert first["right"] == []
    assert [text.partition(",")[0] for text in first["experts"]] == [
        "ranks 0 and 2 store the same experts"]
    assert ["equal on ranks 0 and 2" in text for text in first["shared"]] == [True]


def warnings_of() -> list[str]:
    """What the check will log."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_plugin.experts.overwrites").addHandler(handler)
    return texts


def run_copied_first() -> list[str]:
    texts = warnings_of()
    for wrap, broadcast in ((ddp_model, True), (ddp_model, False), (lambda m: m, False)):
        whole = model()
        for parameter in whole.parameters() if broadcast else ():
            dist.broadcast(parameter.data, 0)
        texts.append(train(wrap(whole), sgd(whole.parameters()), steps=3))
    return texts


def test_copies_before_the_first_step_and_forgotten_reductions_are_warned_of() -> None:
    first, second = run_gloo(2, run_copied_first)
    assert second == ["fine"] * 3
    copied, *fine, drifted, last = first
    assert "differed when the layer was built and are equal" in copied
    assert "routers" in drifted and "equal on ranks 0 and 1 and have become diff" in drifted
    assert fine + [last] == ["fine"] * 3


def run_counted() -> list[int]:
    whole, calls = model(), []
    check = whole[1].moe.ddp_check
    gather = check.overwrites.comm.all_gather

    def counted(x: torch.Tensor) -> torch.Tensor:
        if x.shape[2:] == (VALUES,):
            calls.append(check.overwrites.calls)
        return gather(x)

    check.overwrites.comm.all_gather = counted
    wrapped = ddp_model(whole)
    for _ in range(LAST_CALL + 5):
        wrapped(batch(0)[:1]).sum().backward()
    assert check.passed
    return calls


def test_comparisons_are_few() -> None:
    for calls in run_gloo(2, run_counted):
        assert calls == [2, 4, 7, 13, 25, 61, 121, LAST_CALL]


def run_inside_backward() -> dict[str, str]:
    found = {}
    for name, comm in (("replicas", [LocalComm()]), ("one rank each", [])):
        whole = model(*comm)
        wrapped = fully_shard_model(whole)
        for parameter in whole.parameters():
            own = sgd([parameter])
            parameter.register_post_accumulate_grad_hook(
                lambda _, own=own: (own.step(), own.zero_grad()) and None)
        found[name] = train(wrapped, SimpleNamespace(zero_grad=lambda: None, step=lambda: None),
                            steps=3)
    return found


def test_steps_inside_backward_of_replicated_experts_are_refused() -> None:
    for said in run_gloo(2, run_inside_backward):
        assert "step inside backward, but 2 ranks store the same" in said["replicas"]
        assert said["one rank each"] == "fine"


def run_mixed(**how: bool) -> list[torch.Tensor]:
    whole = model()
    wrapped = fully_shard_model(whole)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.05, **how)
    assert train(wrapped, optimizer, steps=3) == "fine"
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.state_dict()["state"]) == len(list(whole.parameters()))
    return [p.full_tensor() if not is_expert(p) else p.detach() for p in whole.parameters()]


def run_ways() -> dict[str, list[torch.Tensor]]:
    return {"one by one": run_mixed(foreach=False), "foreach": run_mixed(foreach=True),
            "fused": run_mixed(fused=True)}


def test_optimizers_take_sharded_and_whole_parameters_together() -> None:
    for found in run_gloo(2, run_ways):
        for values in found.values():
            torch.testing.assert_close(values, found["one by one"])
