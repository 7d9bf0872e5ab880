"""Classes and functions of timm and torchvision, which are imported on first use."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

# operators that torchvision registers with torch when it is imported
_OPERATORS = "nms", "qnms"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []  # torch removes a library without references


def optional(module: str) -> Any:
    """Import and return a module of timm or torchvision.

    Raises:
        ValueError: If the package is not installed. The message states which package to install.
    """
    try:
        with _apart():
            importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed. Run: pip install 'moe-plugin[vision]'"
                         ) from error
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        _declare(error)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed. Run: pip install 'moe-plugin[vision]'"
                         ) from error


@contextmanager
def _apart() -> Iterator[None]:
    """Inside the context, the torchvision folder created by scripts/setup.sh is on the import path.

    The folder is removed from the path afterwards. If the folder stayed on the path, child
    processes would inherit the path, and transformers would import packages from the folder.
    """
    sys.path.append(str(Path(sys.prefix, "torchvision")))
    try:
        yield
    finally:
        sys.path.pop()


def _declare(error: RuntimeError) -> None:
    """Import torchvision even if its operators cannot be loaded.

    For example, the operators cannot be loaded if torchvision was built for CUDA but torch was
    built for CPUs. The operators are needed neither for reading images nor for timm's models. The
    operators are therefore declared without an implementation.
    """
    if not _declared:
        logger.info("torchvision's operators cannot be loaded with this version of torch (%s); "
                    "the vision models do not need them", error)
        _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in _OPERATORS:
            _declared[0].define(name + _SCHEMA)
    with _apart():
        importlib.import_module("torchvision")


@functools.cache
def distance_attention() -> Any:
    """Return the class of window attention for which the released Swin-MoE weights were trained.

    The attention weights are `attention = softmax(q @ k.T / sqrt(d) + bias)`. The projections of q,
    k and v have biases. For each head, a small network (`cpb_mlp`) computes the bias from the
    vertical and horizontal distance between two patches, on a logarithmic scale. Swin V2 uses the
    same network, but with cosine similarities instead of dot products and with a sigmoid after the
    network.
    Source: Swin-Transformer, `models/swin_transformer_moe.py`.
    """
    swin: Any = optional("timm.models.swin_transformer")

    class DistanceAttention(swin.WindowAttention):
        def __init__(self, dim: int, num_heads: int, window_size: tuple[int, int]) -> None:
            super().__init__(dim, num_heads=num_heads, window_size=window_size)
            del self.relative_position_bias_table
            self.cpb_mlp = nn.Sequential(nn.Linear(2, 512), nn.ReLU(inplace=True),
                                         nn.Linear(512, num_heads, bias=False))
            far = [torch.arange(1 - side, side) * 8 / (side - 1) for side in self.window_size]
            distances_YX2 = torch.stack(torch.meshgrid(far, indexing="ij"), -1)
            self.register_buffer("relative_coords_table", distances_YX2.sign() * torch.log2(
                distances_YX2.abs() + 1) / math.log2(8), persistent=False)

        def _get_rel_pos_bias(self) -> Tensor:
            bias_YXH = self.cpb_mlp(self.relative_coords_table)
            bias_PPH = bias_YXH.flatten(0, 1)[self.relative_position_index]
            return bias_PPH.permute(2, 0, 1).unsqueeze(0)

    return DistanceAttention


def released_swin(std: float, **sizes: Any) -> nn.Module:
    """Return the backbone for which the released Swin-MoE weights were trained.

    The backbone is the first version of timm's Swin Transformer, with norms before attention and
    MLP, and with `distance_attention`.

    Args:
        std: standard deviation of the initial weights in linear layers.
        sizes: keyword arguments for timm's `SwinTransformer`.
    """
    swin = optional("timm.models.swin_transformer")
    model = swin.SwinTransformer(**sizes)
    for block in model.modules():
        if isinstance(block, swin.SwinTransformerBlock):
            attn = block.attn
            block.attn = distance_attention()(attn.dim, attn.num_heads, attn.window_size)
    draw_linear(model, std)
    return model


def draw_linear(model: nn.Module, std: float = 0.02) -> None:
    """Draw linear weights from a truncated normal distribution, and set biases to zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
