"""Compare the predicted with the measured peak memory of a training step in transformers.

    python -m scripts.bench.plan_memory

The prediction traces the model on the meta device. The measurement counts the bytes of all living
tensors of a step on the CPU, with parameters, gradients and both moments of AdamW. The command
prints the tables of docs/planning.md: one for models whose parameters are all trained, and one for
frozen experts with adapters. It takes about three minutes on two cores.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_plugin.cli.measure.traced_layers import AliveBytes
from moe_plugin.cli.measure.traced_transformers import build, model_bytes, traced_model
from moe_plugin.hosts.plain.adapters import add_lora, freeze_experts
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks
from moe_plugin.hosts.transformers import use
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster, Device
from moe_plugin.planner.fine_tuned import BF16, FORMATS, FineTuning
from moe_plugin.planner.model import ModelPlan
from moe_plugin.planner.plan_cost import plan_cost
from moe_plugin.planner.units import show_size

TOKENS, BATCH = 512, 2
OURS = "moe_plugin_by_rule"  # our experts, whose kernel is not chosen by measured times
COMMON = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
          "num_key_value_heads": 4, "vocab_size": 4096, "pad_token_id": None}
SHAPES: dict[str, dict[str, Any]] = {
    "Mixtral, 2 of 8 experts": {
        "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
        "intermediate_size": 512},
    "Qwen3-MoE, 8 of 32": {
        "model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 8,
        "moe_intermediate_size": 128, "intermediate_size": 512, "head_dim": 32},
    "OLMoE, 4 of 16": {
        "model_type": "olmoe", "num_experts": 16, "num_experts_per_tok": 4,
        "intermediate_size": 256},
    "GLM-4.5, 4 of 16": {
        "model_type": "glm4_moe", "n_routed_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 128, "intermediate_size": 1024, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "head_dim": 32},
}


def measured(values: dict[str, Any], experts: str, tuning: FineTuning | None = None) -> int:
    """Return the largest number of bytes of living tensors during the second training step.

    Args:
        values: the settings of the model.
        experts: implementation of the experts in transformers.
        tuning: how the model is fine-tuned. Optional. By default, all parameters are trained.
    """
    import transformers

    Workspace().clear()  # memory of earlier models, which this process could reuse
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation=experts)
    assert isinstance(model, nn.Module)
    if tuning is not None:
        swap_moe_blocks(model)
        if tuning.format != BF16:
            freeze_experts(model, tuning.format)
        add_lora(model, tuning.rank)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(4096, (BATCH, TOKENS))
    with AliveBytes() as alive:
        alive.leave_out((*model.parameters(), *model.buffers(), ids))
        for _ in range(2):
            alive.peak = alive.now
            optimizer.zero_grad(set_to_none=False)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
    return alive.peak + sum(p.numel() * p.element_size() for p in model.parameters())


def predicted_by_plan(values: dict[str, Any], tuning: FineTuning | None = None) -> float:
    """Return the bytes that `moe-plugin plan` predicts for one rank with this package's experts."""
    with tempfile.TemporaryDirectory() as folder:
        model = traced_model(values, Path(folder), TOKENS, BATCH, tuning)
    plan = ModelPlan(tp=1, pp=1, dp=1, ep=1, etp=1, micro_batch=BATCH, layout=LayoutChoice(r=1))
    return plan_cost(model, Cluster(nodes=1, ranks_per_node=1), Device(), plan).memory_bytes


def predicted_by_trace(values: dict[str, Any]) -> float:
    """Return the bytes of parameters, gradients, moments and traced tensors with the experts of
    transformers.
    """
    import transformers

    config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    traced = model_bytes(build(config, torch.bfloat16), TOKENS, BATCH)
    gradient = 2 * traced.largest_matrix - traced.ends_saved
    return 4 * traced.parameter_bytes + traced.saved + max(traced.extra, gradient)


def cells(want: float, got: int) -> list[str]:
    """Return the measured bytes, and the error of the predicted bytes."""
    return [show_size(got), f"{100 * (want / got - 1):+.1f} %"]


def main() -> None:
    """Print the measured bytes, and the errors of the predicted bytes."""
    use({"experts": {"compute_selection": "rule"}}, OURS)
    print("| shape | `grouped_mm` | error | `moe_plugin` | error |\n|---|---|---|---|---|")
    for title, shape in SHAPES.items():
        values = {**COMMON, **shape}
        row = [title, *cells(predicted_by_trace(values), measured(values, "grouped_mm")),
               *cells(predicted_by_plan(values), measured(values, OURS))]
        print(f"| {' | '.join(row)} |")
    print(f"\n| shape | {' | error | '.join(f'`{name}`' for name in FORMATS)} | error |\n"
          + "|---" * (1 + 2 * len(FORMATS)) + "|")
    for title, shape in SHAPES.items():
        values, row = {**COMMON, **shape}, [title]
        for tuning in (FineTuning(format=name) for name in FORMATS):
            row += cells(predicted_by_plan(values, tuning), measured(values, "eager", tuning))
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
