"""Weights in fp8, made once for the products of a forward pass, its recomputation and its backward
pass, and not at each use.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_plugin.kernels.fp8_products import Fp8Weight


@dataclass
class _Made:
    """One weight in fp8, and what it was made of; see `Fp8Weights`.

    Attributes:
        parameter: a reference to it.
        version: its version counter.
        address: of its memory.
        dtype: in which it was rounded.
        spent: whether a backward pass has used it.
    """

    weight: Fp8Weight
    parameter: weakref.ref[nn.Parameter]
    version: int
    address: int
    dtype: torch.dtype
    spent: bool = False

    def still(self, parameter: nn.Parameter, dtype: torch.dtype) -> bool:
        """Whether it is that parameter's present value, for all that can be known."""
        return (not self.spent and self.parameter() is parameter and self.dtype == dtype
                and self.version == parameter._version and self.address == parameter.data_ptr())


class Fp8Weights:
    """The stored weights of one module in fp8, by name, from the first use in a step on.

    A weight is rounded again when its version counter or its memory is another, and when a backward
    pass has used it: then an optimizer may step, and those that keep a copy of the parameters, or
    shards of them, write where no version is counted (`parameter.data`, Megatron's buffers, FSDP2's
    all-gather).
    """

    def __init__(self) -> None:
        self._made: dict[str, _Made] = {}

    def get(self, name: str, parameter: nn.Parameter, w_LIO: Tensor) -> Fp8Weight:
        """A parameter's value in fp8; w_LIO: the value, perhaps cast."""
        made = self._made.get(name)
        if made is None or not made.still(parameter, w_LIO.dtype):
            made = self._made[name] = _Made(Fp8Weight.of(w_LIO.detach()), weakref.ref(parameter),
                                            parameter._version, parameter.data_ptr(), w_LIO.dtype)
        return made.weight

    def spent(self) -> None:
        """A backward pass has used them."""
        for made in self._made.values():
            made.spent = True


@dataclass(frozen=True)
class Fp8Call:
    """The weights of one call in fp8, for its forward and its backward pass.

    Attributes:
        weights: by field name of `FFNParameters`.
        kept: where they were taken from; None: they are this call's alone.
    """

    weights: Mapping[str, Fp8Weight]
    kept: Fp8Weights | None

    def spent(self) -> None:
        """This call's backward pass has run."""
        if self.kept is not None:
            self.kept.spent()


def fp8_call(kept: Fp8Weights | None, parameters: Mapping[str, Tensor | None],
             values: Mapping[str, Tensor | None]) -> Fp8Call:
    """The weights of one call.

    Args:
        kept: of the module; None: nothing outlives the call.
        parameters: by name, of which those that are `nn.Parameter` are looked up there.
        values: by name, what is multiplied: the parameters, or casts of them.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if capturing:  # a replay has other weights
        kept = None
    made = {}
    for name, w_LIO in values.items():
        if w_LIO is None:
            continue
        parameter = parameters[name]
        if kept is None or not isinstance(parameter, nn.Parameter):
            made[name] = Fp8Weight.of(w_LIO.detach())
        else:
            made[name] = kept.get(name, parameter, w_LIO)
    return Fp8Call(made, kept)
