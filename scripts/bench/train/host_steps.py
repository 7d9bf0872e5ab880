"""Build one side of a host's training on a text, on ranks that exist already."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from moe_plugin.cli.corpus import build_corpus
from moe_plugin.comm import TorchComm
from scripts.bench.train.host_sides import Settings, Side, TrainShape

TEXT_BYTES = 1_000_000


def write_text(folder: Path) -> str:
    """Write the training text to `folder` and return its path."""
    build_corpus(folder, size=TEXT_BYTES)
    return str(folder / "train.txt")


def read_text(path: str) -> Tensor:
    """Read the text that `write_text` wrote, as uint8 [N]."""
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)


def train_side(host: str, shape: TrainShape, text: Tensor, settings: Settings) -> Side:
    """Build a model with our layer and these settings. Every rank calls this in an initialized
    group.

    Args:
        host: "megatron" or "fairseq".
        shape: sizes of the model.
        text: the text returned by `read_text`.
        settings: settings of our layer.
    """
    torch.set_num_threads(1)
    # Megatron compiles some small functions, which costs 15 s in every process. None of these
    # functions belongs to a layer.
    torch.compiler.set_stance("force_eager")
    comm = TorchComm()
    # imported here, because each module imports its host
    if host == "megatron":
        from scripts.bench.train import host_megatron as module
    else:
        from scripts.bench.train import host_fairseq as module
    return module.build(shape, text, comm.rank, comm.size, settings)
