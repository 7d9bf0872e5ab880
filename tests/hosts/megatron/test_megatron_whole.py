"""Gradients of whole models, with the layouts that a layer alone does not see: those of one rank
with Megatron's own layers.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hosts.megatron.layers import Case, initialise_parallel
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.whole import Whole, steps, whole

pytestmark = pytest.mark.skipif(
    importlib.metadata.version("megatron-core") < "0.19",
    reason="compared with the layouts of megatron-core 0.19 and newer")
FREQUENCY = [0, 1, 1, 0]
BALANCE: dict[str, Any] = {
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01, "moe_layer_freq": FREQUENCY}


def _same(ranks: list[list[dict[str, Any]]], number: int, wanted: dict[str, Tensor],
          relative: float = 1e-4) -> None:
    got = whole([rank[number] for rank in ranks])
    assert got.keys() == wanted.keys() and len(got) > 20
    for name, value in wanted.items():
        limit = relative * float(value.abs().max())
        assert limit and float((got[name] - value).abs().max()) < limit, (number, name)


def _reference(case: Whole) -> dict[str, Tensor]:
    return whole([rank[0] for rank in on_ranks(1, steps, [(case, None)])])


STAGES = {"num_layers_in_first_pipeline_stage": 1, "pipeline_dtype": torch.float32}
TWO = {
    "CP2": Whole(cp=2), "CP2 EP2": Whole(cp=2, ep=2),
    "first stage of one layer": Whole(pp=2, native=STAGES),
    "layout, virtual stages": Whole(pp=2, vpp=2, native={
        "pipeline_model_parallel_layout": "Et|tt||tL"}),
}
FOUR = {
    "CP2 TP2 EP4": Whole(cp=2, tp=2, ep=4, sequence_parallel=True),
    "CP2 PP2": Whole(cp=2, pp=2, native=STAGES),
    "PP2, virtual stages, CP2": Whole(pp=2, vpp=2, cp=2),
    "PP2, stage without layers": Whole(pp=2, cp=2, native={
        "pipeline_model_parallel_layout": "E|t*4L"}),
}


@pytest.mark.parametrize("world,cases", [
    (2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)], ids=["two ranks", "four ranks"])
def test_gradients_equal_those_of_one_rank(world: int, cases: dict[str, Whole]) -> None:
    every = [(replace(case, native={**BALANCE, **case.native}), {}) for case in cases.values()]
    ranks = on_ranks(world, steps, every)
    wanted = _reference(Whole(native=BALANCE))
    for number in range(len(every)):
        _same(ranks, number, wanted)


OVERLAP = {"overlap_moe_expert_parallel_comm": True, "moe_layer_freq": 1}
DELAY = {**OVERLAP, "delay_wgrad_compute": True}
SHARED = {"moe_shared_expert_intermediate_size": 16}
KERNELS = {"experts.compute": "kernels"}


def _delayed(compute: dict[str, Any], ddp: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Gradients with and without delay; weight gradients that were computed later."""
    from moe_plugin.kernels import weight_grads

    counted, add = [], weight_grads.LaterGrads.add
    weight_grads.LaterGrads.add = lambda self, work: counted.append(add(self, work))
    found = [steps([(Whole(ep=2, dtype=torch.bfloat16, ddp={**ddp, **more}, native={
        **BALANCE, **SHARED, **native}), compute)])[0]
        for native, more in ((OVERLAP, {}), (DELAY, {"delay_wgrad_compute": True}))]
    return found, len(counted)


@pytest.mark.parametrize("compute,ddp,later", [
    (KERNELS, {"overlap_grad_reduce": True}, 16),
    pytest.param({}, {"overlap_grad_reduce": True}, 16, marks=pytest.mark.slow),
    pytest.param({"experts.compute": "loop"}, {}, 0, marks=pytest.mark.slow)],
    ids=["kernels, overlapped reduction", "fused, overlapped reduction", "computed at once"])
