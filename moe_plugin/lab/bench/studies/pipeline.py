"""Pipeline schedules on emulated stages with slow links: measured steps against simulated ones.

Takes about 4 minutes; of a part alone, the other one stays as the folder has it. A pass waits for
its time in place of computing, so that the stages need no processors of their own; transfers are
real.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_plugin.lab.bench.report import paragraph, table
from moe_plugin.lab.bench.study import Option
from moe_plugin.lab.emulate import EmulatedCluster
from moe_plugin.lab.emulate.networks import chain
from moe_plugin.planner.pipeline.schedules import Pipeline
from moe_plugin.planner.pipeline.slices import cut, slice_seconds
from moe_plugin.planner.units import show_time

STAGES, BATCHES = 4, 16
FORWARD_S, BACKWARD_S = 0.1, 0.2
LENGTH, WIDTH = 1024, 320  # 1.25 MiB of activations
# a long sequence and few micro-batches: tokens, width (1.25 MiB), micro-batches
LONG, NARROW, FEW = 2048, 160, 2
# what is measured: (schedule, mode of the planner)
SCHEDULES = (("1f1b", "paired"), ("1f1b, transfers behind compute", "overlapped"),
             ("eager-1f1b", "eager"))


COLUMNS = ["Mbit/s", "transfer ms", "schedule", "step s", "predicted s", "difference",
           "1f1b / this", "predicted"]


class WaitFunction(torch.autograd.Function):
    """WaitFunction as long as a stage would compute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        """The input, after a while."""
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient, after a while."""
        time.sleep(ctx.backward_s)
        return grad, None, None


class WaitingStage(nn.Module):
    """What Megatron's schedules need of a stage."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.weight = config, nn.Parameter(torch.ones(1))
        self.first, self.model_type = dist.get_rank() == 0, None
        self.taken: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Megatron gives the input of the next pass."""
        [self.taken] = tensors

    def forward(self) -> Tensor:
        """Output [LENGTH, 1, WIDTH]."""
        x = torch.zeros(LENGTH, 1, WIDTH) if self.first else self.taken
        return WaitFunction.apply(x + self.weight, FORWARD_S, BACKWARD_S)


def forward_step(data: Iterator[Any],
                 model: WaitingStage) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Megatron's `forward_step_func`."""
    return model(), lambda output: (output.mean(), {"loss": output.detach().mean()})


def slice_s(length: int, context: int) -> float:
    """Seconds of a slice's forward pass; backward takes twice as long."""
    return 4e-3 + 1.2e-4 * max(length, 64) + 8e-8 * length * (context + length / 2)


class SliceStage(WaitingStage):
    """A stage that waits as long as the slice at these positions takes."""

    position_embedding_type = "none"

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Output [l, 1, NARROW] of input_ids and position_ids [1, l]; on the last stage [1, l]."""
        length, start = input_ids.shape[1], int(position_ids[0, 0])
        x = torch.zeros(length, 1, NARROW) if self.first else self.taken
        seconds = slice_s(length, start)
        y = WaitFunction.apply(x + self.weight, seconds, 2 * seconds)
        return y.mean(-1).t() if dist.get_rank() == STAGES - 1 else y


def whole_step(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Megatron's `forward_step_func` for whole sequences."""
    positions = torch.arange(LONG)[None]
    return (model(positions, positions),
            lambda output: (output.mean(), {"loss": output.detach().mean()}))


def one_way_s(length: int = LENGTH, width: int = WIDTH, tries: int = 5) -> float:
    """Seconds of a transfer between neighbours: clocks of one machine are one clock."""
    rank, sizes = dist.get_rank(), torch.empty(length, 1, width)
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


def built(kind: type[WaitingStage], width: int) -> tuple[WaitingStage, Any]:
    """This rank's stage, and Megatron's function for a step."""
    from megatron.core import parallel_state as ps

    from moe_plugin.hosts.megatron.compat import cpu
    from moe_plugin.hosts.megatron.compat.names import TransformerConfig, get_forward_backward_func

    cpu.enable(force=True)
    ps.initialize_model_parallel(1, STAGES)
    stage = kind(TransformerConfig(
        num_layers=STAGES, hidden_size=width, num_attention_heads=1, use_cpu_initialization=True,
        pipeline_model_parallel_size=STAGES, pipeline_dtype=torch.float32))
    return stage, get_forward_backward_func()


