"""One side of a host's training, on a text: its start on ranks that are there."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from moe_plugin.cli.corpus import build_corpus
from moe_plugin.comm import TorchComm
from scripts.bench.train.host_sides import Settings, Side, TrainShape

TEXT_BYTES = 1_000_000


def write_text(folder: Path) -> str:
    """The text to train on, in `folder`; returns its path."""
    build_corpus(folder, size=TEXT_BYTES)
    return str(folder / "train.txt")


def read_text(path: str) -> Tensor:
    """What `write_text` wrote, uint8 [N]."""
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)


def train_side(host: str, shape: TrainShape, text: Tensor, settings: Settings) -> Side:
    """A model of ours with these settings; every rank calls it in an initialized group.

    text: what `read_text` gives.
    """
    torch.set_num_threads(1)
    # Megatron compiles some small functions: 15 s in every process, and none of them is a layer's
    torch.compiler.set_stance("force_eager")
    comm = TorchComm()
    # one of them is imported: they import their host
    if host == "megatron":
        from scripts.bench.train import host_megatron as module
    else:
        from scripts.bench.train import host_fairseq as module
    return module.build(shape, text, comm.rank, comm.size, settings)
