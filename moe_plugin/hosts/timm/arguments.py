"""Arguments of the training script, and which of them fit together."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_plugin.config import ObserveConfig, RunConfig, run_config
from moe_plugin.config.flags import add_arguments
from moe_plugin.config.lacks import HOSTS, refuse_lacking
from moe_plugin.config.options import MOST_SECONDS, check
from moe_plugin.hosts.timm.data import EXAMPLES
from moe_plugin.hosts.timm.ensemble import HEAD
from moe_plugin.hosts.timm.model import PRESETS
from moe_plugin.training.ensembles.cmcl import EnsembleSettings, flags, given_settings
from moe_plugin.utils.messages import Parser, short

SMOOTHING = 0.1
TASKS = "classify", "segment"
ENSEMBLE = (
    *flags("image", "pixel", "image"),
    ("ensemble-from", {"default": HEAD, "help": "first module that each member has for itself, "
                       "e.g. layers.1; patch_embed: whole networks (default: the heads alone)"}),
    ("ensemble-share-after", {"default": HEAD, "help": "module after which features are shared, "
                              "e.g. layers.0 (default: in the heads' own layer)"}))


def parser(description: str | None = None) -> argparse.ArgumentParser:
    """The options; those of the layers are the flags of the hosts."""
    p = Parser(prog="python -m moe_plugin.hosts.timm.train", description=description,
               formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, required=True,
                   help="folder with train/CLASS/* and val/CLASS/*; to segment: images/*, masks/*")
    p.add_argument("--out", type=Path, required=True, help="folder of the run")
    p.add_argument("--preset", default="tiny", choices=sorted(PRESETS), help="model sizes")
    p.add_argument("--example", choices=EXAMPLES, default=None,
                   help="write these images to --data first, if nothing is there")
    p.add_argument("--task", choices=TASKS, default="classify", help="classify images, or segment: "
                   "foreground and background (default: classify)")
    p.add_argument("--init", type=Path, default=None, metavar="CHECKPOINT", help="begin with these "
                   "weights: the checkpoint folder of a run, or published files PATH.rankN as PATH")
    p.add_argument("--evaluate", action="store_true", help="evaluate the run's checkpoint, or that "
                   "of --init, and train nothing")
    p.add_argument("--dense", action="store_true", help="without experts")
    p.add_argument("--freeze-experts", action="store_true", help="train everything else")
    p.add_argument("--flips", action="store_true", help="mirrored images are of the same class")
    for name, kind, value, text in [
            ("image", int, 0, "pixels of a side; 0: the preset's"),
            ("experts", int, 0, "of a layer, over all ranks; 0: the preset's"),
            ("widen", int, 1, "with --dense: times the inner width, of MLPs in experts' places"),
            ("epochs", int, 20, "passes over the images"),
            ("batch-size", int, 32, "images of a rank in a step"),
            ("lr", float, 3e-3, "highest learning rate"),
            ("weight-decay", float, 0.05, "of matrices"),
            ("warm-up", float, 0.1, "share of the steps in which the rate rises"),
            ("clip", float, 3.0, "gradient norm"), ("seed", int, 1, "of weights and order"),
            ("log-every", int, 10, "steps between two records"),
            ("timeout", float, 300.0, "seconds that a rank waits for another one")]:
        p.add_argument(f"--{name}", type=kind, default=value, help=f"{text} (default: {value})")
    p.add_argument("--label-smoothing", type=float, default=None, help="share of the label that "
                   f"all classes get (default: {SMOOTHING}; with an ensemble there is none)")
    group = p.add_argument_group("ensemble")
    for name, options in ENSEMBLE:
        group.add_argument("--" + name, **options)
    add_arguments(p, skip={"num_experts", "observe.jsonl", "observe.interval"})
    return p


def ensemble_of(args: argparse.Namespace) -> EnsembleSettings | None:
    """The ensemble that the arguments ask for; None: one output.

    Raises: ValueError: an argument out of bounds, or one that has no effect.
    """
    if args.task == "classify" and args.ensemble_heads and args.oracle_unit == "pixel":
        raise ValueError("oracle_unit=pixel is out of bounds: must be image with --task classify, "
                         "which gives an image one class; leave it out, or use --task segment")
    at_head = args.ensemble_share_after == HEAD
    return given_settings(args, ENSEMBLE, (
        (args.ensemble_hidden or not (at_head and args.ensemble_sharing), "ensemble_sharing",
         "0 without a layer of which features are shared",
         "give --ensemble-hidden, or --ensemble-share-after and --ensemble-from"),
        (at_head or args.ensemble_sharing, "ensemble_share_after", "left out without sharing",
         "give --ensemble-sharing 0.7"),
        (not args.label_smoothing, "label_smoothing", "0 with ensemble_heads, whose loss has labels"
         " as they are", "leave it out")))


def run_settings_of(given: Mapping[str, Any], stats: Path) -> RunConfig:
    """The settings of the run, by dotted path, whose records go to `stats`.

    Raises:
        ValueError: this training cannot follow one, or has an argument of its own for it; the
            message names the setting and the remedy.
    """
    for name, remedy in (("jsonl", "read stats.jsonl in --out"), ("interval", "use --log-every")):
        default = getattr(ObserveConfig(), name)
        if (value := given.get(f"observe.{name}", default)) != default:
            raise ValueError(f"observe.{name}={short(value)} does not fit {HOSTS['vision']}: leave "
                             f"it out, or {remedy}")
    settings = run_config({**given, "observe.jsonl": str(stats)})
    refuse_lacking(settings, "vision")
    return settings


def check_arguments(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """`ValueError` for an argument out of bounds, or one of experts for a model without.

    given: settings of the layers, by dotted path.
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
        raise ValueError(f"widen={args.widen} has no effect here: must be 1; it is "
                         "of a classifier with --dense and without --ensemble-heads")
    of_experts = sorted(path for path in given if not path.startswith("observe."))
    if args.dense and (args.experts or of_experts):
        what = f"experts={args.experts}" if args.experts else of_experts[0]
        raise ValueError(f"{what} has no effect with --dense, a model without experts: must be "
                         "left out; leave one of the two out")


def smoothing_of(args: argparse.Namespace) -> float:
    """Of the labels.

    Raises: ValueError: outside 0..1.
    """
    given = SMOOTHING if args.label_smoothing is None else args.label_smoothing
    if not 0 <= given < 1:
        raise ValueError(f"label_smoothing={given} is out of bounds: must be in [0, 1); use 0.1")
    return given
