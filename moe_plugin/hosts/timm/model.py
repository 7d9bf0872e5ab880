"""SwinV2-MoE: Swin Transformer V2 models in which some blocks have experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from moe_plugin.comm import Comm
from moe_plugin.experts import is_expert
from moe_plugin.hosts.plain.blocks import blocks_in
from moe_plugin.hosts.plain.replace import replace_ffn
from moe_plugin.hosts.timm.backbone import draw_linear, optional, released_swin
from moe_plugin.hosts.timm.ensemble import HEAD, ClassHead, SegmentHead, SwinEnsemble
from moe_plugin.training.cmcl import EnsembleHeads
from moe_plugin.utils.messages import short

# published settings: top-1 routing with the score as weight, batch-prioritized, capacity 1.25, loss
# on load and importance (Hwang et al. 2022, Tutel, section 5; configs/swinmoe of Swin-Transformer)
PUBLISHED: dict[str, Any] = {
    "router.name": "cosine", "router.top_k": 1, "router.normalize": "none", "router.noise": 1.0,
    "router.batch_prioritized": True, "router.fp32": True, "dispatch.capacity_factor": 1.25,
    "losses": {"load_importance": 0.01}, "experts.dropout": 0.1, "experts.init_std": 0.005,
}


@dataclass(frozen=True)
class SwinMoE:
    """The sizes of a SwinV2-MoE model.

    Attributes:
        image: height and width of an image, in pixels.
        window: height and width of an attention window, in patches.
        width: number of features in the first stage. Each later stage has twice as many features as
            the stage before it.
        depths: number of blocks in each stage.
        heads: number of attention heads in each stage.
        moe_blocks: for each stage, a tuple with the indices of the blocks that have experts.
        patch: height and width of a patch, in pixels.
        experts: number of experts in each MoE layer.
        drop_path: drop-path rate of the last block. The rates of the blocks increase linearly,
            starting with 0 in the first block.
        released: True to use the backbone of the released Swin-MoE weights (`released_swin`)
            instead of a Swin Transformer V2. In the released backbone, MLPs and experts have no
            output bias.
        settings: settings of the MoE layers by dotted path.
    """

    image: int
    window: int
    width: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    moe_blocks: tuple[tuple[int, ...], ...]
    patch: int = 4
    experts: int = 8
    drop_path: float = 0.0
    released: bool = False
    settings: Mapping[str, Any] = field(default_factory=lambda: dict(PUBLISHED))


# the axis of the classes in the parameters of the head, for a single model and for an ensemble
_CLASS_AXES = {"head.fc.weight": 0, "head.fc.bias": 0, "head.heads.w_out_MHC": 2}
_RELEASED = {**PUBLISHED, "router.name": "topk"}
_EVERY_OTHER = (), (), (1, 3, 5, 7, 9, 11, 13, 15, 17), (1,)
PRESETS = {
    "swin_s": SwinMoE(192, 12, 96, (2, 2, 18, 2), (3, 6, 12, 24), _EVERY_OTHER, experts=32,
                      drop_path=0.2),
    "swin_b": SwinMoE(192, 12, 128, (2, 2, 18, 2), (4, 8, 16, 32), _EVERY_OTHER, experts=32,
                      drop_path=0.3),
    # sizes of the released weights:
    # configs/swinmoe/swin_moe_{small,base}_patch4_window12_192_32expert_32gpu_22k
    "swin_moe_s": SwinMoE(192, 12, 96, (2, 2, 18, 2), (3, 6, 12, 24), _EVERY_OTHER, experts=32,
                          drop_path=0.2, released=True, settings=_RELEASED),
    "swin_moe_b": SwinMoE(192, 12, 128, (2, 2, 18, 2), (4, 8, 16, 32), _EVERY_OTHER, experts=32,
                          drop_path=0.3, released=True, settings=_RELEASED),
    # for --example digits: images of 8 by 8 pixels, enlarged to 16 by 16
    "tiny": SwinMoE(16, 4, 48, (2, 2), (3, 6), ((1,), (1,)), patch=2, experts=4, settings={
        **PUBLISHED, "experts.dropout": 0.0, "experts.init_std": 0.02}),
    # for --example cifar10: photographs of 32 by 32 pixels; small enough for two cores
    "cifar": SwinMoE(32, 4, 48, (2, 2), (3, 6), ((1,), (1,)), settings={
        **PUBLISHED, "experts.dropout": 0.0, "experts.init_std": 0.02, "router.cosine_dim": 32}),
    # for --example mnist: images of 28 by 28 pixels, enlarged to 32 by 32. The published widths are
    # more than four times as large, and so is the width in which the published router compares
    "mnist": SwinMoE(32, 4, 24, (2, 2), (2, 4), ((1,), (1,)), settings={
        **PUBLISHED, "experts.dropout": 0.0, "experts.init_std": 0.02, "router.cosine_dim": 16}),
}


def build(size: SwinMoE, classes: int, *, dense: bool = False, widen: int = 1,
          comm: Comm | None = None, settings: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a model with random initial weights. Collective over `comm`.

    The model is timm's `SwinTransformerV2`, or `released_swin`. In the blocks listed in
    `size.moe_blocks`, an `MoEBlock` replaces the MLP.

    Args:
        size: sizes of the model, for example one of the `PRESETS`.
        classes: number of outputs of the model.
        dense: True to build the model without experts. With `top_k` 1, the dense model has the same
            number of active FLOPs as the model with experts.
        widen: factor by which the inner width of the MLPs in `size.moe_blocks` is multiplied, for
            dense models. If the factor is E, each of these MLPs has the size of E experts combined.
        comm: communicator of the expert-parallel group.
        settings: additional settings of the MoE layers, by dotted path. These settings are added to
            `size.settings`.
    Raises:
        ValueError: If timm is not installed, or if the sizes or settings cannot be combined.
    """
    _check(size, classes)
    sizes = {"img_size": size.image, "patch_size": size.patch, "num_classes": classes,
             "embed_dim": size.width, "depths": size.depths, "num_heads": size.heads,
             "window_size": size.window, "drop_path_rate": size.drop_path}
    settings = {**size.settings, **(settings or {})}
    if size.released:
        model = released_swin(0.02 if dense else settings["experts.init_std"], **sizes)
    else:
        model = optional("timm.models.swin_transformer_v2").SwinTransformerV2(**sizes)
    places = [f"layers.{stage}.blocks.{block}.mlp" for stage, blocks in enumerate(size.moe_blocks)
              for block in blocks]
    if dense:
        for mlp_name in places if widen > 1 else ():
            _widen(model, mlp_name, widen)
    else:
        replace_ffn(model, size.experts, upcycle=False, comm=comm, match="|".join(
            mlp_name.replace(".", r"\.") for mlp_name in places), **_nested(settings))
    if size.released:
        _without_output_biases(model)
    return model