def measure_stages(rounds: int) -> dict[str, Any]:
    """On each rank: seconds of a transfer, and of steps by schedule."""
    from moe_plugin.config import PipelineConfig
    from moe_plugin.hosts.megatron.trainer.pipeline import forward_backward_func

    stage, native = built(WaitingStage, WIDTH)
    steps = {
        "1f1b": native,
        "1f1b, transfers behind compute": _overlapped,
        "eager-1f1b": forward_backward_func(PipelineConfig(schedule="eager-1f1b"), native),
    }
    passes = {"forward_step_func": forward_step, "data_iterator": None, "model": stage,
              "num_microbatches": BATCHES, "seq_length": LENGTH, "micro_batch_size": 1}
    return {"send_s": one_way_s(), "moments": moments_of(steps, passes, rounds)}


def measure_slices(rounds: int, slices: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The same of a long sequence, whole and in slices; transfers: of all tokens, of 64."""
    from moe_plugin.config import PipelineConfig
    from moe_plugin.hosts.megatron.trainer.pipeline import forward_backward_func

    stage, native = built(SliceStage, NARROW)
    steps = {"1f1b": native}
    for name, lengths in slices.items():
        text = ",".join(map(str, lengths))
        steps[name] = forward_backward_func(PipelineConfig(schedule="terapipe", slices=text),
                                            native)
    passes = {"forward_step_func": whole_step, "data_iterator": None, "model": stage,
              "num_microbatches": FEW, "seq_length": LONG, "micro_batch_size": 1}
    return {"send_s": [one_way_s(LONG, NARROW), one_way_s(64, NARROW)],
            "moments": moments_of(steps, passes, rounds)}


def moments_of(steps: dict[str, Any], passes: dict[str, Any],
               rounds: int) -> dict[str, list[tuple[float, float]]]:
    """When steps began and ended on this rank, by schedule."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            dist.barrier()
            start = time.monotonic()
            run(**passes)
            found[name].append((start, time.monotonic()))
    return found


def steps_of(ranks: list[dict[str, Any]], name: str) -> list[float]:
    """Seconds of each step over all ranks."""
    every = zip(*(rank["moments"][name] for rank in ranks), strict=True)
    return [max(end for _, end in step) - min(start for start, _ in step) for step in every]


def slice_row(rate_mbit_s: float, rounds: int) -> dict[str, Any]:
    """A long sequence over links of one rate: whole, in the best slices, in as many equal ones."""
    best = cut(slice_s, LONG, 1 + (STAGES - 1) / FEW, granularity=64).slices
    slices = {"terapipe": best, "terapipe, four equal slices": (LONG // 4,) * 4}
    with EmulatedCluster(STAGES, 1) as cluster:
        cluster.set_network(chain(STAGES, 1e6 * rate_mbit_s))
        ranks = cluster.run(measure_slices, rounds, slices, timeout_s=600, group_timeout_s=300)
    whole_s, small_s = ranks[0]["send_s"]
    token_s = max(0.0, whole_s - small_s) / (LONG - 64)
    forward = slice_s(LONG, 0)
    predicted = {"1f1b": Pipeline(stages=STAGES, micro_batches=FEW, forward_s=forward,
                                  backward_s=2 * forward,
                                  send_s=whole_s).simulate("paired").seconds}
    for name, lengths in slices.items():
        seconds = slice_seconds(slice_s, lengths)
        predicted[name] = Pipeline(
            stages=STAGES, micro_batches=FEW, slices=len(lengths), forward_s=seconds,
            backward_s=tuple(2 * s for s in seconds),
            send_s=tuple(small_s + token_s * (n - 64) for n in lengths)).simulate().seconds
    found: dict[str, Any] = {"rate_mbit_s": rate_mbit_s, "send_s": whole_s, "slices": slices}
    for name, seconds in predicted.items():
        steps = steps_of(ranks, name)
        found[name] = {"measured_s": statistics.median(steps), "steps_s": steps,
                       "predicted_s": seconds}
    return found


def _overlapped(**passes: Any) -> None:
    # the order of 1F1B, by our transfers: what eager's order adds to them
    from megatron.core import parallel_state as ps

    from moe_plugin.hosts.megatron.trainer.pipeline.executor import Step

    group = ps.get_pipeline_model_parallel_group()
    Step(passes, passes["model"].config, group, group).run()


def row(rate_mbit_s: float, rounds: int) -> dict[str, Any]:
    """All schedules over links of one rate."""
    with EmulatedCluster(STAGES, 1) as cluster:
        cluster.set_network(chain(STAGES, 1e6 * rate_mbit_s))
        ranks = cluster.run(measure_stages, rounds, timeout_s=600, group_timeout_s=300)
    found: dict[str, Any] = {"rate_mbit_s": rate_mbit_s, "send_s": ranks[0]["send_s"]}
    line = Pipeline(stages=STAGES, micro_batches=BATCHES, forward_s=FORWARD_S,
                    backward_s=BACKWARD_S, send_s=found["send_s"])
    for name, mode in SCHEDULES:
        steps = steps_of(ranks, name)
        found[name] = {"measured_s": statistics.median(steps), "steps_s": steps,
                       "predicted_s": line.simulate(mode).seconds}
    return {**found, "ideal_s": line.ideal_s}


def page(seen: dict[str, Any]) -> str:
    """The page."""
    parts = {"schedules": schedules_part, "slices": slices_part}
    return "\n".join(line for name, part in parts.items() if name in seen
                     for line in part(seen[name]))


def cells_of(rows: list[dict[str, Any]], names: list[str]) -> list[list[str]]:
    """Of a table, by rate and schedule."""
    cells = []
    for rates in rows:
        base = rates["1f1b"]
        for name in names:
            one = rates[name]
            cells.append([
                f"{rates['rate_mbit_s']:g}", f"{1e3 * rates['send_s']:.0f}", name,
                f"{one['measured_s']:.2f}", f"{one['predicted_s']:.2f}",
                f"{one['measured_s'] / one['predicted_s'] - 1:+.1%}",
                f"{base['measured_s'] / one['measured_s']:.2f}",
                f"{base['predicted_s'] / one['predicted_s']:.2f}"])
    return cells


def slices_part(seen: dict[str, Any]) -> list[str]:
    """Of the page: a long sequence."""
    slices = seen["rows"][0]["slices"]
    best = ", ".join(map(str, slices["terapipe"]))
    return [
        "## Slices of a long sequence", "",
        paragraph(
            f"The same stages and links, with {FEW} micro-batches a step of one sequence of {LONG} "
            "tokens each. A forward pass of a slice of l tokens after c others waits 4 ms + "
            "0.12 ms max(l, 64) + 80 ns l (c + l / 2), a backward pass twice as long. TeraPipe "
            f"runs slices of {best} tokens, which its dynamic program finds best. Predicted: the "
            "event simulator, with the measured times of a transfer of all tokens and of 64. "
            f"Median of {seen['rounds']} steps. Load average: "
            f"{', '.join(f'{x:.1f}' for x in seen['load'])}."),
        "", table(COLUMNS, cells_of(seen["rows"], ["1f1b", *slices])), ""]


def schedules_part(seen: dict[str, Any]) -> list[str]:
    """Of the page: many micro-batches."""
    return [
        "# Pipeline schedules over slow links", "",
        paragraph(
            f"Made by `moe-plugin bench pipeline`. {STAGES} stages on emulated nodes in "
            f"a chain, {BATCHES} micro-batches a step, activations of "
            f"{4 * LENGTH * WIDTH / 2**20:.2f} MiB. The schedules are Megatron's own function and "
            "ours, transfers are real (gloo over the emulated links); a pass waits in place of "
            f"computing ({show_time(FORWARD_S)} forward, {show_time(BACKWARD_S)} backward), "
            f"because four stages do not compute at a time on {seen['cores']} cores. Predicted: "
            "the event simulator (`moe_plugin/planner/pipeline`) with the measured time of one "
            "transfer; of Megatron's 1F1B it knows that both stages wait for a transfer, and that "
            "what crosses between two stages goes in turn over gloo (over NCCL it need not: "
            "`transport` in a file of `moe-plugin plan --pipeline`). The second schedule is 1F1B's "
            "order with the transfers of eager 1F1B. Median of "
            f"{seen['rounds']} steps. Without transfers a step takes "
            f"{seen['rows'][0]['ideal_s']:.2f} s. Load average: "
            f"{', '.join(f'{x:.1f}' for x in seen['load'])}."),
        "", table(COLUMNS, cells_of(seen["rows"], [name for name, _ in SCHEDULES])), ""]


PARTS = {"schedules": row, "slices": slice_row}
OPTIONS = {
    "rates": Option((200.0, 100.0), "of the links, Mbit/s", quick=(200.0,)),
    "rounds": Option(3, "steps of each schedule", quick=1),
    "parts": Option(tuple(PARTS), "of the page", choices=PARTS),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All parts."""
    return {part: {"rows": [PARTS[part](rate, args.rounds) for rate in args.rates],
                   "rounds": args.rounds, "cores": os.cpu_count(), "load": os.getloadavg()}
            for part in args.parts}


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Parts that were not measured again stay."""
    return {**old, **new}
