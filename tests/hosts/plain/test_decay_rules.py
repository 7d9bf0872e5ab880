"""What the rules of other packages, which go by names and by numbers of axes, make of our
parameters. Megatron's: tests/hosts/megatron/test_megatron_muon.py.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin import MoELayer
from moe_plugin.config import from_dict
from moe_plugin.hosts.plain.adapters.add import add_lora
from moe_plugin.hosts.plain.blocks import optimizer_groups
from moe_plugin.training.gradients.muon import muon_groups

BIASES = {"bias_in_LF", "bias_gate_LF", "bias_out_LD"}
_EXPERTS = {f"experts.{name}" for name in BIASES}
_PLAIN = {"router.logit_bias_E", "shared_expert.fc_in.bias", "shared_expert.fc_gate.bias",
          "shared_expert.fc_out.bias", "latent.down.bias", "latent.up.bias"}
_DORA = {f"experts.lora_m_{name}" for name in ("in_LF", "gate_LF", "out_LD")}
# parameters of a cosine router without a name of a bias; of one axis
_COSINE = {"router.project_P", "router.temperature"}


class Counting(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (7 * index + (1 + index % 5) * torch.arange(9)) % 60
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(("kind", "decay"), [
    ("gpt_oss", 2.0), pytest.param("gpt_oss", 0.1, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", 2.0, marks=pytest.mark.slow)])
def test_a_trainer_decays_what_it_decays_in_the_models_own_blocks(kind: str, decay: float,
                                                                  tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.20")
    pytest.importorskip("accelerate")
    from moe_plugin.hosts.plain.huggingface import restore_moe_blocks, swap_moe_blocks
    from tests.checkpoint.hf_models import tiny

    def trained(swap: bool) -> Any:
        model = tiny(kind)
        if swap:
            swap_moe_blocks(model)
        trainer = transformers.Trainer(
            model, transformers.TrainingArguments(
                str(tmp_path), max_steps=4, per_device_train_batch_size=4, save_strategy="no",
                learning_rate=0.1, weight_decay=decay, optim="sgd", max_grad_norm=1.0,
                lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True),
            train_dataset=Counting())
        decayed = set(trainer.get_decay_parameter_names(model))
        assert not [name for name in decayed if name.rpartition(".")[2] in BIASES]
        trainer.train()
        if swap:
            restore_moe_blocks(model)
        return dict(model.named_parameters())

    once = trained(False)
    for name, value in trained(True).items():
        torch.testing.assert_close(value, once[name], rtol=1e-3, atol=1e-4, msg=name)


def _no_decay_list(model: nn.Module) -> set[str]:
    """Scripts of accelerate and DeepSpeed."""
    return {name for name, _ in model.named_parameters()
            if any(part in name for part in ("bias", "LayerNorm.weight"))}


def _fairseq(model: nn.Module) -> set[str]:
    """It has no rule: its optimizers, `composite` too, decay all parameters of a group."""
    return set()


def _timm(model: nn.Module, **settings: Any) -> set[str]:
    """`param_groups_weight_decay`, from its file: the package needs torchvision."""
    package = importlib.util.find_spec("timm")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs timm")
    file = Path(package.submodule_search_locations[0], "optim", "_param_groups.py")
    spec = importlib.util.spec_from_file_location("timm_param_groups", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "timm", SimpleNamespace())
        patched.setitem(sys.modules, "timm.models", SimpleNamespace(group_parameters=None))
        spec.loader.exec_module(module)
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)] for group in module.param_groups_weight_decay(model, 0.1, **settings)
            if group["weight_decay"] == 0 for p in group["params"]}


def _timm_told(model: nn.Module) -> set[str]:
    """As docs/adapters.md says."""
    return _timm(model, no_weight_decay_list=["*.bias_*", "*.lora_m_*"])


def _megatron(model: nn.Module) -> set[str]:
    """Its own rule, with our stacks of vectors as it is given them."""
    optimizer = pytest.importorskip("megatron.core.optimizer")
    from moe_plugin.hosts.megatron.compat.optimizer import is_vector

    [key] = optimizer.get_standard_config_overrides(optimizer.OptimizerConfig(weight_decay=0.1))
    return {name for name, p in model.named_parameters()
            if key.predicate.fn(torch.empty(3) if is_vector(p) else p) or fnmatch(name, key.name)}


def _muon(model: nn.Module) -> set[str]:
    """Muon's own scripts: matrices go to Muon, the rest without decay to AdamW."""
    return {name for name, p in model.named_parameters()
            if p.ndim != 2 or re.search("embed|head", name)}


def _muon_of_stacks(model: nn.Module) -> set[str]:
    """Scripts whose Muon takes stacks of matrices."""
    return {name for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name}


def _transformers(model: nn.Module) -> set[str]:
    utils = pytest.importorskip("transformers.trainer_pt_utils")
    trainer = pytest.importorskip("transformers.trainer").Trainer
    assert utils is not None
    return {name for name, _ in model.named_parameters()} - set(
        trainer.get_decay_parameter_names(None, model))


def _ours(groups: Callable[..., Any], model: nn.Module) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)] for group in groups(model) if not group["weight_decay"]
            for p in group["params"]}


