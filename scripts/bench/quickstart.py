"""The model of the quick start, which its script trains in both hosts."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from moe_plugin.cli.corpus import build_corpus
from scripts.bench.study import ROOT, folder_of_runs

HOSTS = ("fairseq", "megatron")


@cache
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "scripts" / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the module look it up there
    spec.loader.exec_module(module)
    return module


def settings(steps: int) -> dict[str, Any]:
    return quickstart().settings(ROOT / "configs" / "quickstart.yaml", steps)


def data_of(host: str, corpus: Path) -> Path:
    """Convert the corpus for a host, and return the path of the data."""
    return quickstart().HOST_STEPS[host][0](corpus)


def command_of(host: str, s: dict[str, Any], data: Path, folder: Path) -> list[str]:
    """Return the quick start's training command for a host."""
    return quickstart().HOST_STEPS[host][1](s, data, folder, False)


def train(host: str, folder: Path, command: list[str], steps: int) -> dict[str, Any]:
    """Run a training command, unless `folder` contains the complete run. Return the results."""
    return quickstart().train(quickstart().Run(host, folder, command, steps))[0]


def begin(args: argparse.Namespace) -> tuple[Path, Path, dict[str, Any]]:
    """Return (folder of the runs, folder of the corpus, versions and unigram entropy)."""
    place = folder_of_runs(args)
    info = build_corpus(place / "corpus", size=settings(args.steps)["corpus_bytes"])
    return place, place / "corpus", {"python": platform.python_version(),
                                     "torch": torch.__version__,
                                     "unigram_entropy": info.unigram_entropy}
