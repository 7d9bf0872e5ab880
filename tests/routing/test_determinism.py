"""Routing recorded and replayed, bitwise repetition, and every router on a GPU as on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_plugin import MoELayer
from moe_plugin.config import from_dict
from moe_plugin.dispatch import dispatchers
from moe_plugin.records import TokenInfo
from moe_plugin.routing import finish_step, routers
from moe_plugin.routing.replay import record_routing, replay_routing
from moe_plugin.utils import determinism
from tests.routing.references import reference_of

LOSSES = {
    "gshard": 1.0, "switch": 1.0, "sequence": 1.0, "global_batch": 1.0, "ta_moe": 1.0,
    "sam_alignment": 1.0, "importance": 1.0, "z": 1.0
}


def make(name: str, tree: dict | None = None, **where) -> MoELayer:
    torch.manual_seed(5)
    router = {"name": name, **reference_of(name).settings}
    config = {
        "model_dim": 8, "num_experts": 4, "losses": LOSSES, "router": router,
        "experts": {"hidden_dim": 16}, **(tree or {})
    }
    return MoELayer(from_dict(config), **where)


def info(device: str = "cpu") -> TokenInfo:
    return TokenInfo(torch.arange(24, device=device) % 11, torch.arange(24, device=device) // 8, 3)


def step(layer: MoELayer, x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Everything a step gives, router state after it included."""
    layer.zero_grad()
    out = layer(x, mask, info=info(x.device.type))
    (out.output.square().sum() + sum(out.losses.values())).backward()
    finish_step(layer)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
    return [
        out.output.detach(), out.stats.load_KE, *(v.detach() for v in out.losses.values()), *grads,
        *layer.router.buffers()
    ]


@pytest.mark.parametrize("name", routers.names())
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    x, mask = torch.randn(24, 8), torch.arange(24) < 20
    runs = []
    for _ in range(2):
        layer = make(name)
        torch.manual_seed(7)
        runs.append(step(layer, x, mask))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", routers.names())
