"""A run compares its steps with what was predicted of its plan (`observe.prediction`).

After `SKIPPED` steps, in which layers settle, `MEASURED` steps are timed: the whole step, and its
optimizer from complete gradients on. `PROFILED` more run under torch's profiler, which tells how
long a rank waits for others; in these, loads of ranks are counted, too. Then nothing is measured
any more.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from moe_plugin.comm.base import Comm
from moe_plugin.config import ObserveConfig
from moe_plugin.machine import device_name, wait_for_device
from moe_plugin.observe.history.predictions import PredictionRecord
from moe_plugin.observe.rank_skew import RankSkew
from moe_plugin.observe.sinks import JsonlSink
from moe_plugin.observe.timeline import EXCHANGES
from moe_plugin.planner.prediction import Prediction, load_prediction, measured_parts
from moe_plugin.run import RunFeature, StepFacts, StepGradients, StepInput

logger = logging.getLogger(__name__)

SKIPPED, MEASURED, PROFILED = 5, 10, 3
STEPS = SKIPPED + MEASURED + PROFILED
MEASUREMENTS = "measured.jsonl"  # next to the prediction, unless another file is given
Span = tuple[float, float]


class PredictionCheck(RunFeature):
    """Measures a run's steady steps and writes one record of them with their prediction.

    Args:
        config: `prediction`, the file of the `Prediction`; `jsonl`, where the record goes, else to
            `MEASUREMENTS` next to it; `timeline`, a step that another profiler has.
        comm: all ranks of the run; its rank 0 writes.
        device: of this rank.
        parameter_bytes: of this rank's parameters, which exist before the first step.
        host: what trains.
        models: this rank's parts of the model, whose MoE layers' load is counted.
        skipped, measured: steps.
    Raises:
        ValueError: the file holds no prediction.
    """

    def __init__(self, config: ObserveConfig, comm: Comm, device: torch.device,
                 parameter_bytes: int, host: str, models: Iterable[nn.Module] = (),
                 skipped: int = SKIPPED, measured: int = MEASURED) -> None:
        assert config.prediction is not None
        self.prediction: Prediction = load_prediction(config.prediction)
        self.file = config.jsonl or str(Path(config.prediction).parent / MEASUREMENTS)
        self.timeline = config.timeline
        self.comm, self.device, self.host = comm, device, host
        self.first, self.last, self.end = skipped, skipped + measured, skipped + measured + PROFILED
        self.memory = PeakMemory(device, parameter_bytes)
        self.skew = RankSkew(models)
        self.done, self.seconds, self.optimizer_s = 0, [], []  # type: int, list[float], list[float]
        self.exchange_s: list[float] = []
        self.peak_bytes = 0.0
        self._complete = self._updated = self._took = self._waited = 0.0
        self._hook: Any = None
        self._counts = False

    def begin(self) -> None:
        """Watches optimizers, and memory from here on."""
        self.memory.begin()
        self._hook = register_optimizer_step_post_hook(self._after_update)

    def _after_update(self, *_: Any) -> None:
        self._updated = time.perf_counter()

    @contextmanager
    def around_step(self, step: StepInput) -> Iterator[None]:
        """Times it, or records its exchanges."""
        self._counts = self.done < self.end and step.number != self.timeline
        if not self._counts:
            yield
            return
        begun = self._complete = self._updated = time.perf_counter()
        if self.done >= self.last:
            # the profiler takes memory, too
            self.peak_bytes = self.peak_bytes or self.memory.peak_bytes()
            with self.skew.listening(), profiled(self.device) as found:
                yield
            self._waited = found()
        else:
            yield
        self._took = time.perf_counter() - begun

    def after_backward(self, gradients: StepGradients) -> None:
        """The optimizer's part begins."""
        self._complete = time.perf_counter()

    def after_step(self, facts: StepFacts) -> None:
        """A step that changed no parameter does not count."""
        if not self._counts or not facts.made or facts.skipped:
            return
        if self.done >= self.last:
            self.exchange_s.append(self._waited)
        elif self.done >= self.first:
            self.seconds.append(self._took)
            self.optimizer_s.append(max(0.0, self._updated - self._complete))
        self.done += 1
        if self.done == self.end:
            self._finish(facts.number)

    def _finish(self, number: int) -> None:
        agree, count = self.comm.agree_max, len(self.seconds)
        *most, peak, skew = agree([*self.seconds, *self.optimizer_s, self.peak_bytes,
                                   self.skew.mean()])
        seconds, optimizer = median(most[:count]), median(most[count:2 * count])
        # the rank that the others wait for has no waiting of its own to count
        least = median(-one for one in agree([-one for one in self.exchange_s]))
        exchange = min(least, max(0.0, seconds - optimizer))
        record = PredictionRecord(
            step=number, host=self.host, predicted=self.prediction,
            machine=device_name(self.device), steps=count, seconds=seconds,
            parts=dict(measured_parts(seconds, optimizer, exchange)), memory_bytes=peak, skew=skew)
        self._stop()
        if self.comm.rank == 0:
            sink = JsonlSink(self.file)
            sink.write(record.as_row())
            sink.close()
            logger.info("%s", record.line())

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def close(self) -> None:
        """Says where a run was too short."""
        self._stop()
        if self.done < self.end and self.comm.rank == 0:
            logger.warning("the prediction was not compared: %d steps were made, and it takes %d",
                           self.done, self.end)


