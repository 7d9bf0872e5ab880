"""The mark by which hosts tell expert parameters from all others: `parameter.expert = True`."""

from __future__ import annotations

from torch import Tensor, nn


def mark_expert(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter as an expert's: hosts must not reduce it over all data-parallel ranks."""
    parameter.expert = True  # type: ignore[attr-defined]
    return parameter


def mark_experts(module: nn.Module, ranks: int | None = None) -> None:
    """Mark every parameter of experts, or of what stands in their place and has them inside: an
    adapter of a rank's experts is of that rank, as they are.

    ranks: size of the expert-parallel group. Optional: the mark of an earlier call stays.
    """
    for parameter in module.parameters():
        mark_expert(parameter)
        if ranks is not None:
            parameter.expert_ranks = ranks  # type: ignore[attr-defined]


def expert_ranks(parameter: Tensor) -> int:
    """Size of the expert-parallel group of an expert's parameter; 1 for all other parameters."""
    return getattr(parameter, "expert_ranks", 1)


def is_expert(parameter: Tensor) -> bool:
    """Whether `mark_expert` marked this parameter, or fairseq marked an fp32 copy of it alike."""
    return getattr(parameter, "expert", False)


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's expert parameters by name."""
    return {name: p for name, p in model.named_parameters() if is_expert(p)}
