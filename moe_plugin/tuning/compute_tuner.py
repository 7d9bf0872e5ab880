"""`compute: auto`: the strategy of expert compute that suits device and load.

Candidates are timed forward and backward on random rows of the bucket's load, with the layer's own
weights, without any effect on the call that starts it: no autograd graph, no autocast, no hooks on
saved tensors, no random number of torch's generators.

The candidates of expert compute under a load. Pure functions, no timing. On a GPU strategy
`kernels` is several: one for each schedule of its products (`kernels.groups.SCHEDULES`, "kernels
split") that Triton has for it. Results are the same bits.

The rule is that of EPS-MoE (Qian et al. 2024): one grouped GEMM for few rows an expert, a GEMM an
expert for many, and in between whichever is faster. The candidates that it leaves are timed.
The choice is local: it changes no shape and no collective, so ranks may choose differently.
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

FEW_ROWS, MANY_ROWS = 2048, 4096  # of one expert
# FLOP of all experts' first products, below which nothing is timed: not worth it
SMALL_LAYER = 1 << 30


@dataclass(frozen=True)
class ComputeLoad:
    """What a choice depends on.

    Attributes:
        device: its type.
        rows: of all experts.
        even: all experts have the same number of rows.
        planned: rows are gathered from this rank's own tokens, see `RowPlan`.
        top_k: then, rows per token.
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
        """Rows of an expert on average."""
        return self.rows / max(1, self.experts)

    @property
    def bucket(self) -> int:
        """Loads of one bucket share a choice: log2 of the rows of an expert, to the nearest."""
        return round(math.log2(max(1.0, self.rows_each)))

    @property
    def label(self) -> str:
        """For keys and logs."""
        kind = ("gated " if self.gated else "") + ("even " if self.even else "") + (
            f"own tokens k{self.top_k}" if self.planned else "rows")
        return (f"{str(self.dtype).removeprefix('torch.')} D{self.width} F{self.inner} "
                f"L{self.experts} {kind} {2**self.bucket} rows an expert")


def candidates(load: ComputeLoad, usable: Collection[str]) -> list[str]:
    """Strategies by name, the one to take unmeasured first. usable: those that can compute such
    rows here.

    CPU: `fused`, which is a GEMM an expert, and for few rows the grouped and (even loads) batched
    ones. GPU: grouped kernels, ours and torch's (with the latter a step of transformers takes 0.95
    to 1.04 times as long on an H100, the least with 4,096 rows an expert), and from `FEW_ROWS` on a
    GEMM an expert. Ours stay first: the others keep more for backward, so they have to be faster.
    """
    each = load.rows_each
    if load.device == "cpu":
        names = ["fused"]
        if each < MANY_ROWS:
            names += ["grouped", "batched"] if load.even else ["grouped"]
    else:
        names = [f"kernels {schedule}".strip() for schedule in SCHEDULES]
        names += ["grouped"] + ["loop"] * (each >= FEW_ROWS)
    return list(filter(usable.__contains__, names)) or ["loop"]


def why_unmeasured(load: ComputeLoad, names: Sequence[str], setting: str) -> str | None:
    """Why the first candidate is taken as it is; None: the candidates are to be measured. setting:
    experts.compute_selection.
    """
    if setting == "rule":
        return "experts.compute_selection=rule"
    if len(names) == 1:
        return "by rule the only candidate"
    small = 2 * load.rows * load.width * load.inner < SMALL_LAYER
    return "too small to be worth measuring" if small else None


