"""Weight decay in a `Trainer` of `transformers`, which leaves out parameters by their names."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Collection
from typing import Any

from torch import nn

from moe_plugin.experts.lora import ADAPTER_AXIS
from moe_plugin.experts.marks import is_expert
from moe_plugin.experts.matrices import is_vector, stacked


@functools.cache
def leave_biases_without_decay() -> None:
    """Let the rule of `transformers` that leaves out names with "bias" leave out the biases of our
    experts, too, which have other names; stays for the life of the process. Without `transformers`
    there is nothing to do.
    """
    try:
        utils: Any = importlib.import_module("transformers.trainer_pt_utils")
    except ImportError:
        return
    original = utils.get_parameter_names

    @functools.wraps(original)
    def names(model: nn.Module, forbidden_layer_types: Any,
              forbidden_layer_names: Collection[str] | None = None) -> list[str]:
        found: list[str] = original(model, forbidden_layer_types, forbidden_layer_names)
        if not any("bias" in pattern for pattern in forbidden_layer_names or ()):
            return found
        biases = set(expert_biases(model))
        return [name for name in found if name not in biases]

    # a Trainer that is imported later takes the new one
    for module in (utils, sys.modules.get("transformers.trainer")):
        if module is not None:
            module.get_parameter_names = names


def expert_biases(model: nn.Module) -> list[str]:
    """Names of the parameters of a model that hold the biases of our experts."""
    stacks = stacked(model)
    return [name for name, parameter in model.named_parameters()
            if is_expert(parameter) and is_vector(parameter, stacks)
            and name.rpartition(".")[2] not in ADAPTER_AXIS]