def test_delayed_weight_gradients_are_the_same(compute: dict[str, Any], ddp: dict[str, Any],
                                               later: int) -> None:
    """Those of the experts of 4 layers and 4 micro-batches; reduced when they are there."""
    ranks = on_ranks(2, _delayed, compute, ddp)
    at_once, delayed = (whole([found[number] for found, _ in ranks]) for number in range(2))
    assert [count for _, count in ranks] == [later] * 2
    assert sum(".linear_fc1" in name for name in at_once) == 20  # 16 experts, 4 shared
    for name, value in at_once.items():
        assert torch.equal(value, delayed[name]) and value.any(), name


def _reduced() -> tuple[list[int], list[bool]]:
    """Linears of a shared expert, marked as Transformer Engine does: what is to take the gradients
    of each, and whether those of the routed experts are taken when the layer has computed them.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from tests.hosts.megatron.layers import build

    case = Case(ep=2, dtype=torch.bfloat16, native={**DELAY, **SHARED})
    initialise_parallel(case)
    layer = build(case, True)
    hooks: list[list[Any]] = []
    for linear in (layer.shared_experts.linear_fc1, layer.shared_experts.linear_fc2):
        hooks.append([])
        linear.register_wgrad_accumulation_and_reduce_hooks = hooks[-1].append
        linear.weight.skip_backward_post_hook = True
    DistributedDataParallel(case.config(), DistributedDataParallelConfig(
        overlap_grad_reduce=True, delay_wgrad_compute=True), layer)
    experts = list(layer.experts.parameters())
    for parameter in experts:
        parameter.grad = torch.ones_like(parameter)
    layer.backward_dw()  # Megatron asserts that a gradient is there when it is taken
    return [len(each) for each in hooks], [bool((p.main_grad > 0).all()) for p in experts]


def test_the_shared_experts_gradients_are_taken_by_itself() -> None:
    assert on_ranks(2, _reduced) == [([1, 1], [True, True])] * 2


def _alone() -> str:
    from tests.hosts.megatron.layers import build, run

    case = Case(ep=2, dtype=torch.bfloat16, native={**DELAY, "num_layers": 1})
    initialise_parallel(case)
    try:
        run(build(case, True), case)
    except ValueError as error:
        return str(error)
    return ""


def test_delayed_gradients_need_the_schedule_that_takes_them() -> None:
    for message in on_ranks(2, _alone):
        assert message.startswith("delay_wgrad_compute=True cannot be used when an MoE layer")


def test_packed_sequences_equal_native() -> None:
    """Documents of two samples in one sequence; the router's loss by samples."""
    by_samples = {**BALANCE, "moe_router_load_balancing_type": "seq_aux_loss"}
    packed = Whole(packed=(0, 5, 16, 20), native=by_samples)
    ranks = on_ranks(2, steps, [(replace(packed, ep=2), {}), (replace(packed, ep=2), None)])
    _same(ranks, 0, whole([rank[1] for rank in ranks]))


