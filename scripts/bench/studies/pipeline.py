"""Compare measured and simulated steps of pipeline schedules, on emulated stages with slow links.

The study takes about 4 minutes. Computation is replaced by waiting, so that the pipeline stages do
not need CPU cores. Transfers are real.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_plugin.kernels.weight_grads import LaterGrads
from moe_plugin.planner.pipeline.schedules import Pipeline
from moe_plugin.planner.pipeline.slices import cut, slice_seconds
from scripts.bench.report import page
from scripts.bench.study import Option
from scripts.bench.sweep import alternate
from scripts.emulate import EmulatedCluster
from scripts.emulate.networks import chain

TITLE = "Pipeline schedules over slow links"
STAGES, FORWARD_S, SMALL = 4, 0.1, 64  # SMALL: number of tokens of a small transfer
OVERLAPPED = "1f1b, transfers behind compute"
DELAYED = "eager-1f1b, weights delayed"
# the simulator's mode by measured schedule
MODES = {"1f1b": "paired", OVERLAPPED: "overlapped", "eager-1f1b": "eager", DELAYED: "eager"}
OWN = {"eager-1f1b": {"schedule": "eager-1f1b"},
       DELAYED: {"schedule": "eager-1f1b", "delay_weights": True}}


def slice_s(length: int, context: int) -> float:
    """Return the duration of a slice's forward pass in seconds. The backward pass of a slice takes
    twice as long as its forward pass.
    """
    return 4e-3 + 1.2e-4 * max(length, 64) + 8e-8 * length * (context + length / 2)


class Load(NamedTuple):
    """The micro-batches of a training step.

    Attributes:
        length: number of tokens per sequence.
        width: width of the activations. The activations of one sequence have 1.25 MiB.
        forward_s: function that returns the duration of a slice's forward pass in seconds. The
            function's arguments are the number of tokens in the slice and the number of tokens
            before the slice.
    """

    batches: int
    length: int
    width: int
    forward_s: Callable[[int, int], float]


LOADS = {"schedules": Load(16, 1024, 320, lambda length, context: FORWARD_S),
         "slices": Load(2, 2048, 160, slice_s)}


class WaitFunction(torch.autograd.Function):
    """An autograd function that waits for as long as a stage would compute. Half of the waiting
    time of the backward pass represents the gradients of the weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, stage: WaitingStage) -> Tensor:
        ctx.seconds, ctx.stage = seconds, stage
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)

        def weights() -> dict[str, Tensor | None]:
            time.sleep(ctx.seconds)
            return {}

        if ctx.stage.later is None:
            weights()
        else:
            ctx.stage.later.add(weights)
        return grad, None, None