@strategies.register("auto")
def auto(x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> Tensor:
    """The fastest strategy for device and load: by rule, and where the rule leaves several, as
    measured (see `experts.compute_selection`).
    """
    counts, (_, width, inner) = getattr(rows, "counts", rows), parameters.w_in_LDF.shape
    # the first candidate on a CPU, for any others, where it is not worth measuring
    if x.device.type == "cpu" and not isinstance(counts, DeviceCounts) and (
            2 * sum(counts.host) * width * inner < SMALL_LAYER) and (
            not torch.compiler.is_compiling()):
        return fused(x, rows, parameters)
    return computed(choose(x, rows, parameters).name, x, rows, parameters)


def computed(name: str, x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> Tensor:
    """What a candidate computes; see `Strategy`."""
    strategy, _, schedule = name.partition(" ")
    if schedule:
        parameters = dataclasses.replace(parameters, schedule=schedule)
    return strategies.get(strategy)(x, rows, parameters)


def choose(x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> ComputeChoice:
    """What `auto` takes for these rows. Modules share what one of them measures."""
    counts = rows.counts if isinstance(rows, RowPlan) else rows
    if torch.compiler.is_compiling():
        return ComputeChoice(_compiled(x, counts), "under torch.compile")
    if parameters.keep is not None and isinstance(counts, DeviceCounts):
        return ComputeChoice("kernels", "of those whose rows go to pages, it keeps the fewest")
    usable = usable_ways(x, parameters, counts)
    if len(usable) == 1:
        return ComputeChoice(*usable, "by rule the only candidate")
    load = load_of(x, rows, parameters)
    names = candidates(load, usable)
    why = why_unmeasured(load, names, parameters.choice)
    if why is None and torch.are_deterministic_algorithms_enabled():
        why = "deterministic algorithms are required, and a measured choice may add up differently"
    if why is not None:
        return ComputeChoice(names[0], why)
    start = functools.partial(trial, load, names, x.device, parameters)
    known = parameters.memory.state(SharedChoices)
    # a recomputation repeats the choice: another way would save other tensors for backward
    return replayed(known, lambda: known.choices.choose(
        _key(load, names, x.device), names, x.device, start if _may_measure(x.device) else None),
        True, what="way to compute experts", values=False)


def load_of(x: Tensor, rows: RowCounts | RowPlan, p: FFNParameters) -> ComputeLoad:
    """The load of a call."""
    planned = isinstance(rows, RowPlan)
    counts = rows.counts if planned else rows
    experts, width, inner = p.w_in_LDF.shape
    return ComputeLoad(x.device.type, _dtype(x), experts, width, inner, p.w_gate_LDF is not None,
                counts.total, counts.even, planned, rows.position_TK.shape[1] if planned else 1)


def trial(load: ComputeLoad, names: list[str], device: torch.device, parameters: FFNParameters,
          part: int = 1) -> Runs:
    """Candidates' forward and backward passes for a load's bucket. part: with one part in so many
    of its rows.
    """
    tensors = {f.name: getattr(parameters, f.name) for f in dataclasses.fields(parameters)}
    with _clean(device):
        own = {
            n: t.detach().to(load.dtype).requires_grad_() if isinstance(t, Tensor) else t
            for n, t in tensors.items()
        }
        # trial gradients are discarded: they reach nothing that the layer's calls share
        p = FFNParameters(**{**own, "memory": Workspace(), "main_grad_weights": {},
                             "sums": None, "later": None, "keep": None})
        x, rows = sample_load(load, device, part)
        grad = torch.randn(x.shape, generator=torch.Generator(device).manual_seed(1),
                           device=device).to(load.dtype)
        wanted = [x, *(t for t in own.values() if isinstance(t, Tensor))]

    def run(name: str) -> None:
        with _clean(device):
            torch.autograd.grad(computed(name, x, rows, p), wanted, grad)

    return {name: functools.partial(run, name) for name in names}


def sample_load(load: ComputeLoad, device: torch.device,
                part: int = 1) -> tuple[Tensor, RowCounts | RowPlan]:
    """Rows, or tokens and their plan, of a bucket's load, assigned to experts round robin. part:
    one part in so many of its rows.
    """
    total = -(-load.experts * 2**load.bucket // part) // load.top_k * load.top_k
    counts = RowCounts([len(range(expert, total, load.experts)) for expert in range(load.experts)])
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(total // load.top_k, load.width, generator=generator,
                    device=device).to(load.dtype).requires_grad_()
    if not load.planned:
        return x, counts
    # made on the device: the host does not wait
    lengths_L, choice_N = counts.device(device), torch.arange(total, device=device)
    position_N = (lengths_L.cumsum(0) - lengths_L)[choice_N % load.experts] + torch.div(
        choice_N, load.experts, rounding_mode="floor")
    source_R = torch.empty_like(choice_N).index_copy_(0, position_N, choice_N)
    weights_TK = torch.full((total // load.top_k, load.top_k), 1.0 / load.top_k, device=device)
    return x, RowPlan(source_R, position_N.view(-1, load.top_k), weights_TK, counts)


@contextlib.contextmanager
def _clean(device: torch.device) -> Iterator[None]:
    """As in a new thread. Of hooks on saved tensors only the innermost run, so these do nothing."""
    hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)
    with torch.inference_mode(False), torch.enable_grad(), hooks, torch.autocast(
            device.type, enabled=False):
        yield


def _compiled(x: Tensor, counts: RowCounts) -> str:
    if isinstance(counts, DeviceCounts):
        return "kernels"  # its reference reads the lengths where a compiler does not see it
    if x.device.type == "cuda":
        return "kernels" if INSTALLED and x.dtype in DTYPES else "grouped"
    # no set: hashing a symbolic size would fix it
    return "batched" if counts.even else "loop"


def usable_ways(x: Tensor, p: FFNParameters, counts: RowCounts) -> set[str]:
    """Strategies that compute such rows on this device themselves, without a fallback, and do not
    make the host wait for lengths that the device alone knows.
    """
    if x.device.type == "cpu" and in_float32(_dtype(x)):
        return {"fused"}  # the others take up to a hundred times as long
    on_device = isinstance(counts, DeviceCounts) and x.device.type != "cpu"
    names = {"fused", "batched", "loop"} if x.device.type == "cpu" else {"loop"}
    if on_device:
        names = {"kernels"}
    if x.device.type == "cuda" and INSTALLED and x.dtype in DTYPES:
        names.add("kernels")
        if not on_device and p.precision in ("ieee", "tf32"):  # the others have other kernels
            names |= {f"kernels {name}" for name, schedule in SCHEDULES.items()
                      if name and no_schedule(schedule, x.device) is None}
    if strategies.entry("grouped").why_not() is None and grouped_refusal(
            x, p.w_in_LDF) is None and p.w_out_LFD.dtype == x.dtype:
        names.add("grouped")
    return names


def takes_counts_of_device(name: str) -> bool:
    """Whether a strategy computes rows whose numbers a device alone knows without a wait. All
    others, and `grouped` with what it passes to `loop`, read them.
    """
    return name == "grouped" or (name in ("auto", "kernels") and INSTALLED)


def _may_measure(device: torch.device) -> bool:
    """Not without gradients (there may be no memory for them), during the capture of a CUDA graph,
    or under a mode that intercepts operations.
    """
    intercepted = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return torch.is_grad_enabled() and not intercepted and not capturing(device)


def _dtype(x: Tensor) -> torch.dtype:
    """Of the products."""
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if autocast else x.dtype


def _key(load: ComputeLoad, names: list[str], device: torch.device) -> str:
    threads = f" {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return (f"{device_name(device)}{threads}, torch {torch.__version__}, moe-plugin {__version__}: "
            f"{load.label}, of {' '.join(names)}")