def test_recorded_routing_is_replayed_under_other_weights(name: str, tmp_path) -> None:
    layer, x = make(name), torch.randn(24, 8)
    with record_routing() as tape:
        first = [layer(x, info=info()).stats.load_KE for _ in range(2)]
    torch.save((tape.ids, tape.calls), tmp_path / "routing.pt")
    tape.ids, tape.calls = torch.load(tmp_path / "routing.pt")
    with torch.no_grad():
        for parameter in layer.router.parameters():
            parameter += torch.randn_like(parameter)
    with replay_routing(tape):
        again = [layer(x, info=info()).stats.load_KE for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def two_layers(name: str) -> tuple[MoELayer, MoELayer]:
    tree = {"losses": {}}
    return make(name, tree), make(name, tree)


NOT_ITS_RECORDING = (r"Call {} of the replay does not match the recording: the replay requests {}, "
                     r"but the recording has {}. Record and replay .*same mode")


@pytest.mark.parametrize("name,first,asked,recorded", [
    ("gshard", 2, "the choice of module 2", "the kept second choice of module 1"),
    ("noisy_topk", 1, "the choice of module 1", "the noise of module 1"),
    ("dense_to_sparse", 1, "the choice of module 1", "the noise of module 1"),
])
def test_a_recording_of_another_mode_is_refused(name: str, first: int, asked: str,
                                                recorded: str) -> None:
    """Values would move to the next call: a layer would get the experts of the one before."""
    layers, x = two_layers(name), torch.randn(24, 8)
    with record_routing() as tape:
        for layer in layers:
            layer(x, info=info())
    with (pytest.raises(ValueError, match=NOT_ITS_RECORDING.format(first, asked, recorded)),
          replay_routing(tape)):
        for layer in layers:
            layer.eval()(x, info=info())


@pytest.mark.parametrize("calls,tokens,message", [
    (3, 24, NOT_ITS_RECORDING.format(3, "the choice of module 1", "nothing more")),
    (1, 24, NOT_ITS_RECORDING.format(2, "nothing more", "the choice of module 1")),
    (2, 23, NOT_ITS_RECORDING.format(1, r"the choice of module 1 of shape \(23, 2\)",
                                     r"shape \(24, 2\)")),
])
def test_more_or_fewer_calls_than_recorded_and_other_shapes_are_refused(
        calls: int, tokens: int, message: str) -> None:
    layer, x = make("topk", {"losses": {}}), torch.randn(24, 8)
    with record_routing() as tape:
        layer(x), layer(x)
    with pytest.raises(ValueError, match=message), replay_routing(tape):
        for _ in range(calls):
            layer(x[:tokens])
    tape.calls = []
    with (pytest.raises(ValueError, match="2 values but 0 entries.*tape.ids and tape.calls"),
          replay_routing(tape)):
        layer(x)


def test_replayed_choices_count_for_the_biases() -> None:
    layer, x = make("sigmoid_bias", {"losses": {}}), torch.randn(24, 8)
    with record_routing() as tape:
        load_KE = layer.eval()(x).stats.load_KE
    assert not layer.router.load_E.any()
    with replay_routing(tape):
        layer.train()(x)
    assert torch.equal(layer.router.load_E, load_KE.sum(0)) and load_KE.sum() > 0
    finish_step(layer)
    assert layer.router.bias_E.any()


@pytest.fixture
def strict() -> Iterator[None]:
    determinism.enable()
    yield
    torch.use_deterministic_algorithms(False)


class Operators(TorchDispatchMode):
    """Names of the operators that run inside, forward and backward, with the dtype of their first
    tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, bool]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        self.seen.add((func.overloadpacket.__name__, first is not None
                       and first.is_floating_point()))
        return func(*args, **(kwargs or {}))


# torch's list of operators that raise on a GPU under torch.use_deterministic_algorithms(True), as
# far as a layer could meet them
NEVER = {
    "histc", "kthvalue", "put_", "median", "nanmedian", "cumprod", "scatter_reduce",
    "scatter_reduce_", "resize_", "grid_sampler_2d_backward", "_embedding_bag_dense_backward",
    "nll_loss2d_forward"
}
NEVER_FLOAT = {"cumsum", "cumsum_"}
CELLS = [("ragged", None), ("padded", 1.0), ("padded", 0.0)]


@pytest.mark.parametrize("dispatch,factor", CELLS)
@pytest.mark.parametrize("name", routers.names())
def test_deterministic_mode_repeats_bits_and_meets_no_operator_that_a_gpu_refuses(
        name: str, dispatch: str, factor: float | None, strict: None) -> None:
    """Strict mode also fills fresh memory with NaN: what is read before it is written shows."""
    x, mask, runs = torch.randn(24, 8), torch.arange(24) < 20, []
    tree = {"deterministic": True, "dispatch": {"name": dispatch, "capacity_factor": factor}}
    for _ in range(2):
        layer = make(name, tree)
        torch.manual_seed(7)
        with Operators() as operators:
            runs.append(step(layer, x, mask))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)) and all(t.isfinite().all()
                                                                              for t in runs[0])
    names = {op for op, _ in operators.seen}
    assert len(names) > 30  # it did look
    assert not names & NEVER and not {op
                                      for op, floating in operators.seen if floating} & NEVER_FLOAT


def test_every_dispatcher_and_expert_kernel_runs_in_strict_mode(strict: None) -> None:
    from moe_plugin.kernels.expert_ffn import strategies

    plain = [
        d for d in dispatchers.names() if not dispatchers.get(d).traits.shares_tokens
    ]
    assert plain and strategies.names()
    x, mask = torch.randn(24, 8), torch.arange(24) < 20
    for dispatch in plain:
        factor = 0.0 if dispatch in ("padded", "parm_s2") else None
        for compute in (entry.name for entry in strategies if entry.why_not() is None):
            runs = []
            for _ in range(2):
                layer = make(
                    "topk", {
                        "deterministic": True, "dispatch": {
                            "name": dispatch, "capacity_factor": factor
                        }, "experts": {"hidden_dim": 16, "compute": compute}
                    })
                runs.append(step(layer, x, mask))
            assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), (dispatch, compute)


def test_deterministic_mode_is_refused_where_it_would_not_hold() -> None:
    with pytest.raises(
            ValueError,
            match="deterministic=True requires torch.use_deter.*determinism.enable"):
        make("topk", {"deterministic": True})
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(ValueError, match="without warn_only"):
            make("topk", {"deterministic": True})
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(
            ValueError,
            match="parallel.mode='auto' is out of bounds: must be fixed where deterministic=True"):
        from_dict({"deterministic": True, "parallel": "auto"})


def test_kernels_are_not_chosen_by_a_clock() -> None:
    """Tiles decide the order of sums: the tuner, which times them, has no part in the products."""
    triton = pytest.importorskip("triton")
    from moe_plugin.kernels.gpu import grouped_gemm, weight_grads

    kernels = [value for module in (grouped_gemm, weight_grads)
               for name, value in vars(module).items() if name.endswith("_kernel")]
    assert len(kernels) >= 5
    assert not any(isinstance(kernel, triton.runtime.Autotuner) for kernel in kernels)


@pytest.mark.skipif(not torch.cuda.is_available(),
                    reason="needs a GPU: compares routing there with the CPU's")
@pytest.mark.parametrize("name", routers.names())
def test_on_a_gpu_as_on_the_cpu_and_bitwise_repeatable(name: str) -> None:
    on_cpu, on_gpu = make(name, dtype=torch.float64), make(name, dtype=torch.float64, device="cuda")
    on_gpu.load_state_dict(on_cpu.state_dict())
    x, mask = torch.randn(24, 8, dtype=torch.float64), torch.arange(24) < 20
    if not reference_of(name).modes[0]:  # chance decides in training
        on_cpu.eval(), on_gpu.eval()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        state, runs = copy.deepcopy(on_gpu.state_dict()), []
        for _ in range(2):
            on_gpu.load_state_dict(copy.deepcopy(state))
            torch.manual_seed(1)
            runs.append(step(on_gpu, x.cuda(), mask.cuda()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    for got, want in zip(runs[0], step(on_cpu, x, mask), strict=True):
        torch.testing.assert_close(got.cpu(), want)
