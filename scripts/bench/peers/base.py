"""The registry of peers, and functions that several peers share."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.comm import Comm, LocalComm, TorchComm
from moe_plugin.utils.registry import Registry
from scripts.bench.problem import DTYPES, Data, Problem


@dataclass(frozen=True)
class Candidate:
    """A layer that is measured by the benchmark.

    Attributes:
        forward: a function that maps x [T, D] to (y [T, D], losses to add to the training loss).
        note: how this candidate differs from the other candidates.
        compared: whether the layer computes the same function as our layer, including the balance
            loss.
    """

    forward: Callable[[Tensor], tuple[Tensor, list[Tensor]]]
    parameters: list[Tensor]
    note: str = ""
    compared: bool = True


class UnsupportedProblem(ValueError):
    """Raised if a peer is installed but cannot run a problem. The error message is the reason shown
    in the report.
    """


Build = Callable[[Problem, Data], AbstractContextManager[Candidate]]
peers: Registry[Build] = Registry("bench_peer")


def not_installed(*modules: str) -> str | None:
    """Return a sentence that lists the missing modules, or None if all modules are installed."""
    missing = []
    for module in modules:
        try:
            found = find_spec(module)
        except ModuleNotFoundError:  # the parent package is missing
            found = None
        missing += [module.replace(".", "-")] * (found is None)
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed" if (
        missing) else None


def register_peer(
    name: str, *modules: str, refuses: Callable[[Problem], str | None] = lambda problem: None,
    alone: bool = False, gpu: bool = False, gated: bool = False,
    dtypes: Sequence[str] = tuple(DTYPES),
) -> Callable[[Callable[[Problem, Data], Iterator[Candidate]]], Build]:
    """Return a decorator that registers a generator function as a peer. The generator function
    yields one candidate.

    The peer is available if all of `modules` are installed.

    Args:
        modules: modules that the peer requires.
        refuses: a function that returns the reason why the peer cannot run a problem, or None if
            the peer can run it. If a peer refuses a problem, building the peer raises
            `UnsupportedProblem`.
        alone: whether the peer supports only one rank.
        gpu: whether the peer needs a GPU.
        gated: whether the peer supports only gated experts.
        dtypes: dtypes that the peer supports.
    """
    def why_not(problem: Problem) -> str | None:
        if alone and expert_group().size > 1:
            return "compared on one rank only"
        if gpu and problem.device != "cuda":
            return f"{name} needs a GPU"
        if gated and not problem.gated:
            return "its experts are gated; use --gated"
        if problem.dtype not in dtypes:
            return f"{name} supports only {' and '.join(dtypes)}, not {problem.dtype}"
        return refuses(problem)

    def add(make: Callable[[Problem, Data], Iterator[Candidate]]) -> Build:
        @contextlib.contextmanager
        @functools.wraps(make)
        def build(problem: Problem, data: Data) -> Iterator[Candidate]:
            if (reason := why_not(problem)) is not None:
                raise UnsupportedProblem(reason)
            yield from make(problem, data)

        return peers.register(name, why_not=functools.partial(not_installed, *modules))(build)

    return add


def copy(parameter: Tensor, value: Tensor) -> None:
    """Copy a tensor into a parameter without recording the copy in autograd."""
    with torch.no_grad():
        parameter.copy_(value)


def activation(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Return SiLU for gated experts, and GELU for all other experts."""
    return F.silu if problem.gated else F.gelu


def route(x_TD: Tensor, router_ED: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a plain softmax top-k router in float32.

    Args:
        x_TD: tokens of any floating-point dtype.
        router_ED: weight matrix of the router.
        top_k: number of experts per token.

    Returns: (weights_TK in float32, ids_TK in int64, balance loss as defined in the Switch
    Transformer).
    """
    probs_TE = F.softmax(F.linear(x_TD.float(), router_ED.float()), dim=1)
    weights_TK, ids_TK = probs_TE.topk(top_k, dim=1)
    if top_k > 1:  # a single choice is weighted by its probability, as in our layer
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
    return weights_TK, ids_TK, switch_loss(probs_TE, ids_TK)


def behind_router(experts: Callable[[Tensor, Tensor, Tensor], Tensor], problem: Problem,
                  router_ED: Tensor, parameters: Iterable[Tensor], note: str) -> Candidate:
    """Return a candidate that computes y = experts(x_TD, ids_TK, weights_TK) behind `route`."""
    router_ED = nn.Parameter(router_ED.detach().clone())

    def forward(x_TD: Tensor) -> tuple[Tensor, list[Tensor]]:
        weights_TK, ids_TK, loss = route(x_TD, router_ED, problem.top_k)
        return experts(x_TD, ids_TK, weights_TK), [loss]

    return Candidate(forward, [router_ED, *parameters], note)


def switch_loss(probs_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Return the balance loss as defined in the Switch Transformer. The load counts only the first
    choice of each token.

    Args:
        probs_TE: router probabilities in float32.
        ids_TK: selected experts.
    """
    tokens, experts = probs_TE.shape
    # index_add_ instead of bincount, because bincount waits for the device on a GPU
    count_E = probs_TE.new_zeros(experts).index_add_(0, ids_TK[:, 0], probs_TE.new_ones(tokens))
    return (probs_TE.mean(0) * count_E / tokens).sum() * experts


def expert_group() -> Comm:
    """Return the group of ranks over which the experts are sharded. The group is the default group,
    or contains only this rank if there is no default group.
    """
    return TorchComm() if dist.is_initialized() and dist.get_world_size() > 1 else LocalComm()


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[None]:
    """If no process group exists, create a group that contains only this process. The group exists
    for the duration of the block.
    """
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl" if device == "cuda" else "gloo",
                                init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
