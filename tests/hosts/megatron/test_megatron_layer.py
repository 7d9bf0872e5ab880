"""Our layer in Megatron's place: the same numbers, the same losses, clear refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.hosts.megatron import parameters
from moe_plugin.hosts.megatron.losses import trace_key
from moe_plugin.hosts.megatron.state import _as_native, _as_ours, _transposed
from tests.experts.exchange_events import logged
from tests.hosts.megatron.layers import (
    Case,
    build,
    compare,
    initialise_parallel,
    needs_padding_mask,
    run,
)
from tests.hosts.megatron.ranks import on_ranks

AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
BOTH = {**AUX, "moe_z_loss_coeff": 0.01}
WEIGHTS_FIRST = {
    "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True
}
ONE = {
    "top-2": Case(native=BOTH),
    "gated": Case(gated=True, native=BOTH),
    "top-1": Case(native={**AUX, "moe_router_topk": 1, "moe_router_pre_softmax": True}),
    "top-1, weights first": Case(native={**AUX, **WEIGHTS_FIRST}),
    "top-3 pre-softmax": Case(native={**AUX, "moe_router_topk": 3, "moe_router_pre_softmax": True}),
    "sigmoid, scaled": Case(native={
        **AUX, "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5}),
    "by token": Case(native={**BOTH, "calculate_per_token_loss": True}),
    "groups (native router)": Case(native={
        **AUX, "moe_router_num_groups": 2, "moe_router_group_topk": 1}),
    "expert bias (native router)": Case(native={
        "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}),
    "capacity by probability (native router)": Case(native={
        **AUX, "moe_expert_capacity_factor": 0.5}),
    "capacity by position, padded (native router)": Case(native={
        **AUX, "moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position",
        "moe_pad_expert_input_to_capacity": True}),
    "fp64 routing (native router)": Case(native={**BOTH, "moe_router_dtype": "fp64"}),
}
SEVERAL = {
    "EP2": (2, Case(ep=2, native=BOTH)),
    "EP2, gated, by token": (2, Case(
        ep=2, gated=True, native={**BOTH, "calculate_per_token_loss": True})),
    "EP2, biases (native router)": (2, Case(ep=2, native={**AUX, "add_bias_linear": True})),
    "EP2, gated, weights first": (2, Case(ep=2, gated=True, native={**AUX, **WEIGHTS_FIRST})),
    "EP2, padding": (2, Case(ep=2, padding=True, native=BOTH)),
    "EP2, sequence loss (native router)": (2, Case(
        ep=2, native={**AUX, "moe_router_load_balancing_type": "seq_aux_loss"})),
    "EP2, global loss (native router)": (2, Case(
        ep=2, native={**AUX, "moe_router_load_balancing_type": "global_aux_loss"})),
    "EP2, sinkhorn (native router)": (2, Case(
        ep=2, native={"moe_router_load_balancing_type": "sinkhorn"})),
    "TP2": (2, Case(tp=2, sequence_parallel=True, native=AUX)),
    "TP2, padding": (2, Case(tp=2, sequence_parallel=True, padding=True, native=AUX)),
    "TP2 ETP2, gated": (2, Case(tp=2, etp=2, sequence_parallel=True, gated=True, native=AUX)),
    "ETP2 without TP": (2, Case(etp=2, native=AUX)),
    "ETP2, one expert cut": (2, Case(etp=2, native={
        "num_moe_experts": 1, "moe_router_topk": 1, "moe_router_pre_softmax": True})),
    "EP2 TP2": (4, Case(tp=2, ep=2, sequence_parallel=True, native=AUX)),
    "EP2 TP2 ETP2": (4, Case(tp=2, ep=2, etp=2, sequence_parallel=True, native=AUX)),
    "EP2 ETP2, experts cut": (4, Case(
        ep=2, etp=2, gated=True, native={**AUX, "num_moe_experts": 2})),
}


def _assert_close(results: list[dict[str, float]], limit: float = 5e-6) -> None:
    worst = {name: max(result[name] for result in results) for name in results[0]}
    assert len(worst) >= 5 and max(worst.values()) < limit, worst


@pytest.mark.parametrize("case", ONE.values(), ids=ONE.keys())
def test_equals_native_on_one_rank(case: Case) -> None:
    _assert_close(on_ranks(1, compare, case))


@pytest.mark.parametrize(("world", "case"), SEVERAL.values(), ids=SEVERAL.keys())
def test_equals_native_on_several_ranks(world: int, case: Case) -> None:
    needs_padding_mask(case)
    _assert_close(on_ranks(world, compare, case))


def test_equals_native_in_bf16() -> None:
    _assert_close(on_ranks(2, compare, Case(ep=2, dtype=torch.bfloat16, native=BOTH)), 2e-2)


def _with_float32_router(case: Case) -> tuple[list[torch.dtype], dict[str, float], torch.Tensor]:
    """Dtypes of router and experts in Megatron's 16-bit module and of the router's gradient and
    buffer in its DDP; differences from a layer in float32; how far an optimizer step moves.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    initialise_parallel(case)
    lower = replace(case, dtype=torch.bfloat16)
    layers = [build(c, True, {"router.fp32": True}) for c in (case, lower)]
    module = Float16Module(lower.config(), layers[1]).module
    weight_ED = module.router.weight_ED
    ranks = [run(layer, c) for layer, c in zip(layers, (case, lower), strict=True)]
    differences = {
        name: float((ranks[0][name] - ranks[1][name]).abs().max() / ranks[0][name].abs().max())
        for name in ("output", "router gradient")
    }
    dtypes = [weight_ED.dtype, module.experts.w_in_LDF.dtype, weight_ED.grad.dtype]
    weight_ED.grad = None
    wrapped = DistributedDataParallel(
        config=lower.config(), ddp_config=DistributedDataParallelConfig(), module=module)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=1e-4, bf16=True,
                                                       weight_decay=0.0, sgd_momentum=0.0,
                                                       clip_grad=0.0), [wrapped])
    with torch.no_grad():
        weight_ED.fill_(1.0)
        optimizer.reload_model_params()
    weight_ED.main_grad.fill_(1.0)
    dtypes.append(weight_ED.main_grad.dtype)
    optimizer.step()
    return dtypes, differences, weight_ED.detach()


