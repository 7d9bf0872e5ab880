"""What Megatron's training script tells the features of its run (`moe_plugin.training.run`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from moe_plugin.config import ObserveConfig
from moe_plugin.hosts.megatron.layer import PluginMoELayer
from moe_plugin.training.resilience.overflow import StepStart


def of_stage(config: ObserveConfig) -> ObserveConfig:
    """`observe` of this pipeline stage: one writer a file, so that later stages write their own."""
    stage = ps.get_pipeline_model_parallel_rank()
    return replace(config, jsonl=f"{config.jsonl}.stage{stage}") if (
        stage and config.jsonl) else config


def traced(config: ObserveConfig, args: Any,
           layers: Sequence[PluginMoELayer]) -> ObserveConfig:
    """`observe` with what Megatron's `--moe-routing-trace-path` asks for. Of its own router
    Megatron writes the trace itself.

    Raises:
        ValueError: another folder is given by `observe.trace`; more than the choices is asked for.
    """
    path = getattr(args, "moe_routing_trace_path", None)
    if not path or layers[0].plan.native_router:
        return config
    for name in ("capture_logits", "capture_hidden_states", "dump_weights"):
        if getattr(args, f"moe_routing_trace_{name}", False):
            raise ValueError(
                f"moe_routing_trace_{name}=True is not supported with moe-plugin's router: must be "
                "False; leave it out")
    if config.trace not in (None, path):
        raise ValueError(f"observe.trace={config.trace!r} contradicts --moe-routing-trace-path "
                         f"{path!r}; give one of the two")
    steps = getattr(args, "moe_routing_trace_max_training_iters", None) or config.trace_steps
    return replace(config, trace=path, trace_steps=steps)


def named(layers: Sequence[PluginMoELayer]) -> dict[str, PluginMoELayer]:
    """Layers by the names that records have."""
    return {f"layer{layer.layer_number}": layer for layer in layers}


class MegatronStart(StepStart):
    """What passes of Megatron change, to begin them again: also the random generators that it keeps
    for its parallel regions.
    """

    def __init__(self, chunks: list[Any]) -> None:
        super().__init__(chunks)
        self._tracker = get_cuda_rng_tracker()
        self._states = {name: state.clone() for name, state in self._tracker.get_states().items()}

    def restore(self) -> None:
        """Set them as they were."""
        super().restore()
        self._tracker.set_states({name: state.clone() for name, state in self._states.items()})