def build_ensemble(size: SwinMoE, classes: int, heads: int, *, begin: str = HEAD,
                   share_after: str = HEAD, sharing: float = 0.0, hidden: int = 0,
                   segments: bool = False, dense: bool = False, comm: Comm | None = None,
                   settings: Mapping[str, Any] | None = None) -> SwinEnsemble:
    """Build an ensemble with random initial weights.

    The output has shape [B, M, C], or [B, S, S, M, C] for segmentation.

    Args:
        size: see `build`.
        classes: see `build`.
        heads: number of members, M. With M = 1, the ensemble consists of a single model.
        begin: name of the first module of which each member has its own copy (see `SwinEnsemble`).
        share_after: name of the module after which each member adds features of other members to
            its own features.
        sharing: probability with which each feature of another member is added.
        hidden: width of an additional hidden layer that each head has.
        segments: True if the model predicts a class for each pixel.
        dense: see `build`.
        comm: see `build`.
        settings: see `build`.
    Raises:
        ValueError: In the same cases as `build`, `SwinEnsemble` and `EnsembleHeads`.
    """
    models = [build(size, classes, dense=dense, comm=comm, settings=settings)
              for _ in range(1 if begin == HEAD else heads)]
    widths = [size.width * 2 ** stage for stage in range(len(size.depths))]
    outputs = classes * size.patch ** 2 if segments else classes
    made = EnsembleHeads(widths[0 if segments else -1], outputs, heads, hidden=hidden,
                         sharing=sharing if share_after == HEAD else 0.0)
    head = SegmentHead(widths, size.patch, len(models), made) if segments else ClassHead(made)
    return SwinEnsemble(models, head, begin=begin, share_after=share_after, sharing=sharing)