def test_router_weights_stay_in_float32() -> None:
    for dtypes, differences, moved in on_ranks(2, _with_float32_router, Case(ep=2, native=BOTH)):
        assert dtypes == [torch.float32, torch.bfloat16, torch.float32, torch.float32]
        assert differences["output"] < 2e-2 and differences["router gradient"] < 2e-2, differences
        # in bf16 a weight of 1 would not move
        torch.testing.assert_close(moved, torch.full_like(moved, 0.9999), rtol=0, atol=1e-6)


def _with_and_without_sequence_parallel(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    initialise_parallel(case)
    return run(build(case, True), case), run(build(replace(case, sequence_parallel=True), True),
                                             replace(case, sequence_parallel=True))


@pytest.mark.parametrize("etp", [1, 2])
def test_tensor_parallel_without_sequence_parallel(etp: int) -> None:
    """Megatron's layer refuses to train so; ours gives what it gives under sequence parallelism."""
    results = on_ranks(2, _with_and_without_sequence_parallel, Case(tp=2, etp=etp, native=BOTH))
    for name in ("output", "input gradient"):
        together = torch.cat([split[name] for _, split in results])
        torch.testing.assert_close(results[0][0][name], together, rtol=1e-5, atol=1e-6)
    for name in ("router gradient", "w_in gradient", "w_out gradient", "logged z_loss",
                 "logged load_balancing_loss"):
        torch.testing.assert_close(results[0][0][name], results[0][1][name], rtol=1e-5, atol=1e-6)


def _recomputed(case: Case, module: str) -> list[dict[str, Any]]:
    initialise_parallel(case)
    again = replace(
        case,
        native={**case.native, "recompute_granularity": "selective", "recompute_modules": [module],
                "moe_grouped_gemm": module == "moe_act"})
    layers = [build(case, True), build(again, True)]
    seen: list[Any] = []
    layers[1].observer = seen.append
    assert layers[1].moe.config.experts.recompute_activation == (module == "moe_act")
    results = [run(layer, c) for layer, c in zip(layers, (case, again), strict=True)]
    assert len(seen) == 1, "statistics are taken once, not in both passes"
    return results


@pytest.mark.parametrize(("native", "module"), [
    (BOTH, "moe"), ({**AUX, "moe_router_load_balancing_type": "seq_aux_loss"}, "moe"),
    (BOTH, "moe_act")], ids=["own router", "native router", "activation"])
def test_recompute_changes_nothing(native: dict[str, Any], module: str) -> None:
    [(plain, again)] = on_ranks(1, _recomputed, Case(native=native, gated=module == "moe_act"),
                                module)
    for name, value in plain.items():
        if value is not None:
            torch.testing.assert_close(again[name], value, rtol=0, atol=0)


def _recomputed_by_transformer_engine(case: Case) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Calls of its function, which is torch's here; results without and with a recipe."""
    from megatron.core import tensor_parallel
    from megatron.core.extensions import transformer_engine

    calls: list[Any] = []

    def recomputed(function: Any, spread: bool, tracker: Any, group: Any, *inputs: Any) -> Any:
        calls.append(group)
        return tensor_parallel.checkpoint(function, spread, *inputs)

    transformer_engine.te_checkpoint = recomputed
    initialise_parallel(case)
    layers = [build(case, True), build(case, True)]
    layers[1].shared_experts.load_state_dict(layers[0].shared_experts.state_dict())
    layers[1].config.fp8 = "e4m3"  # set afterwards: our experts stay as they are
    plain, again = (run(layer, case) for layer in layers)
    return len(calls), plain, again


def test_under_a_recipe_transformer_engine_recomputes_the_layer() -> None:
    """Its modules in the shared expert have a state that is kept so."""
    [(calls, plain, again)] = on_ranks(1, _recomputed_by_transformer_engine, Case(native={
        **BOTH, "moe_shared_expert_intermediate_size": 16, "recompute_granularity": "selective",
        "recompute_modules": ["moe"]}))
    assert calls == 1
    for name, value in plain.items():
        if value is not None:
            torch.testing.assert_close(again[name], value, rtol=0, atol=0)


def _shared_recomputed(module: str) -> tuple[dict[str, Any], int]:
    case = Case(native={"moe_shared_expert_intermediate_size": 16, "recompute_granularity":
                        "selective", "recompute_modules": [module]})
    initialise_parallel(case)
    layer = build(case, True)
    calls: list[int] = []
    with torch.no_grad():
        drawn = torch.Generator().manual_seed(5)
        for parameter in layer.shared_experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.3)
    layer.shared_experts.register_forward_hook(lambda *_: calls.append(1))
    found = run(layer, case)
    return {**found, **{name: parameter.grad for name, parameter
                        in layer.shared_experts.named_parameters()}}, len(calls)