def prediction_check(config: ObserveConfig, comm: Comm, models: Iterable[nn.Module],
                     host: str) -> PredictionCheck | None:
    """What compares a run with its prediction, if the settings name one; see `PredictionCheck`.

    models: this rank's parts of the model.
    """
    if config.prediction is None:
        return None
    models = list(models)
    own = {id(p): p for model in models for p in model.parameters()}.values()
    device = next((p.device for p in own), comm.device)
    return PredictionCheck(config, comm, device,
                           sum(p.numel() * p.element_size() for p in own), host, models)


class PeakMemory:
    """The most memory of this rank: what torch has of a GPU; on a CPU what the process grows by,
    and its parameters.
    """

    def __init__(self, device: torch.device, parameter_bytes: int) -> None:
        self.device, self.parameter_bytes, self.before = device, parameter_bytes, 0

    def begin(self) -> None:
        """From here on."""
        if self.device.type == "cpu":
            try:
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
            except OSError:  # it is that of the process
                pass
            self.before = _status("VmRSS")

    def peak_bytes(self) -> float:
        """Since `begin`; 0: not known."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device))
        peak = _status("VmHWM")
        return float(max(0, peak - self.before) + self.parameter_bytes) if peak else 0.0


def _status(name: str) -> int:
    """Bytes, from the system's account of this process; 0: it has none."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            return next((int(line.split()[1]) << 10 for line in lines
                         if line.startswith(f"{name}:")), 0)
    except OSError:
        return 0


@contextmanager
def profiled(device: torch.device) -> Iterator[Callable[[], float]]:
    """Records what runs inside, on this device; gives a function that tells seconds of exchange in
    it.
    """
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # its own lines on stderr: start and stop
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=[ProfilerActivity.CPU, *gpu]) as recorded:
        yield lambda: exchange_s(recorded.events())
        wait_for_device(device)


def exchange_s(events: Iterable[Any]) -> float:
    """Seconds of exchanges during which this rank computes nothing.

    events: `torch.profiler.profile.events()`; used are `name`, `time_range` (microseconds) and
    `device_type`. Of a GPU its kernels count.
    """
    cpu, gpu = [], []  # type: list[Any], list[Any]
    for event in events:
        (cpu if event.device_type == torch.autograd.DeviceType.CPU else gpu).append(event)
    if any("nccl" in event.name.lower() for event in gpu):
        exchanges = [e for e in gpu if "nccl" in e.name.lower()]
        work = [e for e in gpu if "nccl" not in e.name.lower()]
    else:
        exchanges = [e for e in cpu if e.name.startswith(EXCHANGES)]
        work = [e for e in cpu if e.name.startswith("aten::")]
    spans, busy = union(map(_span, exchanges)), union(map(_span, work))
    both = union([*spans, *busy])
    return 1e-6 * (_length(both) - _length(busy))


def _span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def _length(spans: Sequence[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as spans that do not meet."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found
