"""Which passes count in what moves once per step, and buffers that are changed in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer
from moe_plugin.observe.model_layers import listen_to
from moe_plugin.routing import counting, finish_step, pregate
from moe_plugin.routing.contract import RouterSteps
from moe_plugin.training.cmcl import EnsembleHeads
from moe_plugin.utils.run_feature import StepFacts
from tests.exactness.recomputed import ROUTERS, blocks_of, forward, inputs

COUNTING: dict[str, dict[str, Any]] = {
    name: {"router": {"name": name}, "losses": {"global_batch": 0.1, "z": 0.1}}
    for name in ("sigmoid_bias", "softmax_bias", "quantile", "topk")}
TOKENS = 11


def layer_of(settings: dict[str, Any], **more: Any) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(from_dict({"model_dim": 6, "num_experts": 4, "experts": {"hidden_dim": 5},
                               **settings, **more}))


def counted(layer: MoELayer) -> dict[str, Tensor]:
    router = layer.router
    return {name: getattr(router, name).clone() for name in router._non_persistent_buffers_set
            if getattr(router, name) is not None}


def reentrant(call: Any, x: Tensor) -> Tensor:
    return checkpoint(call, x, use_reentrant=True)


def plain(call: Any, x: Tensor) -> Tensor:
    return checkpoint(call, x, use_reentrant=False)


@contextmanager
def evaluation(layer: MoELayer) -> Iterator[None]:
    layer.eval()
    yield
    layer.train()


WITHOUT = {
    "no_grad": lambda layer: torch.no_grad(), "inference": lambda layer: torch.inference_mode(),
    "eval": evaluation,
}
ONCE = {
    "": lambda call, x: call(x), "reentrant": reentrant, "plain": plain,
    "reentrant in reentrant": lambda call, x: reentrant(partial(reentrant, call), x),
    "plain in reentrant": lambda call, x: reentrant(partial(plain, call), x),
    "reentrant in plain": lambda call, x: plain(partial(reentrant, call), x),
}


@pytest.mark.fast
@pytest.mark.parametrize("way", ONCE)
@pytest.mark.parametrize("name", COUNTING)
def test_passes_that_train_count_once_and_others_do_not(name: str, way: str) -> None:
    layer, x = layer_of(COUNTING[name]), torch.randn(TOKENS, 6).requires_grad_()
    taken: list[Any] = []
    listen_to(nn.Sequential(layer), lambda name, stats: taken.append(stats))

    def call(x: Tensor) -> Tensor:
        out = layer(x)
        return out.output.sum() + sum(out.losses.values())

    nothing = counted(layer)
    for without in WITHOUT.values():
        with without(layer):
            ONCE[way](call, x)
    for key, value in counted(layer).items():
        assert torch.equal(value, nothing[key]), key
    assert not taken
    for passes in (1, 2):
        ONCE[way](call, x).backward()
        now = counted(layer)
        assert now["step_load_E"].tolist()[-1] == passes * TOKENS == len(taken) * TOKENS
        assert now["step_load_E"][:-1].sum() == 2 * passes * TOKENS
        if "load_E" in now:
            assert torch.equal(now["load_E"], now["step_load_E"][:-1])
        if "passes_E" in now:
            assert now["passes_E"][-1] == passes
    with torch.no_grad():
        ONCE[way](call, x)
    for key, value in counted(layer).items():
        assert torch.equal(value, now[key]), key


@pytest.mark.fast
@pytest.mark.parametrize("name", COUNTING)
def test_a_step_that_is_not_made_moves_nothing_and_leaves_nothing(name: str) -> None:
    layer = layer_of(COUNTING[name])
    steps = RouterSteps([layer])
    nothing, saved = counted(layer), {k: v.clone() for k, v in layer.router.state_dict().items()}
    for facts in (StepFacts(1, skipped=True), StepFacts(1, made=False)):
        layer(torch.randn(TOKENS, 6)).output.sum().backward()
        steps.after_step(facts)
        for key, value in {**counted(layer), **layer.router.state_dict()}.items():
            assert torch.equal(value, {**nothing, **saved}[key]), key
    layer(torch.randn(TOKENS, 6)).output.sum().backward()
    steps.after_step(StepFacts(1))
    assert name == "topk" or not torch.equal(layer.router.bias_E, saved["bias_E"])


@pytest.mark.parametrize("name", COUNTING)
def test_a_compiled_layer_counts_in_its_graph(name: str) -> None:
    """One graph, with counts and gradients as without the compiler; passes without gradients do
    not count.
    """
    torch._dynamo.reset()
    dispatch = {"name": "padded", "capacity_factor": 1.25, "equal_tokens": True}
    layer, twin = (layer_of(COUNTING[name], dispatch=dispatch) for _ in range(2))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for passes in (1, 2, 1, 2):
        x = torch.randn(TOKENS, 6)
        with torch.no_grad():
            compiled(x)
        for call in (compiled, twin):
            out = call(x)
            (out.output.square().sum() + sum(out.losses.values())).backward()
        assert layer.router.step_load_E[-1] == passes * TOKENS
        for key, value in counted(twin).items():
            torch.testing.assert_close(counted(layer)[key], value, msg=key)
        if passes == 2:
            for model in (layer, twin):
                finish_step(model)
    for key, value in twin.named_parameters():
        torch.testing.assert_close(layer.get_parameter(key).grad, value.grad, msg=key)
    assert name == "topk" or twin.router.bias_E.any()


def tensors_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in named}


def linked() -> nn.Module:
    model = nn.ModuleList([layer_of({"router": {"name": "sigmoid_bias", "pre_gate": 1}})
                           for _ in range(2)])
    assert pregate.link(model) == 1
    return model


OTHERS: dict[str, Any] = {
    "pre-gate": linked,
    "latent": lambda: layer_of({"experts": {"latent_dim": 4, "hidden_dim": 5}}),
    "shared": lambda: layer_of({"experts": {"shared_hidden_dim": 4, "hidden_dim": 5}}),
    "heads": lambda: EnsembleHeads(6, 3, 2),
}


def run(model: Any, x: Tensor) -> Tensor:
    if isinstance(model, EnsembleHeads):
        return model(x).square().mean()
    if isinstance(model, MoELayer):
        return model(x).output.square().mean()
    for layer in model:
        x = layer(x).output
    return x.square().mean()


def check_storage(model: nn.Module, loss_of: Any) -> None:
    """Two steps, the second after an evaluation: tensors stay the same ones, so that a state dict
    that was taken before has the values of one that is taken now.
    """
    before, state = tensors_of(model), model.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for _ in range(2):
            loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()
        finish_step(model) if any(hasattr(m, "finish_step") for m in model.modules()) else None
        model.eval()
        with torch.no_grad():
            loss_of()
        model.train()
    assert tensors_of(model) == before
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(value, state[name]), name


@pytest.mark.fast
@pytest.mark.parametrize("name", ROUTERS)
def test_tensors_of_routers_keep_their_storage(name: str) -> None:
    blocks = blocks_of(ROUTERS[name])
    check_storage(blocks, lambda: forward(blocks, None, inputs(9)[0]))


@pytest.mark.fast
@pytest.mark.parametrize("name", OTHERS)
def test_tensors_of_other_modules_keep_their_storage(name: str) -> None:
    model = OTHERS[name]()
    check_storage(model, lambda: run(model, torch.randn(9, 6)))


@pytest.mark.fast
@pytest.mark.parametrize("name", ["sigmoid_bias", "quantile", "dense_to_sparse", "global batch"])
def test_a_graph_outlives_the_step(name: str) -> None:
    """Nothing that backward reads has changed, also if `finish_step` runs in inference mode."""
    blocks, [x] = blocks_of(ROUTERS[name]), inputs(9)
    losses = [forward(blocks, None, x) for _ in range(2)]
    want = [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses]
    with torch.inference_mode():
        finish_step(blocks)
    forward(blocks, None, x).backward()
    for loss, gradient in zip(losses, want, strict=True):
        assert torch.equal(torch.autograd.grad(loss, x)[0], gradient)


@pytest.mark.fast
@pytest.mark.parametrize("router", [
    {"name": "topk", "top_k": 2, "top_k_at": {3: 1}},
    {"name": "gshard,topk", "selection": {"rule": "cycle", "every": 1}}])
def test_a_step_that_is_written_in_place_is_followed(router: dict[str, Any]) -> None:
    """As an average of weights does, and a checkpoint that is read in place."""
    layer = layer_of({"router": router})
    average = AveragedModel(layer)
    for _ in range(3):
        layer(torch.randn(TOKENS, 6)).output.sum().backward()
        finish_step(layer)
        average.update_parameters(layer)
    x_TD = torch.randn(TOKENS, 6)
    for _ in range(2):
        stats, wanted = (model(x_TD).stats for model in (average, layer))
        assert stats.router == wanted.router and stats.load_KE.shape == wanted.load_KE.shape
        for model in (average, layer):
            finish_step(model)
    steps = [next(b for n, b in m.named_buffers() if n.endswith(("router.step", "now")))
             for m in (average, layer)]
    assert torch.equal(*steps)


@pytest.mark.fast
@pytest.mark.parametrize("again", [False, True])
def test_counts_have_their_own_memory(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of torch must not return its arguments, also where a pass is repeated."""
    monkeypatch.setattr(counting, "inside_backward", lambda: again)
    sums, added = torch.ones(3), torch.ones(3)
    found = counting._add_counts(sums, added, True, "")
    assert found.data_ptr() not in (sums.data_ptr(), added.data_ptr())
    assert torch.equal(found, sums if not again else added) and sums[0] == (1 if again else 2)
