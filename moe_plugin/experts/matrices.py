"""Expert weights as separate matrices, for optimizers such as Muon (Jordan et al. 2024).

Such an optimizer needs the whole matrix of each expert. A matrix is [out, in], as in
`torch.nn.Linear`. The gate and up weights of a gated expert form one matrix, with the gate rows
first, as in Megatron, transformers and most checkpoints. If an expert is split into shards
(`Placement`), the matrix contains only this rank's part.
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
    """The matrices of the experts of a module, stored in one or more weights.

    Args:
        parts: the number of weights that form one matrix per expert.
        shards: the number of shards of each expert.
    """

    def __init__(self, parts: int, shards: int) -> None:
        self.parts, self.shards = parts, shards


@dataclass(frozen=True)
class MatrixPart:
    """The position of a weight [L, in, out] in the matrices of the experts.

    Attributes:
        stack: an object that all weights of the same matrices share.
        number: the index of this weight among the `stack.parts` weights, in the order of the matrix
            rows.
    """

    stack: Stack
    number: int


def mark_matrices(experts: nn.Module, shards: int) -> None:
    """Mark the weights of feed-forward experts with their `MatrixPart`.

    Args:
        experts: the experts of a layer.
        shards: the number of shards of each expert.
    """
    parameters = dict(experts.named_parameters())
    for names in (("w_gate_LDF", "w_in_LDF"), ("w_out_LFD",)):
        weights = [parameters[name] for name in names if name in parameters]
        stack = Stack(len(weights), shards)
        for number, weight in enumerate(weights):
            setattr(weight, MARK, MatrixPart(stack, number))


def part_of(parameter: Tensor) -> MatrixPart | None:
    """Return the `MatrixPart` of a marked weight, or None."""
    return getattr(parameter, MARK, None)


def to_matrices(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the matrix [sum of out, in] of each expert.

    Args:
        parts: all weights of a stack. Each of them is [L, in, out].
    """
    return [torch.cat([part.t() for part in expert_parts])
            for expert_parts in zip(*parts, strict=True)]


def from_matrices(matrices: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return weights with the shapes of `like`. This is the inverse of `to_matrices`."""
    # rows of the matrix are outputs, which are the last axis of a weight
    widths = [part.shape[2] for part in like]
    split = [matrix.split(widths) for matrix in matrices]
    return [torch.stack([rows.t() for rows in of_part]) for of_part in zip(*split, strict=True)]


@dataclass(frozen=True)
class MatrixForm:
    """The form of matrices in the last two axes of a parameter.

    Attributes:
        transposed: whether the axes are [in, out] instead of [out, in].
        halves: one of `HALVES`, which states whether the axis `out` contains one matrix, two
            matrices one after the other, or two matrices with alternating rows.
    """

    transposed: bool = False
    halves: str = "none"

    def __str__(self) -> str:
        return f"[{'in, out' if self.transposed else 'out, in'}], halves {self.halves}"


def matrix_forms(model: nn.Module) -> dict[int, MatrixForm]:
    """Return the form of all expert weights of a model, by the id of the parameter.

    Gate and up weights are two matrices.
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
    """Return whether a module's class is decorated with `use_experts_implementation` of
    transformers.
    """
    return hasattr(module, "is_concatenated")


def stacked(model: nn.Module) -> set[int]:
    """Return the ids of the parameters whose first axis is the axis of experts."""
    return {id(parameter) for module in model.modules()
            if isinstance(module, Experts) or of_transformers(module)
            for parameter in module._parameters.values() if parameter is not None}


def is_vector(parameter: Tensor, stacks: Collection[int]) -> bool:
    """Return whether a parameter is a vector, such as a bias, or one vector for each expert.

    Args:
        parameter: the parameter.
        stacks: the result of `stacked` for the model that contains the parameter.
    """
    return parameter.ndim - (id(parameter) in stacks) < 2
