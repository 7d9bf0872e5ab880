"""`--moe-activations` in Megatron: its transformer layers keep, recompute or swap."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import nn

from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.config import OffloadConfig
from moe_plugin.hosts.megatron.compat.names import TransformerLayer
from moe_plugin.hosts.megatron.compat.settings import cuda_graphs, setting
from moe_plugin.memory.activations.auto import manage_layers
from moe_plugin.memory.activations.offload import Activations

_REFUSED = ("recompute_granularity", "overlap_moe_expert_parallel_comm", "enable_cuda_graph",
            "external_cuda_graph", "cpu_offloading", "fine_grained_activation_offloading")


def activations_of(settings: OffloadConfig, config: Any,
                   chunks: Sequence[nn.Module]) -> Activations | None:
    """The transformer layers of this pipeline stage under the settings; None: all keep.

    Args:
        config: Megatron's.
        chunks: of the model, in the order of its virtual stages.
    Raises:
        ValueError: a setting of Megatron does not fit.
    """
    if settings.activations == "keep":
        return None
    layers = {f"{number}.{name}": layer for number, chunk in enumerate(chunks)
              for name, layer in chunk.named_modules() if isinstance(layer, TransformerLayer)}
    stage = ps.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if settings.profile is not None and ps.get_pipeline_model_parallel_world_size() > 1:
        # each stage has blocks of its own
        file = Path(settings.profile)
        name = f"{file.stem}.stage{ps.get_pipeline_model_parallel_rank()}{file.suffix}"
        settings = dataclasses.replace(settings, profile=str(file.with_name(name)))
    return manage_layers(
        settings, layers, comm_of(stage), contexts=[_random_states],
        places=[layer.layer_number - 1 for layer in layers.values()], total=config.num_layers,
        refused={**{f"Megatron's {name}": bool(setting(config, name)) for name in _REFUSED},
                 "Megatron's cuda_graph_impl": cuda_graphs(config) is not None})


def _random_states() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of two passes that start from the same of Megatron's states of random numbers."""
    tracker, states = get_cuda_rng_tracker(), []

    @contextmanager
    def first() -> Iterator[None]:
        states.append(tracker.get_states())
        yield

    @contextmanager
    def again() -> Iterator[None]:
        now = tracker.get_states()
        tracker.set_states(dict(states[0]))
        try:
            yield
        finally:
            tracker.set_states(now)

    return first(), again()
