"""What a peer is, the registry of all peers, and what several of them share."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.comm import Comm, LocalComm, TorchComm
from moe_plugin.utils.registry import Registry
from scripts.bench.problem import Data, Problem


@dataclass(frozen=True)
class Candidate:
    """A layer to measure.

    Attributes:
        forward: x [T, D] to (y [T, D], losses to add to the objective).
        note: what differs from the other candidates.
        compared: it computes the function of our layer, and pays for its balance loss.
    """

    forward: Callable[[Tensor], tuple[Tensor, list[Tensor]]]
    parameters: list[Tensor]
    note: str = ""
    compared: bool = True


class UnsupportedProblem(ValueError):
    """An installed peer cannot run this problem; the report says why."""


Build = Callable[[Problem, Data], AbstractContextManager[Candidate]]
peers: Registry[Build] = Registry("bench_peer")


def not_installed(*modules: str) -> str | None:
    """Which of these modules are missing, as a sentence; None where all are there."""
    missing = [m.replace(".", "-") for m in modules if not _found(m)]
    if not missing:
        return None
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def register_peer(
    name: str, *modules: str, refuses: Callable[[Problem], str | None] = lambda problem: None,
    alone: bool = False,
) -> Callable[[Callable[[Problem, Data], Iterator[Candidate]]], Build]:
    """Decorator: a generator of one candidate becomes a peer, available where `modules` are
    installed.

    Args:
        refuses: why it cannot run a problem; None where it can. Building then raises
            `UnsupportedProblem`.
        alone: it is written for one rank.
    """
    def add(make: Callable[[Problem, Data], Iterator[Candidate]]) -> Build:
        @contextlib.contextmanager
        @functools.wraps(make)
        def build(problem: Problem, data: Data) -> Iterator[Candidate]:
            reason = "compared on one rank alone" if alone and expert_group().size > 1 else None
            if (reason := reason or refuses(problem)) is not None:
                raise UnsupportedProblem(reason)
            yield from make(problem, data)

        return peers.register(name, why_not=functools.partial(not_installed, *modules))(build)

    return add


def copy(parameter: Tensor, value: Tensor) -> None:
    """parameter := value, outside autograd."""
    with torch.no_grad():
        parameter.copy_(value)


def activation(problem: Problem) -> Callable[[Tensor], Tensor]:
    """GELU, or SiLU for gated experts."""
    return F.silu if problem.gated else F.gelu


def route(x_TD: Tensor, router_ED: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """A plain softmax top-k router in float32.

    Args:
        x_TD: tokens, any float dtype.
        router_ED: its weight.
    Returns: weights_TK (float32), ids_TK (int64), the balance loss of the Switch Transformer.
    """
    probs_TE = F.softmax(F.linear(x_TD.float(), router_ED.float()), dim=1)
    weights_TK, ids_TK = probs_TE.topk(top_k, dim=1)
    if top_k > 1:  # one choice keeps its probability, as in our layer
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
    return weights_TK, ids_TK, switch_loss(probs_TE, ids_TK)


def switch_loss(probs_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """The balance loss of the Switch Transformer, over first choices. probs_TE: float32."""
    tokens, experts = probs_TE.shape
    # not bincount: on a GPU it waits for the device
    count_E = probs_TE.new_zeros(experts).index_add_(0, ids_TK[:, 0], probs_TE.new_ones(tokens))
    return (probs_TE.mean(0) * count_E / tokens).sum() * experts


def expert_group() -> Comm:
    """The ranks that share the experts: those of the default group; without one, this one alone."""
    return TorchComm() if dist.is_initialized() and dist.get_world_size() > 1 else LocalComm()


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[None]:
    """A process group of this process alone for the time of the block, unless one exists."""
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