def _without_output_biases(model: nn.Module) -> None:
    """Remove the output biases of all MLPs, and freeze those of experts at 0."""
    for name, module in model.named_modules():
        if name.endswith(".mlp.fc2"):
            module.register_parameter("bias", None)
    for _, block in blocks_in(model):
        block.moe.experts.bias_out_LD.requires_grad_(False)


def _widen(model: nn.Module, mlp_name: str, factor: int) -> None:
    mlp: Any = model.get_submodule(mlp_name)
    wide = type(mlp)(mlp.fc1.in_features, factor * mlp.fc1.out_features, act_layer=type(mlp.act))
    draw_linear(wide)
    model.set_submodule(mlp_name, wide)


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *above, name = path.split(".")
        section = tree
        for part in above:
            section = section.setdefault(part, {})
        section[name] = value
    return tree


def _check(size: SwinMoE, classes: int) -> None:
    if classes < 2:
        raise ValueError(f"the data has {classes} classes, but a classifier needs at least 2. Add "
                         "folders of images")
    patches = size.image // size.patch
    if size.image % size.patch or patches % size.window:
        raise ValueError(
            f"image={size.image}, patch={size.patch} and window={size.window} cannot be combined: "
            f"image must be a multiple of patch, and the {patches} patches per side must be a "
            "multiple of window")
    for stage, blocks in enumerate(size.moe_blocks):
        wrong = [block for block in blocks if not 0 <= block < size.depths[stage]]
        if wrong:
            raise ValueError(f"moe_blocks names block {wrong[0]} of stage {stage}, but this stage "
                             f"has only {size.depths[stage]} blocks, numbered from 0. Remove the "
                             "block from the list")


def freeze_experts(model: nn.Module) -> int:
    """Freeze all experts. Freezing experts is useful when fine-tuning on little data (Hwang et al.,
    2022, section 5.3).

    Returns: the number of frozen parameters.
    Raises:
        ValueError: If the model has no experts.
    """
    frozen = [p.requires_grad_(False) for p in model.parameters() if is_expert(p)]
    if not frozen:
        raise ValueError(f"{short(type(model).__name__)} has no experts to freeze. Leave "
                         "--freeze-experts out for a dense model")
    return sum(p.numel() for p in frozen)


def head_of_other_classes(model: nn.Module, classes: Sequence[str],
                          shapes: Mapping[str, tuple[int, ...]],
                          extra: Mapping[str, Any]) -> list[str]:
    """If a checkpoint has a head for different classes, return the head's parameter names.

    The classes can differ in their number or in their names. Return an empty list if the classes
    are the same. A checkpoint of a different model also leads to an empty list, because loading
    this checkpoint raises an error later.

    Args:
        model: the model.
        classes: list of the class names of the model.
        shapes: dict of the shapes of all tensors in the checkpoint. See `checkpoint.load`.
        extra: dict of the additional values in the checkpoint. See `checkpoint.load`.
    """
    ours = {name: tuple(p.shape) for name, p in model.named_parameters() if name in _CLASS_AXES}

    def without_classes(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [shapes[name][:axis] + shapes[name][axis + 1:]
                for name, axis in _CLASS_AXES.items() if name in ours and name in shapes]

    same = (all(shapes.get(name) == shape for name, shape in ours.items())
            and list(extra.get("classes", classes)) == list(classes))
    return [] if same or without_classes(shapes) != without_classes(ours) else list(ours)
