"""What Megatron's training script tells the run features of its model (`moe_plugin.run`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.config import ObserveConfig
from moe_plugin.hosts.megatron.layer import PluginMoELayer
from moe_plugin.hosts.megatron.streamed import StreamedModel
from moe_plugin.memory.activations.offload import Activations
from moe_plugin.observe.features import LayerRecords
from moe_plugin.output import LayerStats
from moe_plugin.resilience.overflow import StepStart
from moe_plugin.routing.steps import RouterSteps


def records_of(layers: Sequence[PluginMoELayer], config: ObserveConfig,
               activations: Activations | None, validation: Callable[[LayerStats], None],
               **options: Any) -> LayerRecords:
    """Records of the layers of this pipeline stage.

    Args:
        activations: of this stage, whose copies get records, too; None: all are kept.
        validation, options: see `LayerRecords`.
    """
    group = ps.get_tensor_and_data_parallel_group(with_context_parallel=True)
    stage = ps.get_pipeline_model_parallel_rank()
    if stage:  # one writer a file: later stages write their own
        config = replace(config, jsonl=config.jsonl and f"{config.jsonl}.stage{stage}",
                         choices=config.choices and f"{config.choices}.stage{stage}")
    records = LayerRecords(config, named(layers), comm_of(group), host="megatron",
                           rank=dist.get_rank(), validation=validation, **options)
    if activations is not None:
        records.recorder.watch("activations", activations.swapper.copier, activations.on_device)
    return records


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


def router_steps(chunks: list[Any]) -> RouterSteps | None:
    """The end of a step in a model's routers; None: of weights that stream, whose trainer ends it
    block by block.
    """
    return None if isinstance(chunks[0], StreamedModel) else RouterSteps(chunks)


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
