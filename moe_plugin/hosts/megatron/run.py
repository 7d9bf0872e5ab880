"""Data that the features of a run (`moe_plugin.training.run`) need from Megatron's script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from moe_plugin.config import ObserveConfig
from moe_plugin.hosts.megatron.layer import PluginMoELayer
from moe_plugin.training.resilience.skipped_steps import StepStart


def of_stage(config: ObserveConfig) -> ObserveConfig:
    """Return the `observe` settings for the current pipeline stage.

    Only one process may write to a file, so all stages but the first write to separate files.
    """
    stage = ps.get_pipeline_model_parallel_rank()
    return replace(config, jsonl=f"{config.jsonl}.stage{stage}") if (
        stage and config.jsonl) else config


def traced(config: ObserveConfig, args: Any,
           layers: Sequence[PluginMoELayer]) -> ObserveConfig:
    """Return the `observe` settings with the routing trace that `--moe-routing-trace-path`
    requests.

    If Megatron's own router is used, return the settings unchanged, because Megatron then writes
    the trace itself.

    Raises:
        ValueError: If `observe.trace` names a different folder, or if Megatron's arguments request
            a trace of anything other than the selected experts.
    """
    path = getattr(args, "moe_routing_trace_path", None)
    if not path or layers[0].plan.native_router:
        return config
    for name in ("capture_logits", "capture_hidden_states", "dump_weights"):
        if getattr(args, f"moe_routing_trace_{name}", False):
            raise ValueError(
                f"moe_routing_trace_{name}=True is not supported with moe-plugin's router. Leave "
                "it out.")
    if config.trace not in (None, path):
        raise ValueError(f"observe.trace={config.trace!r} contradicts --moe-routing-trace-path "
                         f"{path!r}. Use only one of the two.")
    steps = getattr(args, "moe_routing_trace_max_training_iters", None) or config.trace_steps
    return replace(config, trace=path, trace_steps=steps)


def named(layers: Sequence[PluginMoELayer]) -> dict[str, PluginMoELayer]:
    """Return a dict of the layers. The keys are the names under which the layers appear in the
    run's records.
    """
    return {f"layer{layer.layer_number}": layer for layer in layers}


class MegatronStart(StepStart):
    """A snapshot of the state that Megatron's forward and backward passes change. The snapshot is
    restored before the passes are repeated.

    The snapshot includes the random generators that Megatron uses in its parallel regions.
    """

    def __init__(self, chunks: list[Any]) -> None:
        super().__init__(chunks)
        self._tracker = get_cuda_rng_tracker()
        self._states = {name: state.clone() for name, state in self._tracker.get_states().items()}

    def restore(self) -> None:
        """Restore the state that was saved in this snapshot."""
        super().restore()
        self._tracker.set_states({name: state.clone() for name, state in self._states.items()})
