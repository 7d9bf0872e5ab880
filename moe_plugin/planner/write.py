"""A plan as the settings of a host: flags for its command line, YAML for `--moe-config`."""

from __future__ import annotations

from typing import Any

from moe_plugin.planner.model import ModelShape, Plan

HOSTS = ("fairseq", "megatron")


def moe_settings(model: ModelShape, plan: Plan, auto: bool) -> dict[str, Any]:
    """Our own settings of a plan, as nested values. auto: the layout is where the tuner starts, and
    it may move on.
    """
    parallel: dict[str, Any] = {
        "mode": "auto" if auto else "fixed", "r": plan.layout.r, "d": plan.layout.d
    }
    if plan.layout.d_backward:
        parallel["d_backward"] = plan.layout.d_backward
    settings: dict[str, Any] = {
        "num_experts": model.experts, "router": {"top_k": model.top_k}, "experts": {
            "kind": "gated_ffn" if model.gated else "ffn", "hidden_dim": model.hidden_dim
            or model.ffn_dim
        }, "dispatch": {"name": "ragged"} if model.capacity_factor is None else
        {"name": "padded", "capacity_factor": model.capacity_factor}, "parallel": parallel,
        "comm": {"all_to_all": plan.layout.algorithm},
    }
    if plan.expert_ranks == 1:
        parallel["r"] = 1
    return settings


def host_flags(model: ModelShape, plan: Plan, host: str) -> list[str]:
    """The host's own flags. A plan that the host cannot run is a `ValueError` that says which it
    can.
    """
    if host == "megatron":
        flags = [
            "--tensor-model-parallel-size", plan.tp, "--pipeline-model-parallel-size", plan.pp,
            "--expert-model-parallel-size", plan.ep, "--expert-tensor-parallel-size", plan.etp,
            "--num-experts", model.experts, "--moe-router-topk", model.top_k, "--moe-layer-freq",
            model.moe_every, "--num-layers", model.layers, "--hidden-size", model.model_dim,
            "--num-attention-heads", model.heads, "--ffn-hidden-size", model.ffn_dim,
            "--moe-ffn-hidden-size", model.hidden_dim or model.ffn_dim, "--seq-length",
            model.sequence, "--micro-batch-size", plan.micro_batch, "--global-batch-size",
            model.global_batch
        ]
        return [str(f) for f in flags] + (["--sequence-parallel"] if plan.tp > 1 else
                                          []) + (["--swiglu"] if model.gated else [])
    if host != "fairseq":
        raise ValueError(f"unknown host {host!r}; known: {', '.join(HOSTS)}")
    if plan.tp * plan.pp > 1:
        raise ValueError(
            f"plan {plan.label} needs tensor or pipeline parallelism, fairseq has neither here; "
            "plan with --host fairseq"
        )
    update = model.global_batch // (plan.dp * plan.micro_batch)
    return [
        "--moe-freq",
        str(model.moe_every), "--batch-size",
        str(plan.micro_batch), "--tokens-per-sample",
        str(model.sequence), "--update-freq",
        str(update), "--ddp-backend", "legacy_ddp"
    ]


def write_plan(model: ModelShape, plan: Plan, host: str, auto: bool, note: str) -> dict[str, str]:
    """Files by name: `<host>.flags` (one flag a line, for `$(cat ...)`) and `moe.yaml` (for
    `--moe-config`).
    """
    import yaml

    settings = moe_settings(model, plan, auto)
    if host == "megatron":  # it has flags of its own for these, and they win
        for key in ("num_experts", "router", "experts"):
            settings.pop(key)
    flags = host_flags(model, plan, host)
    lines: list[str] = []
    for flag in flags:
        if flag.startswith("--"):
            lines.append(flag)
        else:
            lines[-1] += f" {flag}"
    head = "".join(f"# {line}\n" for line in note.splitlines())
    return {
        f"{host}.flags": "\n".join(lines) + "\n",
        "moe.yaml": head + yaml.safe_dump(settings, sort_keys=False)
    }