def _both_shared() -> list[tuple[dict[str, Any], int]]:
    return [_shared_recomputed("core_attn"), _shared_recomputed("shared_experts")]


def test_a_shared_expert_is_recomputed_where_megatron_says_so() -> None:
    [((plain, once), (again, twice))] = on_ranks(1, _both_shared)
    assert (once, twice) == (1, 2)
    for name, value in plain.items():
        if value is not None:
            torch.testing.assert_close(again[name], value, rtol=0, atol=0)


def _marks(case: Case) -> list[tuple[bool, bool, int]]:
    initialise_parallel(case)
    layer = build(case, True)
    return [(p.allreduce, p.tensor_model_parallel, p.partition_stride)
            for p in layer.experts.parameters()]


def test_expert_parameters_are_marked() -> None:
    [marks] = on_ranks(1, _marks, Case())
    assert marks == [(False, True, 1)] * 2


def _names(case: Case) -> tuple[list[str], list[str], bool]:
    """(names of parameters, keys of the state dict, whether a copy loaded it and follows eval())"""
    initialise_parallel(case)
    layer, copy = build(case, True), build(case, True)
    copy.load_state_dict(layer.state_dict())
    pairs = zip(layer.parameters(), copy.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    return ([name for name, _ in layer.named_parameters()], list(layer.state_dict()),
            same and not copy.eval().moe.training)


@pytest.mark.parametrize(("native", "router"), [(AUX, "weight_ED"), (
    {**AUX, "moe_router_load_balancing_type": "seq_aux_loss"}, "weight")],
                         ids=["own router", "native router"])
def test_parameters_have_megatrons_names(native: dict[str, Any], router: str) -> None:
    [(names, keys, loaded)] = on_ranks(1, _names, Case(native=native))
    assert names == keys == [f"router.{router}", "experts.w_in_LDF", "experts.w_out_LFD"] and loaded


def _error(native: dict[str, Any], settings: dict[str, Any]) -> str:
    from moe_plugin.hosts.megatron.layer import PluginMoELayer

    initialise_parallel(Case())
    config = Case().config()
    # set afterwards: Megatron refuses some of these on CPU for reasons of its own
    for name, value in native.items():
        setattr(config, name, value)
    try:
        PluginMoELayer(config, settings=settings)
    except ValueError as error:
        return str(error)
    return ""


REFUSED = {
    "wgrad": ({"overlap_dispatch_backward_with_experts_wgrad": True}, {},
              ("overlap_dispatch_backward_with_experts_wgrad=True", "set it to False")),
    "clamp": ({"activation_func_clamp_value": 7.0}, {},
              ("activation_func_clamp_value=7.0", "unset")),
    "balance": ({"moe_router_load_balancing_type": ["aux_loss", "seqaux"]}, {},
                ("moe_router_load_balancing_type='seqaux'", "seq_aux_loss")),
    "sharded expert weights": ({"expert_gtp_weight_remat_size": 2}, {},
                               ("expert_gtp_weight_remat_size=2", "num-weight-shards")),
    "graphs": ({"cuda_graph_impl": "local", "cuda_graph_scope": ["moe"]}, {}, ("['moe']", "attn")),
    "offloaded experts": (
        {"fine_grained_activation_offloading": True,
         "offload_modules": ["core_attn", "fused_group_mlp"]}, {},
        ("offload_modules contains ['fused_group_mlp']", "Remove these modules")),
    "newer graphs": ({"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe"]}, {},
                     ("['attn', 'moe']", "'attn', or")),
    "activation": ({"activation_func": torch.tanh}, {}, ("activation_func=", "gelu, silu")),
    "virtual stages over two ranks": (
        {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, {},
        ("virtual_pipeline_model_parallel_size=2", "overlap_p2p_comm=True",
         "--no-overlap-p2p-communication")),
    "contradiction": ({}, {"router.top_k": 3}, ("router.top_k=3", "2", "--moe-router-topk")),
    "no losses but one": (AUX, {"losses": {}}, ("losses=none", "0.1", "moe_aux_loss_coeff")),
    "two aux losses": (AUX, {"losses": {"switch": 0.5}},
                       ("losses.switch=0.5", "0.1", "one of the two")),
    "capacity twice": (
        {"moe_expert_capacity_factor": 1.0}, {"dispatch.capacity_factor": 1.0},
        ("dispatch.capacity_factor=1.0", "moe_expert_capacity_factor=1.0")),
    "our router option": (
        {"moe_router_num_groups": 2, "moe_router_group_topk": 1}, {"router.noise": 1.0},
        ("router.noise=1.0", "moe_router_num_groups=2")),
    "initial values": ({}, {"experts.init_std": 0.5},
                       ("experts.init_std=0.5", "--init-method-std")),
    "unknown dispatcher": ({}, {"dispatch.name": "carrier_pigeon"}, ("carrier_pigeon", "ragged")),
    "streamed weights": ({}, {"offload.weights": "host"},
                         ("offload.weights=host", "Megatron", "--weights-on device")),
}


@pytest.mark.parametrize(("native", "settings", "parts"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals_name_value_and_remedy(native: dict[str, Any], settings: dict[str, Any],
                                        parts: tuple[str, ...]) -> None:
    [message] = on_ranks(1, _error, native, settings)
    assert all(part in message for part in parts), message


def test_graphs_of_attention_are_no_matter_of_the_layer() -> None:
    """By the setting's old name, and the one from 0.18 on, which empties the old one."""
    for chosen in ({"cuda_graph_scope": ["attn"]},
                   {"cuda_graph_scope": None, "cuda_graph_modules": ["attn"]}):
        assert on_ranks(1, _error, {"cuda_graph_impl": "local", **chosen}, {}) == [""]


def _own_settings() -> tuple[str, dict[str, float], int]:
    initialise_parallel(Case())
    layer = build(
        Case(), True,
        {"dispatch.name": "padded", "dispatch.capacity_factor": 0.5, "losses": {"gshard": 0.02}})
    results = run(layer, Case())
    return layer.moe.config.dispatch.name, {
        k: float(v.sum()) for k, v in results.items() if k.startswith("logged")
    }, layer.last_stats.capacity


def test_our_own_settings_reach_the_layer() -> None:
    [(name, logged, capacity)] = on_ranks(1, _own_settings)
    assert name == "padded" and capacity == 2 * int(0.5 * 6) and logged["logged gshard_loss"] >= 0.9


def _shared(case: Case, overlap: bool, gate: bool = False) -> tuple[float, list[str]]:
    """(largest difference from Megatron's layer, order of events in ours)"""
    case = replace(case, native={**case.native, "moe_shared_expert_intermediate_size": 8,
                                 **({"moe_shared_expert_gate": True} if gate else {})})
    overlapped = replace(case, native={**case.native, "moe_shared_expert_overlap": overlap})
    initialise_parallel(case)
    settings = {"parallel.mode": "fixed"}  # with exchanges that work can overlap
    layers, log = [build(case, False), build(overlapped, True, settings)], []
    layers[1].shared_experts.load_state_dict(layers[0].shared_experts.state_dict())
    native = run(layers[0], case)
    with logged(log, shared=layers[1].shared_experts):
        ours = run(layers[1], overlapped)
    grads = [[p.grad for p in layer.shared_experts.parameters()] for layer in layers]
    assert len(grads[0]) == 2 + gate and all(float(g.abs().max()) > 0 for g in grads[0])
    pairs = [(native[n], ours[n]) for n in ("output", "input gradient", "router gradient",
                                            "w_in gradient")]
    return max(float((a - b).abs().max())
               for a, b in [*pairs, *zip(*grads, strict=True)]), log


@pytest.mark.parametrize("gate", [False, True])
def test_megatrons_shared_expert_is_used(gate: bool) -> None:
    [(difference, _)] = on_ranks(1, _shared, Case(), False, gate)
    assert difference < 1e-5


@pytest.mark.parametrize("case", [Case(ep=2), Case(tp=2, etp=2, sequence_parallel=True)],
                         ids=["EP2", "TP2 ETP2"])
@pytest.mark.parametrize("gate", [False, True])
def test_shared_expert_runs_while_rows_travel(case: Case, gate: bool) -> None:
    for difference, log in on_ranks(2, _shared, case, True, gate):
        assert difference < 1e-5
        assert log == ["started", "shared", "waited"] * 2  # forward, backward


@pytest.mark.parametrize(("settings", "said"), [
    ({"comm.alltoall": "leader"}, "unknown key 'comm.alltoall'; did you mean comm.all_to_all?"),
    ({"router.top_k": "2"}, "router.top_k='2' is a str; must be int"),
    ({"dispatch.capacity_factor": 1e9}, "dispatch.capacity_factor=1000000000.0 is out of bounds")])
def test_settings_that_are_none_are_refused_when_they_are_given(settings: dict[str, object],
                                                                said: str) -> None:
    """Not when a layer is built; what Megatron's own settings decide is compared there."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from moe_plugin.hosts.megatron.spec import script_spec, swap_moe

    for call in (lambda given: swap_moe(get_gpt_layer_local_spec(num_experts=8), given),
                 script_spec):
        with pytest.raises(ValueError, match=re.escape(said)):
            call(settings)
        call({"router.top_k": 64, "comm.all_to_all": "leader", "guard.aggregate": "median"})


def test_swap_moe_needs_an_moe_layer() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from moe_plugin.hosts.megatron.spec import swap_moe

    with pytest.raises(ValueError, match="No MoE layer found"):
        swap_moe(get_gpt_layer_local_spec())


def _stored(case: Case, store: str, folder: Path) -> None:
    from moe_plugin.hosts.megatron.layer import PluginMoELayer
    from moe_plugin.memory.experts.stored import StoredExperts

    initialise_parallel(case)
    resident, path = build(case, True), folder / "experts.safetensors"
    x = torch.randn(5, 2, resident.config.hidden_size)
    save_file({f"decoder.layers.0.mlp.experts.{name}": value for name, value
               in resident.experts.state_dict().items()}, path)

    def stored(path: Path) -> PluginMoELayer:
        return PluginMoELayer(case.config(), layer_number=1, settings={
            "experts.store": store, "experts.cache": "8KiB",
            **({"experts.store_path": str(path)} if store == "disk" else {})})

    layer = stored(path)
    assert isinstance(layer.experts, StoredExperts)
    state = resident.state_dict()
    if store == "disk":  # the file has them
        state = {name: value for name, value in state.items() if ".w_" not in name}
    layer.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(layer.eval()(x)[0], resident(x)[0])
    with pytest.raises(ValueError, match=f"experts.store={store} cannot be used for training"):
        layer.train()(x)
    if store == "disk":
        with pytest.raises(ValueError, match="Use a .safetensors file"):
            stored(folder)


@pytest.mark.parametrize("store", ["host", "disk"])
def test_experts_outside_the_device_evaluate_alike(store: str, tmp_path: Path) -> None:
    on_ranks(1, _stored, Case(gated=True, training=False, native=AUX), store, tmp_path)


@pytest.mark.fast
@pytest.mark.parametrize("ranks", [2, 4])
def test_initial_weights_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    """Also those of experts that two ranks share, whose weights they split."""
    def drawn(local: int, rank: int, shards: int = 1) -> torch.Tensor:
        torch.manual_seed(7)
        experts = torch.nn.Module()
        experts.w_in_LDF = torch.nn.Parameter(torch.zeros(local, 3, 8 // shards))
        place = SimpleNamespace(local=local, first_expert=local * (rank // shards), shards=shards,
                                shard=rank % shards)
        parameters.initialise(experts, place, torch.nn.init.normal_, torch.nn.init.zeros_)
        return experts.w_in_LDF.detach()

    want = drawn(4, 0)
    assert len(want.unique()) == want.numel()
    assert torch.equal(torch.cat([drawn(4 // ranks, rank) for rank in range(ranks)]), want)
    assert torch.equal(torch.cat([drawn(4, rank, 2) for rank in range(2)], 2), want)


@pytest.mark.fast
def test_transposed_matrices_of_checkpoints_lie_in_their_own_order() -> None:
    value = torch.arange(6.0).view(2, 3)
    found = _transposed(value)
    assert torch.equal(found, value.t()) and found.is_contiguous()


@pytest.mark.fast
def test_parts_of_a_sequence_are_gathered_in_the_layers_own_group(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may have other groups than Megatron's global ones."""
    from moe_plugin.hosts.megatron import layer as layer_module

    own, used = SimpleNamespace(rank=lambda: 1), []
    for name, act in (("scatter_to", lambda x: x[3:]),
                      ("gather_from", lambda x: x.repeat(2, 1, 1))):
        monkeypatch.setattr(
            layer_module.mappings, f"{name}_sequence_parallel_region",
            lambda x, *, group=None, act=act, **_: (used.append(group), act(x))[1])
    layer = SimpleNamespace(groups=SimpleNamespace(tensor=own), _routed=lambda x, *_: x)
    x_SBD = torch.randn(5, 2, 4)
    output = layer_module.PluginMoELayer._run_split(layer, x_SBD, None, 2, None)
    assert output.shape == x_SBD.shape and used == [own, own]


@pytest.mark.fast
def test_traces_count_layers_from_zero() -> None:
    config = SimpleNamespace(num_layers=4)
    assert [trace_key(number, config, None) for number in (1, 4, 5)] == [
        ("decoder", None, 0), ("decoder", None, 3), ("mtp", 0, 0)]


@pytest.mark.fast
@pytest.mark.parametrize("theirs, ours, swap", [
    ("linear_fc1.weight", ("w_gate_LDF", "w_in_LDF"), True),
    ("linear_fc1.bias", ("b_gate_LF", "b_in_LF"), False),
    ("linear_fc2.weight", ("w_out_LFD",), True)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_of_experts_are_at_the_same_place_in_either_format(
        theirs: str, ours: tuple[str, ...], swap: bool, ranks: int) -> None:
    """Every rank's part of Megatron's tensor becomes a part of ours, and comes back from it."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def shard(key: str, first: int, rows: int) -> ShardedTensor:
        """Rows of Megatron's matrix [6, 3], or elements of its vector [6], of expert 1 of 4."""
        size = (2 if len(ours) == 2 else 1) * 6
        shape, rest = ((rows, 3), (3,)) if swap else ((rows,), ())
        return ShardedTensor(key, torch.zeros(1, *shape), torch.float32, (1, *shape),
                             (4, size, *rest), (1, first, *(0 for _ in rest)),
                             (4, size // rows, *(1 for _ in rest)), 0, 0)

    rows = 6 // ranks
    known = {f"mlp.experts.{name}" for name in ours}
    for half, name in enumerate(ours):
        for rank in range(ranks):
            first = half * 6 + rank * rows
            part = shard(f"mlp.experts.experts.{theirs}", first, rows)
            factory = _as_ours(part, "mlp.experts.", theirs, known)
            found = factory.build_fn(factory.key, part.data, 0, None)
            wide, at = (4, 3, 6) if swap else (4, 6), (1, 0, rank * rows) if swap else (
                1, rank * rows)
            assert (found.key, found.global_shape, found.global_offset) == (
                f"mlp.experts.{name}", wide, at)
            back = _as_native(found, name, part.key, part.global_shape)
            again = back.build_fn(back.key, found.data, 0, None)
            assert (again.key, again.global_shape, again.global_offset,
                    again.axis_fragmentations) == (
                part.key, part.global_shape, part.global_offset, part.axis_fragmentations)