def _attention(config: dict[str, Any], documents: list[int], mask: str
               ) -> tuple[Tensor, Tensor]:
    """(of packed documents, of each document by itself), [t, 1, channels]."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    initialise_parallel(Case())
    attention = DotProductAttention(config=Case(native=config).config(), layer_number=1,
                                    attn_mask_type=AttnMaskType[mask], attention_type="self")
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(sum(documents), 2, 8, generator=g) for _ in range(3))
    ends = torch.tensor([0, *documents]).cumsum(0).int()
    packed = attention(q, k, v, None, packed_seq_params=PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends))
    alone = [attention(*(x[begin:end, None] for x in (q, k, v)), None)
             for begin, end in zip(ends, ends[1:], strict=False)]
    return packed, torch.cat(alone)


@pytest.mark.parametrize("mask", ["causal", "padding"])
def test_packed_documents_do_not_see_each_other(mask: str) -> None:
    [(packed, alone)] = on_ranks(1, _attention, {"attention_dropout": 0.0}, [3, 1, 5, 2], mask)
    torch.testing.assert_close(packed, alone)
    assert packed.shape == (11, 1, 16)


WINDOW = {"window_size": (4, 0)}
REFUSED: dict[str, tuple[int, dict[str, Any], bool]] = {
    "window_size=(4, 0) with context_parallel_size=2": (2, WINDOW, False),
    "window_size=(4, 0) with packed sequences needs the attention of": (1, WINDOW, True),
    "Packed sequences with context_parallel_size=2 need the attention of": (2, {}, True),
    "attention_mask has shape [1, 1, 8, 8], but must have shape [batch": (2, {}, False)}


def _refused() -> list[str]:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    found, x, mask = [], torch.randn(8, 1, 2, 8), torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    for cp, native, packed in REFUSED.values():
        case = Case(cp=cp, native=native)
        initialise_parallel(case)
        with pytest.raises(ValueError) as refused:
            DotProductAttention(config=case.config(), layer_number=1,
                                attn_mask_type=AttnMaskType.causal, attention_type="self")(
                x, x, x, mask,
                packed_seq_params=PackedSeqParams(qkv_format="thd") if packed else None)
        found.append(str(refused.value))
    return found


def test_what_attention_over_parts_cannot_have_is_refused() -> None:
    for messages in on_ranks(2, _refused):
        for message, start in zip(messages, REFUSED, strict=True):
            assert message.startswith(start)


def _messages() -> list[str]:
    from argparse import Namespace

    from moe_plugin.hosts.megatron import parameters, translate
    from moe_plugin.hosts.megatron.refusals import VIRTUAL_STAGES
    from moe_plugin.hosts.megatron.stage_layouts import stages_of

    unequal = Namespace(
        stage_layouts=["tp=1", "tp=1"], pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Et|tL", tensor_model_parallel_size=1,
        expert_model_parallel_size=1, expert_tensor_parallel_size=None, context_parallel_size=1,
        untie_embeddings_and_output_weights=True, sequence_parallel=False, micro_batch_size=1)

    def wrapped(name: str) -> None:
        translate.script_arguments = lambda: {name: True}
        translate.refuse_arguments()

    def refuse_virtual(schedule: str, stages: int | None) -> None:
        VIRTUAL_STAGES.refuse({"pipeline.schedule": schedule,
                               "virtual_pipeline_model_parallel_size": stages})

    sharded = torch.nn.Linear(2, 2)
    sharded.weight.__fsdp_param__ = True
    found = []
    for call in (lambda: refuse_virtual("eager-1f1b", 2), lambda: refuse_virtual("terapipe", 2),
                 lambda: stages_of(unequal, 2), lambda: wrapped("use_megatron_fsdp"),
                 lambda: wrapped("hybrid_context_parallel"),
                 lambda: parameters.wait_for(sharded)):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    for schedule, stages in (("auto", 2), ("1f1b", 2), ("terapipe", None)):
        refuse_virtual(schedule, stages)
    return found


def test_layouts_that_nothing_follows_are_refused_by_name() -> None:
    [messages] = on_ranks(1, _messages)
    for message, start in zip(messages, (
            "pipeline.schedule='eager-1f1b' does not support virtual stages",
            "pipeline.schedule='terapipe' does not support virtual stages",
            "pipeline_model_parallel_layout=Et|tL cannot be used with stages of different layouts",
            "use_megatron_fsdp=True is not supported",
            "hybrid_context_parallel=True is not supported",
            "Megatron-FSDP around moe-plugin's MoE layer is not supported"), strict=True):
        assert message.startswith(start)


def _entered_twice() -> bool:
    context = torch.cuda.stream(torch.cuda.Stream())
    with context:
        pass
    with context:
        return True


def test_a_stream_without_a_gpu_is_entered_as_often_as_one_likes() -> None:
    """As Megatron does with several instances of the distributed optimizer."""
    assert on_ranks(1, _entered_twice) == [True]
