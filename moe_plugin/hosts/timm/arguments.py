"""Define the arguments of the vision training script, and check which of them can be combined."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_plugin.config import ObserveConfig, RunConfig, run_config
from moe_plugin.config.flags import add_arguments
from moe_plugin.config.options import MOST_SECONDS, check
from moe_plugin.config.refusals import HOSTS, refuse_lacking
from moe_plugin.hosts.timm.data import EXAMPLES
from moe_plugin.hosts.timm.ensemble import HEAD
from moe_plugin.hosts.timm.model import PRESETS
from moe_plugin.training.cmcl import EnsembleSettings, flags, given_settings
from moe_plugin.utils.messages import Parser, short

SMOOTHING = 0.1
TASKS = "classify", "segment"
ENSEMBLE = (
    *flags("image", "pixel", "image"),
    ("ensemble-from", {"default": HEAD, "help": "first module that each member has separately, "
                       "e.g. layers.1; patch_embed: whole networks (default: only the heads)"}),
    ("ensemble-share-after", {"default": HEAD, "help": "module after which features are shared, "
                              "e.g. layers.0 (default: in the hidden layer of the heads)"}))


def parser(description: str | None = None) -> argparse.ArgumentParser:
    """Build the argument parser of the training script. Options of MoE layers have the same flags
    as in the other hosts.
    """
    p = Parser(prog="python -m moe_plugin.hosts.timm.train", description=description,
               formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, required=True,
                   help="folder with train/CLASS/* and val/CLASS/*; for segmentation with images/* "
                   "and masks/* in train and val")
    p.add_argument("--out", type=Path, required=True, help="output folder of the run")
    p.add_argument("--preset", default="tiny", choices=sorted(PRESETS), help="sizes of the model")
    p.add_argument("--example", choices=EXAMPLES, default=None,
                   help="first write these images to --data, unless the folder exists")
    p.add_argument("--task", choices=TASKS, default="classify", help="classify images, or segment "
                   "them into foreground and background (default: classify)")
    p.add_argument("--init", type=Path, default=None, metavar="CHECKPOINT", help="start with these "
                   "weights: a run's checkpoint folder, or PATH for published files PATH.rankN")
    p.add_argument("--evaluate", action="store_true", help="evaluate the checkpoint of the run, or "
                   "that of --init, without training")
    p.add_argument("--dense", action="store_true", help="build a model without experts")
    p.add_argument("--freeze-experts", action="store_true", help="train only the other parameters")
    p.add_argument("--flips", action="store_true", help="mirrored images belong to the same class")
    for name, cast, value, text in [
            ("image", int, 0, "side of the images in pixels; 0: as in the preset"),
            ("experts", int, 0, "experts of each layer over all ranks; 0: as in the preset"),
            ("widen", int, 1,
             "with --dense: factor of the inner width of the MLPs that replace experts"),
            ("epochs", int, 20, "passes over the images"),
            ("batch-size", int, 32, "images per rank and step"),
            ("lr", float, 3e-3, "highest learning rate"),
            ("weight-decay", float, 0.05, "weight decay of matrices"),
            ("warm-up", float, 0.1, "share of the steps in which the learning rate rises"),
            ("clip", float, 3.0, "upper bound of the gradient norm"),
            ("seed", int, 1, "seed of the weights and of the order of the images"),
            ("log-every", int, 10, "steps between two records of the log"),
            ("timeout", float, 300.0, "seconds that a rank waits for other ranks")]:
        p.add_argument(f"--{name}", type=cast, default=value, help=f"{text} (default: {value})")
    p.add_argument("--label-smoothing", type=float, default=None, help="share of the label that is "
                   f"spread over all classes (default: {SMOOTHING}; 0 with an ensemble)")
    group = p.add_argument_group("ensemble")
    for name, options in ENSEMBLE:
        group.add_argument("--" + name, **options)
    add_arguments(p, skip={"num_experts", "observe.jsonl", "observe.interval"})
    return p


def ensemble_of(args: argparse.Namespace) -> EnsembleSettings | None:
    """Return the settings of the ensemble, or None if the model has a single output.

    Raises:
        ValueError: If an argument is out of bounds or has no effect.
    """
    if args.task == "classify" and args.ensemble_heads and args.oracle_unit == "pixel":
        raise ValueError("oracle_unit=pixel is out of bounds: it must be image with --task "
                         "classify, because each image has one class. Leave it out, or use --task "
                         "segment")
    at_head = args.ensemble_share_after == HEAD
    return given_settings(args, ENSEMBLE, (
        (args.ensemble_hidden or not (at_head and args.ensemble_sharing), "ensemble_sharing",
         "0 without a hidden layer whose features are shared",
         "use --ensemble-hidden, or --ensemble-share-after and --ensemble-from"),
        (at_head or args.ensemble_sharing, "ensemble_share_after", "left out without sharing",
         "use --ensemble-sharing 0.7"),
        (not args.label_smoothing, "label_smoothing", "0 with ensemble_heads, whose loss does not "
         "smooth the labels", "leave it out")))


def run_settings_of(given: Mapping[str, Any], stats: Path) -> RunConfig:
    """Return the settings of the run. The run writes its records to the file `stats`.

    Args:
        given: dict of the settings by dotted path.
        stats: path of the file to which the run writes its records.
    Raises:
        ValueError: If the training script does not support a setting, or if the script has its own
            argument for this setting.
    """
    for name, remedy in (("jsonl", "read stats.jsonl in --out"), ("interval", "use --log-every")):
        default = getattr(ObserveConfig(), name)
        if (value := given.get(f"observe.{name}", default)) != default:
            raise ValueError(f"observe.{name}={short(value)} is not supported in "
                             f"{HOSTS['vision']}: leave it out, or {remedy}")
    settings = run_config({**given, "observe.jsonl": str(stats)})
    refuse_lacking(settings, "vision")
    return settings


def check_arguments(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if an argument is out of bounds, or if it requires experts but the model
    has no experts.

    given: dict of the layers' settings, by dotted path.
    """
    for name, ok, bound, remedy in (
            ("image", args.image >= 0, ">= 0", "use 0 for the preset's"),
            ("experts", args.experts >= 0, ">= 0", "use 0 for the preset's"),
            ("widen", args.widen >= 1, ">= 1", "use 1 for equal active FLOPs"),
            ("epochs", args.epochs >= 1, ">= 1", "use --evaluate to train nothing"),
            ("batch_size", args.batch_size >= 1, ">= 1", "use 32"),
            ("lr", 0 < args.lr < math.inf, "> 0 and finite", "use 3e-3"),
            ("weight_decay", 0 <= args.weight_decay < math.inf, ">= 0 and finite", "use 0.05"),
            ("warm_up", 0 <= args.warm_up <= 1, "in 0..1, a share of the steps", "use 0.1"),
            ("clip", args.clip > 0, "> 0", "use inf to clip nothing"),
            ("log_every", args.log_every >= 1, ">= 1", "use 10"),
            ("timeout", 0 < args.timeout <= MOST_SECONDS, f"> 0 and <= {MOST_SECONDS:g}",
             "use 300")):
        check(ok, name, getattr(args, name), bound, remedy)
    plain = args.dense and not args.ensemble_heads and args.task == "classify"
    if args.widen > 1 and not plain:
        raise ValueError(f"widen={args.widen} has no effect here. It must be 1 unless the model is "
                         "a classifier with --dense and without --ensemble-heads")
    in_file = given.get("num_experts", args.experts)
    if args.experts and in_file != args.experts:
        raise ValueError(f"--experts {args.experts} contradicts num_experts={in_file} in "
                         "--moe-config. Remove one of the two")
    of_experts = sorted(path for path in given if not path.startswith("observe."))
    if args.dense and (args.experts or of_experts):
        setting = f"experts={args.experts}" if args.experts else of_experts[0]
        raise ValueError(f"{setting} has no effect with --dense, which builds a model without "
                         "experts. Leave one of the two out")


def smoothing_of(args: argparse.Namespace) -> float:
    """Return the label smoothing that the arguments set.

    Raises:
        ValueError: If the label smoothing is not in [0, 1).
    """
    given = SMOOTHING if args.label_smoothing is None else args.label_smoothing
    if not 0 <= given < 1:
        raise ValueError(f"label_smoothing={given} is out of bounds: it must be in [0, 1). Use 0.1")
    return given
