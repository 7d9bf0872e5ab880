"""Training runs of the vision example. Each run uses one thread."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moe_plugin.hosts.timm.data import write_example
from scripts.bench.study import ROOT, Option, folder_of_runs, run_options

CIFAR = "cifar10"
CIFAR_OPTIONS = ["--preset", "cifar", "--flips", "--batch-size", "128"]


def image_options(name: str, data: str) -> dict[str, Option]:
    """Return the options of a study that trains on images. `folder_of_images` reads these options.

    Args:
        data: name of the default data set of digit images.
    """
    return {
        "data": Option(data, f"images to train on. {CIFAR} takes hours and needs its npm package",
                       choices=(data, CIFAR)),
        "seeds": Option(3, "number of runs of each model", quick=1, least=1),
        "epochs": Option(12, "number of epochs of a run", quick=1, least=1),
        "images": Option(0, "maximum number of images to train on and to validate with; 0 uses all",
                         quick=100, least=0),
        **run_options(name)}


def folder_of_images(args: argparse.Namespace) -> Path:
    """Return the folder for a study's runs. The images are written to its subfolder `images`.

    Raises:
        ValueError: if the package that provides the images is not installed.
    """
    place = folder_of_runs(args) / f"{args.data} {args.images or 'all'}, {args.epochs} epochs"
    place.mkdir(exist_ok=True)
    write_example(args.data, place / "images", most=args.images)
    return place


def train_images(out: Path, *options: str) -> list[dict[str, Any]]:
    """Train in the folder `out`, and return the records of the training log. If the folder contains
    an unfinished run, the run is continued.
    """
    subprocess.run(
        [sys.executable, "-m", "moe_plugin.hosts.timm.train", "--out", str(out), *options],
        check=True, stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1",
             "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
    return [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]


def train_each(jobs: int, runs: Mapping[Any, Sequence[Any]]) -> dict[Any, list[dict[str, Any]]]:
    """Call `train_images` with the arguments of each run, and return the records by run. At the
    same time, `jobs` runs are trained.
    """
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {key: pool.submit(train_images, *given) for key, given in runs.items()}
        return {key: records.result() for key, records in waiting.items()}


def spread(values: Sequence[float], factor: float = 1.0, unit: str = "",
           digits: int = 2) -> str:
    """Format the mean, followed by the minimum and maximum in parentheses."""
    shown = [factor * value for value in values]
    mean, least, most = (f"{value:.{digits}f}"
                         for value in (statistics.mean(shown), min(shown), max(shown)))
    return f"{mean} ({least} to {most}) {unit}".strip()


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Keep the earlier results for other images. Digits come first, CIFAR-10 is `found[CIFAR]`.
    The key `data` names the images, and is absent from old results for digits.
    """
    if new.get("data") == CIFAR:
        return new if old.get("data") == CIFAR else {**old, CIFAR: new}
    cifar = old if old.get("data") == CIFAR else old.get(CIFAR)
    return {**new, CIFAR: cifar} if cifar else new
