"""Access to the weights of experts as separate matrices, for optimizers such as Muon (Jordan et al.
2024).

Muon needs the complete matrix of each expert. A matrix has the shape [out, in], as in
`torch.nn.Linear`. The gate and up weights of a gated expert form a single matrix whose first rows
are the gate rows, as in Megatron, transformers and most checkpoints. If an expert is split into
shards (`Placement`), its matrix contains only this rank's shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_plugin.experts.base import Experts
from moe_plugin.experts.ffn import FFNExperts

HALVES = ("none", "concatenated", "alternating")
MARK = "expert_matrix"  # the attribute of a parameter that contains its `MatrixPart`


class Stack:
    """The matrices of a layer's experts, which are stored in one or more weight tensors.

    Args:
        parts: the number of weight tensors that together form the matrix of each expert.
        shards: the number of shards of each expert.
    """

    def __init__(self, parts: int, shards: int) -> None:
        self.parts, self.shards = parts, shards


@dataclass(frozen=True)
class MatrixPart:
    """The position of a weight tensor [L, in, out] within the matrices of the experts.

    Attributes:
        stack: an object shared by all weight tensors that form the same matrices.
        number: the index of this weight tensor among the `stack.parts` tensors, in the order of the
            matrix rows.
    """

    stack: Stack
    number: int


def mark_matrices(experts: nn.Module, shards: int) -> None:
    """Store a `MatrixPart` on each weight of feed-forward experts.

    Args:
        shards: the number of shards of each expert.
    """
    parameters = dict(experts.named_parameters())
    for names in (("w_gate_LDF", "w_in_LDF"), ("w_out_LFD",)):
        weights = [parameters[name] for name in names if name in parameters]
        stack = Stack(len(weights), shards)
        for number, weight in enumerate(weights):
            setattr(weight, MARK, MatrixPart(stack, number))


def part_of(parameter: Tensor) -> MatrixPart | None:
    """Return the `MatrixPart` stored on a weight, or None if there is none."""
    return getattr(parameter, MARK, None)


def to_matrices(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return one matrix for each expert, with the shape [sum of out, in].

    Args:
        parts: all weight tensors of a stack. Each weight tensor has the shape [L, in, out].
    """
    return [torch.cat([part.t() for part in expert_parts])
            for expert_parts in zip(*parts, strict=True)]


def from_matrices(matrices: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Split matrices into weights with the shapes of `like`. This function is the inverse of
    `to_matrices`.
    """
    # rows of the matrix are outputs, which are the last axis of a weight
    widths = [part.shape[2] for part in like]
    split = [matrix.split(widths) for matrix in matrices]
    return [torch.stack([rows.t() for rows in of_part]) for of_part in zip(*split, strict=True)]


@dataclass(frozen=True)
class MatrixForm:
    """How the last two dimensions of a parameter represent matrices.

    Attributes:
        transposed: True if the last two dimensions are [in, out] instead of [out, in].
        halves: one of `HALVES`, which states whether `out` contains one matrix, two concatenated
            matrices, or two matrices with alternating rows.
    """

    transposed: bool = False
    halves: str = "none"

    def __str__(self) -> str:
        return f"[{'in, out' if self.transposed else 'out, in'}], halves {self.halves}"


def matrix_forms(model: nn.Module) -> dict[int, MatrixForm]:
    """Return the matrix form of every expert weight of a model, by the parameter's id.

    The gate and up weights are treated as two matrices.
    """
    return {id(module._parameters[name]): form for module in model.modules()
            for name, form in _forms_of(module) if module._parameters.get(name) is not None}


def _forms_of(module: nn.Module) -> Iterator[tuple[str, MatrixForm]]:
    if isinstance(module, FFNExperts):
        for name in ("w_in_LDF", "w_gate_LDF", "w_out_LFD"):
            yield name, MatrixForm(transposed=True)
    elif of_transformers(module):
        transposed = bool(module.is_transposed)
        yield "up_proj", MatrixForm(transposed)
        yield "down_proj", MatrixForm(transposed)
        yield "gate_up_proj", MatrixForm(
            transposed, "concatenated" if module.is_concatenated else "alternating")


def of_transformers(module: nn.Module) -> bool:
    """Return whether a module's class has the transformers decorator `use_experts_implementation`.
    """
    return hasattr(module, "is_concatenated")


def stacked(model: nn.Module) -> set[int]:
    """Return the ids of all parameters whose first dimension indexes the experts."""
    return {id(parameter) for module in model.modules()
            if isinstance(module, Experts) or of_transformers(module)
            for parameter in module._parameters.values() if parameter is not None}


def is_vector(parameter: Tensor, stacks: Collection[int]) -> bool:
    """Return whether a parameter is a vector, such as a bias, or a stack of one vector per expert.

    Args:
        parameter: the parameter.
        stacks: the result of `stacked` for the model that contains the parameter.
    """
    return parameter.ndim - (id(parameter) in stacks) < 2