class WaitingStage(nn.Module):
    """A pipeline stage that waits instead of computing. The stage has the attributes and methods
    that Megatron's schedules use.
    """

    position_embedding_type, model_type = "none", None
    later: LaterGrads | None = None

    def __init__(self, load: Load, config: Any) -> None:
        super().__init__()
        self.load, self.config, self.weight = load, config, nn.Parameter(torch.ones(1))
        self.taken: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        [self.taken] = tensors

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the output of the stage, [l, 1, D]. The output of the last stage is [1, l].

        Args:
            input_ids: token ids, [1, l].
            position_ids: positions, [1, l].
        """
        length, start = input_ids.shape[1], int(position_ids[0, 0])
        x = torch.zeros(length, 1, self.load.width) if dist.get_rank() == 0 else self.taken
        y = WaitFunction.apply(x + self.weight, self.load.forward_s(length, start), self)
        return y.mean(-1).t() if dist.get_rank() == STAGES - 1 else y


def forward_step(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    positions = torch.arange(model.load.length)[None]
    return (model(positions, positions),
            lambda output: (output.mean(), {"loss": output.detach().mean()}))


def one_way_s(length: int, width: int) -> float:
    """Return the duration in seconds of a transfer between neighbouring stages. The ranks of all
    stages share the clock of one machine.
    """
    rank, sizes, tries = dist.get_rank(), torch.empty(length, 1, width), 5
    sent = torch.zeros(tries, dtype=torch.float64)
    got = torch.zeros(tries, dtype=torch.float64)
    for number in range(tries):
        dist.barrier()
        if rank == 1:
            work = dist.irecv(sizes, 0)
            time.sleep(0.1)
            work.wait()
            got[number] = time.monotonic()
        elif rank == 0:
            time.sleep(0.3)
            sent[number] = time.monotonic()
            dist.send(sizes, 1)
    for moments in (sent, got):
        dist.all_reduce(moments)
    return float((got - sent).median())


def measure_stages(part: str, schedules: Mapping[str, dict[str, Any] | None],
                   rounds: int) -> dict[str, Any]:
    """On each rank, measure the transfer of all tokens, the transfer of few tokens, and the start
    and end of steps.
    """
    from megatron.core import parallel_state as ps

    from moe_plugin.config import PipelineConfig
    from moe_plugin.hosts.megatron.compat import cpu
    from moe_plugin.hosts.megatron.compat.names import TransformerConfig, get_forward_backward_func
    from moe_plugin.hosts.megatron.pipeline import forward_backward_func

    cpu.enable(force=True)
    ps.initialize_model_parallel(1, STAGES)
    load, native = LOADS[part], get_forward_backward_func()
    stage = WaitingStage(load, TransformerConfig(
        num_layers=STAGES, hidden_size=load.width, num_attention_heads=1,
        use_cpu_initialization=True, pipeline_model_parallel_size=STAGES,
        pipeline_dtype=torch.float32))
    steps = {name: forward_backward_func(PipelineConfig(**settings), native) if settings else
             _overlapped if name == OVERLAPPED else native for name, settings in schedules.items()}
    passes = {"forward_step_func": forward_step, "data_iterator": None, "model": stage,
              "num_microbatches": load.batches, "seq_length": load.length, "micro_batch_size": 1}
    send_s = [one_way_s(length, load.width) for length in (load.length, SMALL)]

    def moments(run: Callable[..., Any]) -> tuple[float, float]:
        dist.barrier()
        start = time.monotonic()
        run(**passes)
        return start, time.monotonic()

    return {"send_s": send_s, "moments": alternate(
        {name: partial(moments, run) for name, run in steps.items()}, rounds, warm_up=0)}


def _overlapped(**passes: Any) -> None:
    # runs the order of 1F1B with our transfers, to separate their gain from that of eager's order
    from megatron.core import parallel_state as ps

    from moe_plugin.hosts.megatron.pipeline.executor import Step

    group = ps.get_pipeline_model_parallel_group()
    Step(passes, passes["model"].config, group, group).run()


def slices_of(part: str) -> dict[str, tuple[int, ...]]:
    """Return the best slices of a long sequence, and four slices of equal length."""
    if part == "schedules":
        return {}
    load = LOADS[part]
    best = cut(slice_s, load.length, 1 + (STAGES - 1) / load.batches, granularity=SMALL).slices
    return {"terapipe": best, "terapipe, four equal slices": (load.length // 4,) * 4}


def row(part: str, rate_mbit_s: float, rounds: int) -> dict[str, Any]:
    """Measure and predict all pipeline schedules for one link bandwidth."""
    load, slices = LOADS[part], slices_of(part)
    names = ["1f1b", *slices] if slices else list(MODES)
    settings = {name: {"schedule": "terapipe", "slices": ",".join(map(str, slices[name]))}
                if name in slices else OWN.get(name) for name in names}
    with EmulatedCluster(STAGES, 1, network=chain(STAGES, 1e6 * rate_mbit_s)) as cluster:
        ranks = cluster.run(measure_stages, part, settings, rounds, timeout_s=600,
                            group_timeout_s=300)
    whole_s, small_s = ranks[0]["send_s"]
    token_s = max(0.0, whole_s - small_s) / (load.length - SMALL)
    forward_s = load.forward_s(load.length, 0)
    line = Pipeline(stages=STAGES, micro_batches=load.batches, forward_s=forward_s,
                    backward_s=2 * forward_s, send_s=whole_s)
    found: dict[str, Any] = {"rate_mbit_s": rate_mbit_s, "send_s": whole_s, "slices": slices,
                             "ideal_s": line.ideal_s}
    for name in names:
        if name in slices:
            seconds = slice_seconds(slice_s, slices[name])
            outcome = Pipeline(
                stages=STAGES, micro_batches=load.batches, slices=len(seconds), forward_s=seconds,
                backward_s=tuple(2 * s for s in seconds),
                send_s=tuple(small_s + token_s * (n - SMALL) for n in slices[name])).simulate()
        else:
            late = forward_s if name == DELAYED else 0.0
            outcome = dataclasses.replace(line, delayed_s=late).simulate(MODES[name])
        every = zip(*(rank["moments"][name] for rank in ranks), strict=True)
        steps = [max(end for _, end in step) - min(start for start, _ in step) for step in every]
        found[name] = {"measured_s": statistics.median(steps), "steps_s": steps,
                       "predicted_s": outcome.seconds}
    return found


def cells_of(seen: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    return [{**rates, **rates[name], "name": name, "base": rates["1f1b"]}
            for rates in seen["rows"] for name in names]


def schedules_part(seen: dict[str, Any]) -> list[str]:
    load = LOADS["schedules"]
    return page(__name__, seen, load=load, bytes=4 * load.length * load.width,
                backward_s=2 * FORWARD_S, cells=cells_of(seen, list(MODES)))


def slices_part(seen: dict[str, Any]) -> list[str]:
    slices = seen["rows"][0]["slices"]
    return page(__name__, seen, "slices", load=LOADS["slices"],
                best=", ".join(map(str, slices["terapipe"])),
                cells=cells_of(seen, ["1f1b", *slices]))


def measure_part(part: str, args: argparse.Namespace) -> dict[str, Any]:
    return {"rows": [row(part, rate, args.rounds) for rate in args.rates], "rounds": args.rounds}


PARTS = {"schedules": (partial(measure_part, "schedules"), schedules_part),
         "slices": (partial(measure_part, "slices"), slices_part)}
OPTIONS = {
    "rates": Option((200.0, 100.0), "bandwidths of the links in Mbit/s", quick=(200.0,)),
    "rounds": Option(3, "timed steps of each schedule", quick=1),
}
