"""A plan as the settings of a host: flags for its command line, YAML for `--moe-config`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from moe_plugin.lab.planning.model import ModelPlan, ModelShape
from moe_plugin.messages import short

HOSTS = ("fairseq", "megatron")


def moe_settings(model: ModelShape, plan: ModelPlan, auto: bool) -> dict[str, Any]:
    """A plan as this package's settings, nested plain values.

    auto: the tuner starts with the plan's layout and may change it.
    """
    parallel: dict[str, Any] = {
        "mode": "auto" if auto else "fixed", "r": plan.layout.r, "d": plan.layout.d
    }
    if plan.layout.d_backward:
        parallel["d_backward"] = plan.layout.d_backward
    if plan.expert_ranks == 1:
        parallel["r"] = 1
    dispatch: dict[str, Any] = {"name": "ragged"}
    if model.capacity_factor is not None:
        dispatch = {"name": "padded", "capacity_factor": model.capacity_factor}
    return {
        "num_experts": model.experts, "router": {"top_k": model.top_k},
        "experts": {
            "kind": "gated_ffn" if model.gated else "ffn", "hidden_dim": model.expert_dim
        },
        "dispatch": dispatch, "parallel": parallel, "comm": {"all_to_all": plan.layout.algorithm},
    }


def host_flags(model: ModelShape, plan: ModelPlan, host: str) -> list[str]:
    """The host's own flags, as a list of words.

    Raises: ValueError: unknown host, or one that cannot run the plan, with the remedy.
    """
    if host == "megatron":
        flags = [
            "--tensor-model-parallel-size", plan.tp, "--pipeline-model-parallel-size", plan.pp,
            "--expert-model-parallel-size", plan.ep, "--expert-tensor-parallel-size", plan.etp,
            "--num-experts", model.experts, "--moe-router-topk", model.top_k, "--moe-layer-freq",
            model.moe_every, "--num-layers", model.layers, "--hidden-size", model.model_dim,
            "--num-attention-heads", model.heads, "--ffn-hidden-size", model.ffn_dim,
            "--moe-ffn-hidden-size", model.expert_dim, "--seq-length",
            model.sequence, "--micro-batch-size", plan.micro_batch, "--global-batch-size",
            model.global_batch
        ]
        switches = {"--sequence-parallel": plan.tp > 1, "--swiglu": model.gated}
        return [str(f) for f in flags] + [name for name, on in switches.items() if on]
    if host != "fairseq":
        raise ValueError(f"unknown host {short(host)}; known: {', '.join(HOSTS)}")
    if plan.tp * plan.pp > 1:
        raise ValueError(
            f"plan {plan.label} needs tensor or pipeline parallelism, which fairseq lacks here; "
            "plan with --host fairseq")
    update = model.global_batch // (plan.dp * plan.micro_batch)
    flags = [
        "--moe-freq", model.moe_every, "--batch-size", plan.micro_batch, "--tokens-per-sample",
        model.sequence, "--update-freq", update, "--moe-expert-parallel-size", plan.expert_ranks,
        "--ddp-backend", "legacy_ddp"
    ]
    return [str(f) for f in flags]


def plan_yaml(model: ModelShape, plan: ModelPlan, host: str, auto: bool, note: str,
              activations: Sequence[str] = ()) -> str:
    """The file of a plan for `--moe-config`.

    Args:
        note: comment at its top.
        activations: see `PlanCost`.
    """
    settings = moe_settings(model, plan, auto)
    if activations:
        settings["offload"] = {"activations": ",".join(activations)}
    if host == "megatron":  # its own flags override these
        for key in ("num_experts", "router", "experts"):
            settings.pop(key)
    head = "".join(f"# {line}\n" for line in note.splitlines())
    return head + yaml.safe_dump(settings, sort_keys=False)
