"""The definition of the layer to measure: its sizes, its minimum work, and the data that every
candidate receives.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from moe_plugin.planner.units import show_size
from moe_plugin.utils.machine import memory_bytes
from moe_plugin.utils.messages import short
from scripts.bench.study import Option

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_THREADS = 4096


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The sizes of a layer on one device.

    Attributes:
        tokens: number of tokens, T.
        model_dim: width of a token, D.
        hidden_dim: inner width of an expert, F.
        experts: number of experts, E.
        top_k: number of experts per token, K.
        dtype: dtype of weights and tokens, a key of `DTYPES`.
        gated: whether the experts are gated (SwiGLU).
        device: "cpu" or "cuda".
        seed: seed of the data.
    """

    tokens: int
    model_dim: int
    hidden_dim: int
    experts: int
    top_k: int
    dtype: str = "float32"
    gated: bool = False
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "model_dim", "hidden_dim", "experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} is out of bounds: must be >= 1. Set it with "
                    f"--{name.replace('_', '-')}"
                )
        if self.dtype not in DTYPES:
            raise ValueError(
                f"dtype={short(self.dtype)} is unknown. Use one of {', '.join(DTYPES)}")
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k={self.top_k} is out of bounds: must be <= experts={self.experts}. Use a "
                "smaller --top-k"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Problem:
        """Return the problem with the sizes given by a mapping."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def check_device(self) -> None:
        """Check that the device exists and has enough memory for any implementation of the layer.

        Raises:
            ValueError: if the device does not exist or does not have enough memory.
        """
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device='cuda' is not available, because torch sees no GPU. Use "
                             "--device cpu")
        memory = memory_bytes(torch.device(self.device))
        if memory is not None and self.least_memory > memory:
            raise ValueError(
                f"{short(self.label())} needs at least {show_size(self.least_memory)}: must be <= "
                f"the {show_size(memory)} of {self.device}. Use smaller --tokens, --experts or "
                "widths")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def rows(self) -> int:
        """Number of expert rows, T * K."""
        return self.tokens * self.top_k

    @property
    def weights(self) -> int:
        """Number of weights of all experts."""
        return self.experts * self.model_dim * self.hidden_dim * (3 if self.gated else 2)

    def work(self, forward_only: bool = False) -> tuple[float, float]:
        """Return (FLOPs of the experts, minimum memory traffic in bytes) of the forward and
        backward pass, or of the forward pass alone.

        Both passes together have three times the FLOPs of the forward pass, which are 2 * rows *
        D * F per matrix. Weights are read once per pass, and their gradients are written once. The
        bytes of x, y and both gradients are counted once.
        """
        passes = 1 if forward_only else 3
        elements = passes * self.weights + (2 if forward_only else 5) * self.tokens * self.model_dim
        return (passes * 2 * self.rows * self.weights / self.experts,
                elements * self.torch_dtype.itemsize)

    @property
    def least_memory(self) -> int:
        """Number of bytes that any implementation needs: the weights and their gradients, x, y, the
        gradients of x and y, and the inner activations.
        """
        elements = 2 * self.weights + 4 * self.tokens * self.model_dim + self.rows * self.hidden_dim
        return elements * self.torch_dtype.itemsize

    def label(self) -> str:
        """Return a label for tables, such as T4096 D256 F512 E64 k2 float32."""
        gated = " gated" if self.gated else ""
        return (f"T{self.tokens} D{self.model_dim} F{self.hidden_dim} E{self.experts} "
                f"k{self.top_k}{gated} {self.dtype}")


@dataclass(frozen=True)
class Data:
    """The weights and inputs of a layer, in the dtype of the problem. In the shapes of tensors, L
    is the number of experts E.

    Attributes:
        router_ED: weight matrix of the router.
        w_in_LDF: first matrix of each expert.
        w_gate_LDF: gate matrix of each expert, or None if experts are not gated.
        w_out_LFD: second matrix of each expert.
        x_TD: tokens.
        grad_TD: gradient of the output.
    """

    router_ED: Tensor
    w_in_LDF: Tensor
    w_gate_LDF: Tensor | None
    w_out_LFD: Tensor
    x_TD: Tensor
    grad_TD: Tensor

    def weights(self) -> dict[str, Tensor]:
        """Return the weight matrices by name. The gate matrix is included only if experts are
        gated.
        """
        found = {
            "router_ED": self.router_ED, "w_in_LDF": self.w_in_LDF, "w_gate_LDF": self.w_gate_LDF,
            "w_out_LFD": self.w_out_LFD
        }
        return {name: value for name, value in found.items() if value is not None}

    def local(self, rank: int, ranks: int) -> Data:
        """Return the same data with only one rank's experts. The experts are divided equally among
        `ranks` ranks.
        """

        def own(w_LIO: Tensor | None) -> Tensor | None:
            return None if w_LIO is None else w_LIO.chunk(ranks)[rank]

        return replace(self, w_in_LDF=own(self.w_in_LDF), w_gate_LDF=own(self.w_gate_LDF),
                       w_out_LFD=own(self.w_out_LFD))


def make_data(problem: Problem) -> Data:
    """Draw random data. All candidates receive the same data. The data are random, because GPUs
    multiply zeros faster.
    """
    g, p = torch.Generator(problem.device).manual_seed(problem.seed), problem

    def draw(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g, device=p.device) * std).to(p.torch_dtype)

    small = p.model_dim**-0.5
    return Data(draw(p.experts, p.model_dim, std=small),
                draw(p.experts, p.model_dim, p.hidden_dim, std=small),
                draw(p.experts, p.model_dim, p.hidden_dim, std=small) if p.gated else None,
                draw(p.experts, p.hidden_dim, p.model_dim, std=p.hidden_dim**-0.5),
                draw(p.tokens, p.model_dim), draw(p.tokens, p.model_dim))


def layer_settings(problem: Problem, compute: str) -> dict[str, Any]:
    """Return the settings of our layer for a problem, with `experts.compute` set to `compute`."""
    gate = {"kind": "gated_ffn", "activation": "silu"} if problem.gated else {}
    return {
        "model_dim": problem.model_dim, "num_experts": problem.experts,
        "router": {"top_k": problem.top_k},
        # no bias, because the peers have none
        "experts": {"hidden_dim": problem.hidden_dim, "compute": compute, "bias": False, **gate}}


# -- options of a command

# the options that specify a `Problem` and its measurement, for `problem_of`
SIZES = {
    "tokens": Option(4096, "number of tokens", quick=256),
    "model-dim": Option(512, "width of a token", quick=64),
    "hidden-dim": Option(2048, "inner width of an expert", quick=128),
    "experts": Option(8, "number of experts"),
    "top-k": Option(2, "number of experts per token"),
    "dtype": Option("float32", "dtype of weights and tokens", choices=tuple(DTYPES)),
    "gated": Option(False, "use gated experts (SwiGLU) instead of two linear maps"),
    "device": Option("cuda" if torch.cuda.is_available() else "cpu", "device to measure on",
                     choices=("cpu", "cuda")),
    "threads": Option(torch.get_num_threads(), "number of CPU threads", least=1),
    "rounds": Option(15, "number of timed rounds, in which each candidate runs once", quick=3,
                     least=1),
}


def problem_of(args: argparse.Namespace) -> Problem:
    """Return the problem specified by the options, and set the number of torch threads.

    Raises:
        ValueError: if a number is out of bounds, or if the device cannot run the problem.
    """
    if args.threads > MOST_THREADS:
        raise ValueError(f"--threads {short(args.threads)} is out of bounds: must be <= "
                         f"{MOST_THREADS}. Leave out --threads for torch's number")
    torch.set_num_threads(args.threads)
    problem = Problem.of({"seed": Problem.seed, **vars(args)})
    problem.check_device()
    return problem
