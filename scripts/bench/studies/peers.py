"""Compare two ways to train a model over a slow link: two peers that each train the whole model,
and a pipeline with two stages.

The study takes about 4 minutes.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.cli.figures import log_ticks, pyplot, save_figure
from moe_plugin.memory.tiers import DiskTier
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.training.resilience.averaging_peers import StreamedPeer
from scripts.bench.study import Option
from scripts.bench.toy import batches, loss_of, makers, through
from scripts.emulate import EmulatedCluster

TITLE = "Whole models on two peers, compared with a pipeline over the same link"
VOCABULARY, WIDTH, EXPERTS, SEQUENCES, LENGTH = 32, 32, 4, 16, 128
TOKENS, BLOCKS, BATCHES, PORT = SEQUENCES * LENGTH, 2, 4, 29510
OPTIMIZER = partial(torch.optim.SGD, lr=0.01)
MODEL = makers(VOCABULARY, BLOCKS, WIDTH, EXPERTS, WIDTH, heads=1)
DATA = {"count": BATCHES, "sequences": SEQUENCES, "length": LENGTH, "symbols": VOCABULARY}
loss = partial(loss_of, BATCHES)


def peer(lighthouse: str, addresses: list[str], every: int, folder: str) -> dict[str, float]:
    """Run one of the two peers on this rank. Return two times in seconds: for `every` training
    steps, and for averaging the weights.
    """
    rank = int(os.environ["RANK"])
    # torchft finds its node by the host name, which no name server resolves in the emulation
    socket.sethostname(addresses[rank])
    torch.manual_seed(0)
    trainer = StreamedTrainer(MODEL, loss, OPTIMIZER, DiskTier(Path(folder, str(rank))))
    working = StreamedPeer(trainer, lighthouse, rank, every, timeout_s=120)
    working.step(batches(rank, **DATA))  # joins the other peer and warms up
    while not working.average() or working.replica.members < 2:
        pass
    trainer.steps, began = 0, time.perf_counter()
    for step in range(every - 1):
        working.step(batches(2 * step + rank, **DATA))
    trained = time.perf_counter()
    working.step(batches(2 * every + rank, **DATA))
    ended = time.perf_counter()
    members, size = working.replica.members, sum(b.layout.nbytes for b in trainer.blocks)
    step_s = (trained - began) / (every - 1)
    time.sleep(0.5)  # lets the other peer finish its transfers before this one closes
    working.close()
    trainer.close()
    return {"seconds": ended - began, "step_s": step_s, "members": members, "bytes": size,
            "average_s": ended - trained - step_s}


def stage(steps: int) -> dict[str, float]:
    """Run one of the two pipeline stages on this rank, with all weights in memory. Return the time
    of the training steps in seconds.
    """
    rank, half = dist.get_rank(), BLOCKS // 2 + 1
    torch.manual_seed(0)
    made = [make() for make in MODEL]
    blocks = made[:half] if rank == 0 else made[half:]
    optimizer = OPTIMIZER([p for block in blocks for p in block.parameters()])
    shape, compute = (SEQUENCES, LENGTH, WIDTH), 0.0

    def one(step: int) -> None:
        nonlocal compute
        data, sent = batches(step, **DATA), []
        received = [torch.empty(shape) for _ in data]
        tickets = [dist.irecv(x, 1 - rank, tag=m) for m, x in enumerate(received)]
        if rank == 0:
            outputs = []
            for m, (ids, _) in enumerate(data):
                began = time.perf_counter()
                outputs.append(through(blocks, ids))
                compute += time.perf_counter() - began
                sent.append(dist.isend(outputs[-1][0].detach(), 1, tag=m))
        for m, (_, target) in enumerate(data):
            tickets[m].wait()
            began = time.perf_counter()
            if rank == 0:
                torch.autograd.backward(outputs[m], [received[m], torch.ones(())])
            else:
                x = received[m].requires_grad_()
                y, balance = through(blocks, x)
                (loss(y, target) + balance).backward()
            compute += time.perf_counter() - began
            if rank == 1:
                sent.append(dist.isend(x.grad, 0, tag=m))
        for ticket in sent:
            ticket.wait()
        optimizer.step()
        optimizer.zero_grad()

    one(0)
    dist.barrier()
    compute, began = 0.0, time.perf_counter()
    for step in range(steps):
        one(step + 1)
    dist.barrier()
    return {"seconds": time.perf_counter() - began, "compute_s": compute / steps}


def measure_rate(rate: float, every: int, steps: int) -> dict[str, Any]:
    with EmulatedCluster(2, 1, rate_bit_s=rate, delay_s=5e-3) as cluster:
        stages = cluster.run(stage, steps, timeout_s=300)
    with (EmulatedCluster(2, 1, rate_bit_s=rate, delay_s=5e-3) as cluster,
          tempfile.TemporaryDirectory(dir=Path.cwd()) as folder):
        address = f"http://{cluster.nodes[0].address}:{PORT}"
        program = Path(sys.executable).with_name("torchft_lighthouse")
        cluster.command(0, [str(program), "--bind", f"0.0.0.0:{PORT}", "--min_replicas", "2",
                            "--join_timeout_ms", "60000", "--heartbeat_timeout_ms", "20000"],
                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ranks = cluster.start(peer, address, [node.address for node in cluster.nodes], every,
                              folder, join=False)
        ends = cluster.collect(ranks, 150)
    failed = [end.error for end in ends if end.error is not None]
    if failed:
        raise RuntimeError(failed[0])
    peers = [end.value for end in ends]
    if {end["members"] for end in peers} != {2}:
        raise RuntimeError("a peer did not take part in the averaging. Run the command again on a "
                           "machine that is less busy")
    pipeline = steps * BATCHES * TOKENS / max(end["seconds"] for end in stages)
    whole = 2 * every * BATCHES * TOKENS / max(end["seconds"] for end in peers)
    wire, edge = rate / 8, 4 * TOKENS * WIDTH
    step_s, size = max(end["step_s"] for end in peers), peers[0]["bytes"]
    # The pipeline waits for all outputs in one direction and for the last gradient in the other.
    piped_s = max((BATCHES + 1) * edge / wire + max(s["compute_s"] for s in stages) / BATCHES,
                  max(s["compute_s"] for s in stages))
    predicted = 2 * BATCHES * TOKENS / (step_s + size / wire / every)
    return {"rate_mbit_s": rate / 1e6, "pipeline_tokens_s": pipeline, "peers_tokens_s": whole,
            "factor": whole / pipeline, "model_bytes": size, "step_s": step_s,
            "average_s": max(end["average_s"] for end in peers),
            "predicted": predicted * piped_s / (BATCHES * TOKENS)}


def plot(seen: dict[str, Any], path: Path) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(5, 3.2))
    rates = [row["rate_mbit_s"] for row in seen["rows"]]
    axis.plot(rates, [row["factor"] for row in seen["rows"]], "o", label="measured")
    axis.plot(rates, [row["predicted"] for row in seen["rows"]], "--", label="predicted")
    axis.set_xlabel("link, Mbit/s")
    axis.set_ylabel("tokens/s, two peers over pipeline")
    log_ticks(axis, rates)
    axis.set_ylim(bottom=0)
    axis.legend()
    save_figure(figure, path)


PLOTS = {"peers.png": plot}
OPTIONS = {
    "rates": Option((50.0, 20.0, 10.0), "bandwidths of the link in Mbit/s", quick=(50.0,)),
    "every": Option(30, "number of steps between averaging rounds", quick=3),
    "steps": Option(6, "number of timed steps of the pipeline", quick=2),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    return {"every": args.every, "rows": [measure_rate(rate * 1e6, args.every, args.steps)
                                          for rate in args.rates]}
