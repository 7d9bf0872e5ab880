"""What is refused by name in a model of `transformers`, and what a module of experts keeps from one
call for the next.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.20")

from transformers.integrations.finegrained_fp8 import FP8Experts  # noqa: E402
from transformers.integrations.gguf.utils import GgufExperts  # noqa: E402
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts  # noqa: E402
from transformers.models.aria.modeling_aria import AriaExperts  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: E402

import moe_plugin.hosts.transformers as ours  # noqa: E402
from moe_plugin.hosts.transformers.register import KEPT, PluginEP  # noqa: E402
from tests.checkpoint.hf_models import tiny  # noqa: E402
from tests.hosts.transformers.test_transformers_experts import (  # noqa: E402
    EXPERTS,
    WIDTH,
    Config,
    close,
)

pytestmark = pytest.mark.fast
TOKENS = 11


@pytest.mark.parametrize("settings,error", [
    ({"router.top_k": 2}, "router.top_k=2 in a transformers model.*swap_moe"),
    ({"router": {"top_k": 1}}, "router.top_k=1 in a transformers model"),
    ({"router": "switch"}, "router='switch' in a transformers model"),
    ({"experts": {"activation": "relu"}}, "experts.activation='relu' in a trans"),
    ({"experts.recompute": True}, "experts.recompute=True in a trans"),
    ({"losses.z": 0.1}, "losses.z=0.1 in a transformers model"),
    ({"parallel.degree": 2}, "unknown key 'parallel.degree'"),
    ({"paralel.r": 0}, "unknown key 'paralel'"),
    ({"parallel.spill": "standing"}, "parallel.spill='standing'.*step.*use least_loaded"),
    ({"parallel": {"shards": 2}}, "parallel.shards=2.*none.*leave it out"),
    ({"parallel.replicas": 2}, "parallel.replicas=2.*must be 1.*leave it out"),
    ({"dispatch.name": "index_slice"}, "dispatch.name='index_slice' assumes.*'ragged'"),
    ({"dispatch": {"name": "padded", "capacity_factor": 1.0}}, "dispatch.name='padded' needs"),
    ({"dispatch.capacity_factor": 1.0}, "dispatch.capacity_factor=1.0.*must be None"),
    ({"dispatch.eval_capacity_factor": 1.0}, "dispatch.eval_capacity_factor=1.0.*must be None"),
    ({"dispatch.eval_token_fraction": 0.5}, "dispatch.eval_token_fraction=0.5.*must be 0.0"),
    ({"dispatch.equal_tokens": True}, "dispatch.equal_tokens=True.*must be False")])
def test_settings_that_nothing_here_reads_are_refused(settings: dict[str, Any],
                                                      error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ours.use(settings, "refused")


@pytest.mark.parametrize("settings", [
    {"parallel": "auto"}, {"parallel": {"overlap_degree": 2}}, {"experts": {"compute": "loop"}},
    {"dispatch": {"name": "ragged", "send": "auto"}}])
def test_settings_may_be_nested(settings: dict[str, Any]) -> None:
    ours.use(settings, "nested")


def made(kind: type[nn.Module]) -> Any:
    """A module of experts with random weights, that its first use with a name of ours is of."""
    torch.manual_seed(0)
    experts = kind(Config())
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


def called(experts: Any, settings: dict[str, Any] | None = None, choices: int = EXPERTS,
           by: Any = None) -> Tensor:
    """Its output with settings of ours, registered again under one name; None: its own code's.

    by: what is called in its place.
    """
    experts.config._experts_implementation = "eager" if settings is None else "called"
    if settings is not None:
        ours.use(settings, "called")
    g = torch.Generator().manual_seed(3)
    ids_TK = torch.stack([torch.randperm(choices, generator=g)[:2] for _ in range(TOKENS)])
    return (by or experts)(torch.randn(TOKENS, WIDTH, generator=g), ids_TK,
                           torch.rand(TOKENS, 2, generator=g))


def quantized() -> list[Any]:
    """Modules that take the places of experts whose weights are quantized."""
    sizes = SimpleNamespace(num_local_experts=2, hidden_size=32, intermediate_size=32,
                            hidden_act="silu")
    found = [FP8Experts(sizes, block_size=(16, 16)), FP8Experts(sizes, expert_dtype="fp4"),
             Mxfp4GptOssExperts(sizes), GgufExperts(2, 32, 32, 8, 8, nn.SiLU()),
             Llama4TextExperts(sizes)]
    for experts in found[:2]:
        experts.is_concatenated = True  # as the decorator of the quantizer leaves it
    return found


@pytest.mark.parametrize("experts", quantized(), ids=lambda e: type(e).__name__)
def test_experts_in_other_forms_are_refused_before_ranks_exchange(experts: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(experts).__name__} .*16 bits.*another"):
        PluginEP({}, experts, None, None)  # before it looks at a mesh


def test_a_model_is_checked() -> None:
    model = tiny("mixtral")
    model.set_experts_implementation("moe_plugin")
    assert ours.check(model) == [f"model.layers.{i}.mlp.experts" for i in range(3)]
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="no experts of MixtralForCausalLM.*MixtralExperts.*Set"):
        ours.check(model)
    fp8, *_, llama4 = quantized()
    with pytest.raises(ValueError, match="no experts of Sequential.* modules: Llama4TextExperts"):
        ours.check(nn.Sequential(llama4))
    fp8.config._experts_implementation = "moe_plugin"
    with pytest.raises(ValueError, match=r"FP8Experts has weights of torch.float8_e4m3fn"):
        ours.check(nn.Sequential(fp8))


@pytest.mark.parametrize("setting,value", [
    ("compute", "loop"), ("compute_selection", "rule"), ("precision", "fp8"),
    ("recompute_activation", True)])
def test_a_form_of_its_own_reads_no_settings_of_kernels(setting: str, value: Any) -> None:
    called(made(GptOssExperts), {})
    with pytest.raises(ValueError, match=f"experts.{setting}={value!r}.*GptOssExperts"):
        called(made(GptOssExperts), {f"experts.{setting}": value})


def test_a_rank_with_parts_of_experts_is_refused() -> None:
    experts = made(MixtralExperts)
    experts.num_experts = EXPERTS // 2
    with pytest.raises(ValueError, match=r"MixtralExperts has 8 experts on this rank instead of 4"):
        called(experts, {}, choices=EXPERTS // 2)


def test_settings_of_the_latest_use_hold() -> None:
    experts = made(MixtralExperts)
    for compute in ("loop", "grouped"):
        close([called(experts, {"experts.compute": compute})], [called(experts)])
        assert vars(experts)[KEPT].routed.config.experts.compute == compute


@pytest.mark.parametrize("settings", [{}, {"parallel": "auto"}], ids=str)
def test_a_replica_computes_with_its_own_weights(settings: dict[str, Any]) -> None:
    """`nn.DataParallel` copies a module's attributes, and has no parameters in the copies."""
    experts = made(MixtralExperts)
    called(experts, settings)
    replica = experts._replicate_for_data_parallel()
    replica.gate_up_proj, replica.down_proj = experts.gate_up_proj * 1, experts.down_proj * 2
    close([called(replica, settings)], [2 * called(experts)])


