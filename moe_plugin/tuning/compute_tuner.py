"""Automatic choice of the strategy that computes the experts, for each device and load
(`compute: auto`).

The forward and backward passes of each candidate are timed. Trials use the layer's own weights, and
random rows that represent the load of the bucket. Trials do not affect the call that starts them:
they are not part of its autograd graph, do not use its autocast or its hooks on saved tensors, and
do not advance torch's random generators.

Pure functions determine the candidates for a load without timing anything. On a GPU, the strategy
`kernels` provides several candidates, such as "kernels split": one for each matmul schedule that
Triton supports on this GPU (`kernels.groups.SCHEDULES`). All schedules compute bitwise identical
outputs.

Candidates are selected by the rule of EPS-MoE (Qian et al., 2024): one grouped GEMM for few rows
per expert, one GEMM per expert for many rows, and otherwise the faster of the two. All candidates
that this rule allows are timed. The choices of the ranks may differ, because they affect neither
shapes nor collectives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin import __version__
from moe_plugin.kernels.cpu.expert_ffn import fused
from moe_plugin.kernels.cpu.products import in_float32
from moe_plugin.kernels.expert_ffn import FFNParameters, grouped_refusal, strategies
from moe_plugin.kernels.groups import SCHEDULES
from moe_plugin.kernels.triton_ops import DTYPES, INSTALLED, no_schedule
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.records import DeviceCounts, RowCounts, RowPlan
from moe_plugin.routing.replay import replayed
from moe_plugin.tuning.compute_times import ComputeChoice, Runs, SharedChoices
from moe_plugin.utils.machine import capturing, device_name

FEW_ROWS, MANY_ROWS = 2048, 4096  # rows of one expert
# FLOP of all experts' first products below which timing is not worth its cost
SMALL_LAYER = 1 << 30


@dataclass(frozen=True)
class ComputeLoad:
    """The properties of a forward call that the choice depends on.

    Attributes:
        device: device type, such as "cuda".
        dtype: dtype of the matmuls.
        experts: number of experts.
        width, inner: width of the rows, and inner width of the experts.
        gated: whether the experts have gate matrices.
        rows: total number of rows of all experts.
        even: whether all experts have the same number of rows.
        planned: whether the rows are gathered from this rank's own tokens; see `RowPlan`.
        top_k: number of rows per token, if `planned` is True.
    """

    device: str
    dtype: torch.dtype
    experts: int
    width: int
    inner: int
    gated: bool
    rows: int
    even: bool
    planned: bool
    top_k: int = 1

    @property
    def rows_each(self) -> float:
        """The mean number of rows per expert."""
        return self.rows / max(1, self.experts)

    @property
    def bucket(self) -> int:
        """The rounded log2 of the number of rows per expert. Loads in a bucket share a choice."""
        return round(math.log2(max(1.0, self.rows_each)))

    @property
    def label(self) -> str:
        """A description of the load, for keys and log lines."""
        kind = ("gated " if self.gated else "") + ("even " if self.even else "") + (
            f"own tokens k{self.top_k}" if self.planned else "rows")
        return (f"{str(self.dtype).removeprefix('torch.')} D{self.width} F{self.inner} "
                f"L{self.experts} {kind} {2**self.bucket} rows an expert")


def candidates(load: ComputeLoad, usable: Collection[str]) -> list[str]:
    """Return the names of candidate strategies. If nothing is measured, the first candidate is
    used.

    On a CPU, the candidates are `fused`, which runs one GEMM per expert, and, for few rows, also
    `grouped` and (if all experts have the same number of rows) `batched`. On a GPU, the candidates
    are this package's grouped kernels, torch's grouped GEMM and, for at least `FEW_ROWS` rows per
    expert, one GEMM per expert. On an H100, a training step of `transformers` with torch's grouped
    GEMM takes 0.95 to 1.04 times as long as with this package's kernels. This ratio is lowest at
    4,096 rows per expert. This package's kernels are the first candidate, because torch's kernels
    store more tensors for backward. torch's kernels are used only if they are measurably faster.

    Args:
        load: load of the call.
        usable: names of the strategies that can compute the rows on this device.
    """
    rows_each = load.rows_each
    if load.device == "cpu":
        names = ["fused"]
        if rows_each < MANY_ROWS:
            names += ["grouped", "batched"] if load.even else ["grouped"]
    else:
        names = [f"kernels {schedule}".strip() for schedule in SCHEDULES]
        names += ["grouped"] + ["loop"] * (rows_each >= FEW_ROWS)
    return list(filter(usable.__contains__, names)) or ["loop"]


def why_unmeasured(load: ComputeLoad, names: Sequence[str], setting: str) -> str | None:
    """Return the reason why no measurement is needed and the first candidate is used, or None if
    candidates must be measured.

    Args:
        load: load of the call.
        names: names of the candidates.
        setting: value of the setting `experts.compute_selection`.
    """
    if setting == "rule":
        return "experts.compute_selection=rule"
    if len(names) == 1:
        return "by rule the only candidate"
    small = 2 * load.rows * load.width * load.inner < SMALL_LAYER
    return "too small to be worth measuring" if small else None


@strategies.register("auto")
def auto(x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> Tensor:
    """Compute the experts with the fastest strategy for this device and load.

    A rule selects the candidates. If there are several, the candidate with the shortest measured
    time is used (see `experts.compute_selection`).
    """
    counts = rows.counts if isinstance(rows, RowPlan) else rows
    _, width, inner = parameters.w_in_LDF.shape
    # small loads on a CPU use the first candidate without the cost of a choice
    if x.device.type == "cpu" and not isinstance(counts, DeviceCounts) and (
            2 * sum(counts.host) * width * inner < SMALL_LAYER) and (
            not torch.compiler.is_compiling()):
        return fused(x, rows, parameters)
    return computed(choose(x, rows, parameters).name, x, rows, parameters)


def computed(name: str, x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> Tensor:
    """Compute the rows with one candidate and return the output. See `Strategy`."""
    strategy, _, schedule = name.partition(" ")
    if schedule:
        parameters = dataclasses.replace(parameters, schedule=schedule)
    return strategies.get(strategy)(x, rows, parameters)


def choose(x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> ComputeChoice:
    """Return the strategy that `auto` uses for these rows. Modules share measurements."""
    counts = rows.counts if isinstance(rows, RowPlan) else rows
    if torch.compiler.is_compiling():
        return ComputeChoice(_compiled(x, counts), "under torch.compile")
    if parameters.keep is not None and isinstance(counts, DeviceCounts):
        return ComputeChoice("kernels", "it stores the fewest rows of all strategies with pages")
    usable = usable_ways(x, parameters, counts)
    if len(usable) == 1:
        [only] = usable
        return ComputeChoice(only, "by rule the only candidate")
    load = load_of(x, rows, parameters)
    names = candidates(load, usable)
    why = why_unmeasured(load, names, parameters.choice)
    if why is None and torch.are_deterministic_algorithms_enabled():
        why = "deterministic algorithms are required, and measured choices may sum differently"
    if why is not None:
        return ComputeChoice(names[0], why)
    start = functools.partial(trial, load, names, x.device, parameters)
    known = parameters.memory.state(SharedChoices)
    # a recomputation must repeat the choice, since strategies save different tensors for backward
    return replayed(known, lambda: known.choices.choose(
        _key(load, names, x.device), names, x.device, start if _may_measure(x.device) else None),
        True, what="way to compute experts", values=False)


def load_of(x: Tensor, rows: RowCounts | RowPlan, p: FFNParameters) -> ComputeLoad:
    """Describe the load of a forward call."""
    if isinstance(rows, RowPlan):
        counts, planned, choices = rows.counts, True, rows.position_TK.shape[1]
    else:
        counts, planned, choices = rows, False, 1
    experts, width, inner = p.w_in_LDF.shape
    return ComputeLoad(x.device.type, _dtype(x), experts, width, inner, p.w_gate_LDF is not None,
                counts.total, counts.even, planned, choices)


def trial(load: ComputeLoad, names: list[str], device: torch.device, parameters: FFNParameters,
          part: int = 1) -> Runs:
    """For each candidate, return a function that runs the candidate's forward and backward passes
    with the load of a bucket.

    part: the functions use only `1 / part` of the bucket's rows. By default, all rows are used.
    """
    tensors = {f.name: getattr(parameters, f.name) for f in dataclasses.fields(parameters)}
    with _clean(device):
        copies = {
            n: t.detach().to(load.dtype).requires_grad_() if isinstance(t, Tensor) else t
            for n, t in tensors.items()
        }
        # gradients of a trial are discarded, so nothing that is shared by calls may be used here
        p = FFNParameters(**{**copies, "memory": Workspace(), "main_grad_weights": {},
                             "sums": None, "later": None, "keep": None})
        x, rows = sample_load(load, device, part)
        grad = torch.randn(x.shape, generator=torch.Generator(device).manual_seed(1),
                           device=device).to(load.dtype)
        wanted = [x, *(t for t in copies.values() if isinstance(t, Tensor))]

    def run(name: str) -> None:
        with _clean(device):
            torch.autograd.grad(computed(name, x, rows, p), wanted, grad)

    return {name: functools.partial(run, name) for name in names}


def sample_load(load: ComputeLoad, device: torch.device,
                part: int = 1) -> tuple[Tensor, RowCounts | RowPlan]:
    """Return rows, or tokens with a row plan, that represent the load of a bucket. The rows are
    assigned to the experts in round-robin order.

    part: only `1 / part` of the bucket's rows are created. By default, all rows are created.
    """
    total = -(-load.experts * 2**load.bucket // part) // load.top_k * load.top_k
    counts = RowCounts([len(range(expert, total, load.experts)) for expert in range(load.experts)])
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(total // load.top_k, load.width, generator=generator,
                    device=device).to(load.dtype).requires_grad_()
    if not load.planned:
        return x, counts
    # created on the device, so that the host does not wait
    lengths_L, choice_N = counts.device(device), torch.arange(total, device=device)
    position_N = (lengths_L.cumsum(0) - lengths_L)[choice_N % load.experts] + torch.div(
        choice_N, load.experts, rounding_mode="floor")
    source_R = torch.empty_like(choice_N).index_copy_(0, position_N, choice_N)
    weights_TK = torch.full((total // load.top_k, load.top_k), 1.0 / load.top_k, device=device)
    return x, RowPlan(source_R, position_N.view(-1, load.top_k), weights_TK, counts)


@contextlib.contextmanager
def _clean(device: torch.device) -> Iterator[None]:
    """Context manager that runs its block with torch's default thread-local state, as in a new
    thread.

    torch runs only the innermost hooks on saved tensors. This context therefore sets hooks that
    disable all outer hooks.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)
    with torch.inference_mode(False), torch.enable_grad(), hooks, torch.autocast(
            device.type, enabled=False):
        yield


