"""Ensembles of Swin transformers in which the members share the first modules.

In tensor shapes, B is the number of images, S is the height and width of an image in pixels, M is
the number of members, C is the number of classes, and D is the number of features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.training.cmcl import EnsembleHeads, share_features

HEAD = "head"  # stands for the output heads where the name of a module is expected


class SwinEnsemble(nn.Module):
    """An ensemble of Swin transformers. The members share the first modules of the model, and each
    member has its own copy of the later modules.

    Args:
        models: models created by `model.build`. There is a single model if only the heads of the
            members differ, and there are M models otherwise.
        head: module that computes the logits from the features of all stages.
        begin: name of the first module of which each member has its own copy. If `begin` is `HEAD`,
            the members differ only in their heads.
        share_after: name of the module after which each member adds features of other members to
            its own features. If `share_after` is `HEAD`, features are shared inside `head` instead.
        sharing: probability with which each feature of another member is added. See
            `share_features`.
    Raises:
        ValueError: If a module does not exist, or if features are shared before the members differ.
    """

    def __init__(self, models: Sequence[nn.Module], head: nn.Module, *, begin: str = HEAD,
                 share_after: str = HEAD, sharing: float = 0.0) -> None:
        super().__init__()
        self.steps = steps_of(models[0])
        self.begin = place_of(self.steps, begin, "ensemble_from")[0]
        self.shared = place_of(self.steps, share_after, "ensemble_share_after")[1]
        self.sharing = 0.0 if share_after == HEAD else sharing
        if self.sharing and self.shared < self.begin:
            raise ValueError(f"ensemble_share_after={share_after} is out of bounds: members become "
                             f"separate only at ensemble_from={begin}. Use that module or a later "
                             "one")
        self.ends = {i for i, name in enumerate(self.steps) if last_of_stage(self.steps, i)}
        for number, model in enumerate(models):
            model.head = nn.Identity()
            for name in self.steps[:self.begin] if number else ():
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, nn.Identity())
        self.members, self.head = nn.ModuleList(models), head

    def forward(self, x_BCSS: Tensor) -> Tensor:
        """Return the logits [B, ..., M, C]."""
        states, stages = [x_BCSS], []
        for number, name in enumerate(self.steps):
            if number == self.begin:
                states = states * len(self.members)
            states = [model.get_submodule(name)(h)
                      for model, h in zip(self.members, states, strict=False)]
            if self.sharing and number == self.shared:
                states = list(share_features(torch.stack(states), self.sharing, self.training,
                                             dim=0).unbind())
            if number in self.ends:
                stages.append(states)
        logits: Tensor = self.head(stages)
        return logits


def steps_of(model: Any) -> list[str]:
    """Return the names of the modules that a Swin transformer calls before its head, in order."""
    names = ["patch_embed"]
    for stage, layer in enumerate(model.layers):
        names += [f"layers.{stage}.downsample",
                  *(f"layers.{stage}.blocks.{block}" for block in range(len(layer.blocks)))]
    return [*names, "norm"]


def place_of(steps: list[str], name: str, argument: str) -> tuple[int, int]:
    """Return the first and the last index of a module in the list `steps`. If the list contains
    only submodules of this module, return the indices of the first and the last submodule.

    Raises:
        ValueError: If the module does not exist.
    """
    if name == HEAD:
        return len(steps), len(steps)
    indices = [i for i, step in enumerate(steps) if step == name or step.startswith(f"{name}.")]
    if not indices:
        raise ValueError(f"{argument}={name} is not a module of the model. It must be patch_embed, "
                         "layers.STAGE, layers.STAGE.blocks.BLOCK, norm or head, e.g. layers.0")
    return indices[0], indices[-1]


def last_of_stage(steps: list[str], number: int) -> bool:
    """Return True if the module is the last block of a stage. In the last stage, this is the norm
    after the last block.
    """
    stage = steps[number].partition(".blocks.")[0]
    following = steps[number + 1] if number + 1 < len(steps) else ""
    return steps[number] == "norm" or (
        ".blocks." in steps[number] and following != "norm" and not following.startswith(stage))


class ClassHead(nn.Module):
    """A head for classification. The head averages the features [B, H, W, D] of the last stage, and
    returns logits [B, M, C].
    """

    def __init__(self, heads: EnsembleHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, stages: list[list[Tensor]]) -> Tensor:
        """Compute the logits. stages: list with the features of each stage. Each element is a list
        of the features of all members. If all members share the features, the inner list has a
        single element.
        """
        pooled = [h_BHWD.mean((1, 2)) for h_BHWD in stages[-1]]
        if len(pooled) == 1:
            return self.heads(pooled[0])
        return self.heads(torch.stack(pooled, 1), own=True)


class SegmentHead(nn.Module):
    """A head for segmentation with logits [B, S, S, M, C], one set for each pixel.

    The features of all stages are mapped to the same width, and added at the resolution of the
    first stage. From the sum, the heads compute the logits of all pixels in each patch.

    Args:
        widths: number of features in each stage.
        patch: height and width of a patch, in pixels.
        decoders: number of decoders. The number of decoders is either 1 or the number of members.
        heads: heads with `classes * patch * patch` outputs each.
    """

    def __init__(self, widths: Sequence[int], patch: int, decoders: int,
                 heads: EnsembleHeads) -> None:
        super().__init__()
        self.patch, self.heads = patch, heads
        self.decoders = nn.ModuleList(_Decoder(widths) for _ in range(decoders))

    def forward(self, stages: list[list[Tensor]]) -> Tensor:
        """Compute the logits. stages: list with the features of each stage. Each element is a list
        of the features of all members. If all members share the features, the inner list has a
        single element.
        """
        features = [decoder([states[m % len(states)] for states in stages])
                    for m, decoder in enumerate(self.decoders)]
        separate = len(features) > 1
        patches = self.heads(torch.stack(features, -2) if separate else features[0], own=separate)
        b, h, w, m, _ = patches.shape
        p = self.patch
        pixels = patches.view(b, h, w, m, p, p, -1).permute(0, 1, 4, 2, 5, 3, 6)
        return pixels.reshape(b, h * p, w * p, m, -1)


class _Decoder(nn.Module):
    """Combines the features of all stages to a tensor [B, H, W, D] that has the resolution and
    width of the first stage.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(width, widths[0]) for width in widths)
        self.norm = nn.LayerNorm(widths[0])

    def forward(self, stages: list[Tensor]) -> Tensor:
        size = stages[0].shape[1:3]
        features = [F.interpolate(each(h_BHWD).permute(0, 3, 1, 2), size, mode="bilinear")
                    for each, h_BHWD in zip(self.maps, stages, strict=True)]
        h_BHWD: Tensor = F.gelu(self.norm(torch.stack(features).sum(0).permute(0, 2, 3, 1)))
        return h_BHWD