def test_fewer_experts_than_choices_where_other_ranks_have_the_rest() -> None:
    """As `transformers` itself spreads experts; the first number behind them stands for others."""
    experts = made(MixtralExperts)
    experts.gate_up_proj, experts.down_proj = (
        nn.Parameter(stack[:1]) for stack in (experts.gate_up_proj, experts.down_proj))
    experts.num_experts, experts._is_expert_parallel = 1, True
    close([called(experts, {}, choices=2)], [called(experts, choices=2)])


def test_evaluation_reads_weights_that_were_put_there_unseen() -> None:
    """In training a rounded weight is kept until a backward pass; averaged weights come later."""
    experts, settings = made(AriaExperts), {"experts.precision": "fp8_blockwise"}
    before = called(experts, settings)
    experts.down_proj.data.mul_(2)  # which no version counts
    experts.eval()
    close([called(experts, settings)], [2 * before])


def test_one_rank_compiles_with_rows_on_the_device() -> None:
    """After a first call, which makes what the others use."""
    experts = made(MixtralExperts)
    want = called(experts, {"dispatch.name": "bounded"})
    forward = torch.compile(experts.forward, backend="eager", fullgraph=True)
    close([called(experts, {"dispatch.name": "bounded"}, by=forward)], [want])


@pytest.mark.parametrize("ids", [EXPERTS, EXPERTS + 1, -2])
def test_an_expert_that_does_not_exist_is_refused(ids: int) -> None:
    """It would be counted as none, or as another expert."""
    config = Config()
    config._experts_implementation = "moe_plugin"
    experts = MixtralExperts(config)
    ids_TK = torch.tensor([[0, ids]])
    with pytest.raises(ValueError, match=rf"ids_TK has experts {min(0, ids)}\.\.{max(0, ids)}: "
                                         rf"must be in 0\.\.{EXPERTS - 1}, or -1 for no expert"):
        experts(torch.randn(1, WIDTH), ids_TK, torch.ones(1, 2))