def _compiled(x: Tensor, counts: RowCounts) -> str:
    if isinstance(counts, DeviceCounts):
        return "kernels"  # its reference implementation reads the lengths outside of traced code
    if x.device.type == "cuda":
        if INSTALLED and x.dtype in DTYPES:
            return "kernels"
        return "grouped" if strategies.entry("grouped").offered else "loop"
    # a set of names would hash a symbolic size and so fix its value
    return "batched" if counts.even else "loop"


def usable_ways(x: Tensor, p: FFNParameters, counts: RowCounts) -> set[str]:
    """Return the names of the strategies that can compute these rows on this device without a
    fallback to another strategy.

    If the row counts are known only on the device, strategies that read them on the host are
    excluded.
    """
    if x.device.type == "cpu" and in_float32(_dtype(x)):
        return {"fused"}  # the other strategies take up to a hundred times as long
    on_device = isinstance(counts, DeviceCounts) and x.device.type != "cpu"
    names = {"fused", "batched", "loop"} if x.device.type == "cpu" else {"loop"}
    if on_device:
        names = {"kernels"}
    if x.device.type == "cuda" and INSTALLED and x.dtype in DTYPES:
        names.add("kernels")
        # the schedules exist only for the kernels of these precisions
        if not on_device and p.precision in ("ieee", "tf32"):
            names |= {f"kernels {name}" for name, schedule in SCHEDULES.items()
                      if name and no_schedule(schedule, x.device) is None}
    if strategies.entry("grouped").why_not() is None and grouped_refusal(
            x, p.w_in_LDF) is None and p.w_out_LFD.dtype == x.dtype:
        names.add("grouped")
    return names


def takes_counts_of_device(name: str) -> bool:
    """Return true if a strategy can compute rows whose counts are known only on the device, so that
    the host does not wait for the device.

    All other strategies read the counts on the host. `grouped` also reads the counts on the host
    if it falls back to `loop`.
    """
    return name == "grouped" or (name in ("auto", "kernels") and INSTALLED)


def _may_measure(device: torch.device) -> bool:
    """Return true if trials are allowed during the current call.

    Trials are not allowed if gradients are disabled (memory for gradients may not be available),
    while a CUDA graph is captured, or under a mode that intercepts operations.
    """
    intercepted = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return torch.is_grad_enabled() and not intercepted and not capturing(device)


def _dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the experts' matmuls."""
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if autocast else x.dtype


def _key(load: ComputeLoad, names: list[str], device: torch.device) -> str:
    threads = f" {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return (f"{device_name(device)}{threads}, torch {torch.__version__}, moe-plugin {__version__}: "
            f"{load.label}, of {' '.join(names)}")
