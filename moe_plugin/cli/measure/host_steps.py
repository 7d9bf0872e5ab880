"""Short runs of a host's own training, with few layers: what its steps take that no part of a model
stands for.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.cli.corpus import build_corpus
from moe_plugin.cli.measure.child import call, free_port
from moe_plugin.cli.measure.host_sides import FIXED, Settings, Side, TrainShape
from moe_plugin.comm import Comm, TorchComm
from moe_plugin.observe.history.predictions import prediction_record
from moe_plugin.observe.prediction import MEASUREMENTS, STEPS
from moe_plugin.planner.measured import (
    HOST,
    HOST_LAYERS,
    HOST_SEQUENCES,
    HOST_UPDATE,
    Processor,
    Timing,
)
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.prediction import FILE, PARTS, Prediction, dump_prediction
from moe_plugin.quiet import FAIRSEQ, MEGATRON, hidden

TEXT_BYTES = 1_000_000
# as plans are; fairseq's own flags set a capacity unless none is said
DROPLESS: Settings = {"dispatch.name": "ragged", "dispatch.capacity_factor": None}
NEEDS = {"fairseq": "fairseq", "megatron": "megatron"}  # packages
TIMEOUT = timedelta(seconds=120)  # of the group: one rank's run may fail


def can_run(host: str, model: ModelShape, ranks: int, device: torch.device) -> bool:
    """Whether such runs exist: on a CPU, where the host is installed, experts divide over ranks,
    and fairseq's flags know so many choices.
    """
    return (device.type == "cpu" and find_spec(NEEDS[host]) is not None
            and model.experts % ranks == 0 and (host == "megatron" or model.top_k <= 2))


@dataclass(frozen=True, kw_only=True)
class HostSteps:
    """What a host's steps with so many layers take. skew: see `PredictionRecord`."""

    layers: int
    products_s: float
    optimizer_s: float
    skew: float


def with_host(processor: Processor, found: Sequence[HostSteps]) -> Processor:
    """With these measurements."""
    more = [Timing(name=name, size=one.layers, seconds=[max(1e-9, seconds)]) for one in found
            for name, seconds in ((HOST, one.products_s), (HOST_UPDATE, one.optimizer_s))]
    skew = max(1.0, sum(one.skew for one in found) / len(found))
    return replace(processor, timings=[*processor.timings, *more], skew=skew)


def measure_host(host: str, processor: Processor, comm: Comm) -> Processor:
    """With the host's steps with experts in each layer, by numbers of layers, and the skew of their
    load. Each rank runs them in processes of their own, where a host's groups and patches stay, on
    the text that all benchmarks train on.

    Every rank calls it; rank 0 has what was measured. As it was where the run of any rank fails.
    """
    found: list[HostSteps] = []
    for layers in HOST_LAYERS:
        first, failed = float(free_port()) if comm.rank == 0 else 0.0, False
        place = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(comm.agree_max([first])[0])
        try:
            found += [HostSteps(**one) for one in call(own_run, host, asdict(processor.model),
                                                       layers, comm.rank, comm.size, *place)]
        except subprocess.CalledProcessError:
            failed = True
        if comm.agree_max([float(failed)])[0]:
            return processor
    return with_host(processor, found) if found else processor


def own_run(host: str, model: dict[str, Any], layers: int, rank: int, ranks: int, address: str,
            port: int) -> list[dict[str, Any]]:
    """`host_steps` on one of new ranks, plain values."""
    logging.disable(logging.WARNING)  # of no interest in a run of few steps
    store = dist.TCPStore(address, port, ranks, is_master=rank == 0, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        with hidden([*FAIRSEQ, *MEGATRON]), tempfile.TemporaryDirectory() as folder:
            text = read_text(write_text(Path(folder)))
            found = host_steps(host, ModelShape(**model), layers, rank, ranks, text)
        dist.barrier()
        return [asdict(one) for one in found]
    finally:
        dist.destroy_process_group()


def host_steps(host: str, model: ModelShape, layers: int, rank: int, ranks: int,
               text: Tensor) -> list[HostSteps]:
    """Steps with so many layers, on ranks in an initialized group, whose process trains nothing
    else; on ranks other than 0 [].

    text: uint8 [N], what they train on.
    """
    shape = TrainShape(name=HOST, width=model.model_dim, inner=model.expert_dim,
                       experts=model.experts, top_k=model.top_k, layers=layers,
                       tokens=HOST_SEQUENCES * model.sequence * ranks, length=model.sequence)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, FILE)
        path.write_text(dump_prediction(Prediction(parts={PARTS[0]: [0.0] * 3})),
                        encoding="utf-8")
        side = train_side(host, shape, text,
                          {**FIXED["linear"], **DROPLESS, "observe.prediction": str(path)})
        for number in range(STEPS):
            side.step(number)
        if rank:
            return []
        row = json.loads((Path(folder) / MEASUREMENTS).read_text(encoding="utf-8"))
    record = prediction_record(row)
    return [HostSteps(layers=layers, products_s=record.parts[PARTS[0]],
                      optimizer_s=record.parts[PARTS[2]], skew=record.skew)]

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
        from moe_plugin.cli.measure import host_megatron as module
    else:
        from moe_plugin.cli.measure import host_fairseq as module
    return module.build(shape, text, comm.rank, comm.size, settings)
