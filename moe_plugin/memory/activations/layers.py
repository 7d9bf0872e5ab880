"""A host's transformer layers under `offload.activations`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import nn

from moe_plugin.comm import Comm
from moe_plugin.config import MoEConfig, OffloadConfig
from moe_plugin.memory.activations.auto import manage
from moe_plugin.memory.activations.offload import Activations, Contexts
from moe_plugin.messages import short

logger = logging.getLogger(__name__)


def manage_layers(settings: OffloadConfig, layers: Mapping[str, nn.Module], comm: Comm, *,
                  places: Sequence[int] | None = None, total: int | None = None,
                  refused: Mapping[str, bool] | None = None,
                  contexts: Sequence[Contexts] = ()) -> Activations | None:
    """Let a model's layers treat their activations as the settings say; None: all are kept.

    Args:
        layers: in the order of forward, by name. comm: ranks that have the same layers.
        places: of these layers among the model's, from 0; None: these are all. total: the model's
            number of layers, with `places`.
        refused: settings of the host by name, and whether they are used: they do not fit.
        contexts: see `manage`.
    Raises:
        ValueError: settings do not fit each other or the host's.
    """
    if settings.activations == "keep":
        return None
    for name, used in (refused or {}).items():
        if used:
            raise ValueError(
                f"offload.activations={short(settings.activations)} does not fit {name}, which "
                "decides about the same tensors or layers: leave one of both out")
    if not layers:
        raise ValueError(f"offload.activations={short(settings.activations)}: this rank has no "
                         "transformer layer; use keep, or other pipeline stages")
    stashed = [name for name, layer in layers.items()
               if any(isinstance(config := getattr(m, "config", None), MoEConfig)
                      and config.dispatch.stash_mib > 0 for m in layer.modules())]
    if stashed:
        logger.warning(
            "dispatch.stash_mib is not used in %s and %d more layers where they recompute or swap: "
            "offload.activations decides what lies where", stashed[0], len(stashed) - 1)
    places = range(len(layers)) if places is None else places
    return manage(list(layers.values()), _policies(settings, places, total or len(layers)),
                  memory=settings.memory,
                  folder=settings.path, smallest=settings.smallest, names=list(layers),
                  contexts=contexts, comm=comm, profile=settings.profile)


def _policies(settings: OffloadConfig, places: Sequence[int], total: int) -> str | list[str]:
    """Those of the layers at `places` of `total`; one text: of all of them."""
    names = settings.each_layer()
    if len(names) == 1:
        return settings.activations
    if len(names) != total:
        raise ValueError(
            f"offload.activations={short(settings.activations)} has {len(names)} names, and the "
            f"model {total} layers: must be one for all, or one for each in the order of forward")
    if len(set(places)) < len(places) or max(places) >= total:
        raise ValueError(
            f"offload.activations={short(settings.activations)} names {total} layers, and the "
            "model has more, such as those for multi-token prediction: use one name for all, or "
            "auto")
    return [names[place] for place in places]