def _optimizer_groups(model: nn.Module) -> set[str]:
    return _ours(lambda model: optimizer_groups(model, 0.1, weight_decay=0.1), model)


def _muon_groups(model: nn.Module) -> set[str]:
    return _ours(lambda model: muon_groups(model, 0.1, 0.1, weight_decay=0.1), model)


_STACKS = {f"experts.w_{name}" for name in ("in_LDF", "gate_LDF", "out_LFD")} | {
    f"experts.lora_{name}" for name in ("a_in_LDR", "b_in_LRF", "b_gate_LRF", "a_out_LFR",
                                        "b_out_LRD")}


@pytest.mark.parametrize(("rule", "biases", "dora", "cosine", "stacks"), [
    (_no_decay_list, True, False, False, False), (_transformers, True, False, False, False),
    (_timm, False, False, True, False), (_timm_told, True, True, True, False),
    (_megatron, True, True, True, False),
    (_muon, False, False, True, True), (_muon_of_stacks, False, False, True, False),
    (_optimizer_groups, True, True, True, False), (_muon_groups, True, True, True, False),
    (_fairseq, False, False, False, False)])
def test_which_vectors_have_no_weight_decay(rule: Callable[[nn.Module], set[str]], biases: bool,
                                            dora: bool, cosine: bool, stacks: bool) -> None:
    """All parameters that a layer may have. biases, dora, cosine, stacks: whether the rule leaves
    out experts' biases, lengths of DoRA, vectors of a cosine router, and (Muon's that knows no
    stacks) weights of experts. docs/adapters.md says so.
    """
    named = {"topk": _PLAIN, "cosine": _PLAIN - {"router.logit_bias_E"}}
    for router, vectors in named.items():
        layer = MoELayer(from_dict({
            "model_dim": 8, "num_experts": 4, "router": {"name": router, "bias": router == "topk"},
            "experts": {"kind": "gated_ffn", "shared_hidden_dim": 6, "shared_gate": True,
                        "latent_dim": 4}}))
        model = nn.Sequential(layer)
        add_lora(model, 2, 4, use_dora=True, freeze=False)
        model.requires_grad_(True)
        own = {name for name, _ in layer.named_parameters()}
        assert own == (_EXPERTS | _DORA | _STACKS | vectors | (
            _COSINE | {"router.project_PD", "router.direction_EP"} if router == "cosine"
            else {"router.weight_ED"}) | {
            "shared_expert.fc_in.weight", "shared_expert.fc_gate.weight",
            "shared_expert.fc_out.weight", "shared_expert.gate.weight", "latent.down.weight",
            "latent.up.weight"}), "a new parameter: what do these rules make of it?"
        left_out = {name.removeprefix("0.") for name in rule(model)}
        wanted = set() if rule is _fairseq else vectors
        for names, whether in ((_EXPERTS, biases), (_DORA, dora), (_STACKS, stacks),
                               (_COSINE & own, cosine)):
            wanted = wanted | names if whether else wanted
        assert left_out == wanted


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_which_biases_peft_trains(bias: str) -> None:
    """Those whose names end in ".bias": the same with our blocks, but for the routers' in them."""
    pytest.importorskip("transformers", minversion="5.20")
    peft = pytest.importorskip("peft")
    from moe_plugin.hosts.plain.huggingface import restore_moe_blocks, swap_moe_blocks
    from tests.checkpoint.hf_models import tiny

    def trained(swap: bool) -> set[str]:
        model = tiny("gpt_oss")
        if swap:
            swap_moe_blocks(model)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], bias=bias))
        if swap:
            restore_moe_blocks(model)
        return {name for name, p in wrapped.named_parameters() if p.requires_grad}

    swapped, own = trained(True), trained(False)
    assert swapped <= own and not [name for name in own if ".experts." in name]
    assert all(name.endswith(".mlp.router.bias") for name in own - swapped)
    assert bool(own - swapped) == (bias == "all")


@pytest.mark.parametrize("bias", ["none", "all"])
def test_peft_freezes_a_layer_that_it_wraps(bias: str) -> None:
    """Our adapters, too, whose names begin as its own do: so they are added after it."""
    peft = pytest.importorskip("peft", minversion="0.21")
    layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 4, "router": {"name": "cosine"},
                                "experts": {"shared_hidden_dim": 6}}))
    model = nn.Sequential(nn.Linear(8, 8), layer)
    config = peft.LoraConfig(target_modules=["0"], bias=bias)
    add_lora(model, 2, 4, use_dora=True, freeze=False)
    wrapped = peft.get_peft_model(model, config)
    trained = {name for name, p in wrapped.named_parameters() if p.requires_grad}
    ends = tuple(f".{name}" for name, _ in layer.named_parameters())
    found = {name.rpartition(".1.")[2] for name in trained if name.endswith(ends) and ".1." in name}
    assert found == ({f"shared_expert.fc_{part}.bias" for part in ("in", "out")}
                     if bias == "all" else set())
    assert not [name for name in peft.get_peft_model_state_dict(wrapped) if ".experts." in name]
