"""A stand-in for the package `emerging_optimizers` 0.3, with as much of its interface as Megatron's
Muon uses: below Python 3.12 the package cannot be imported.

Written after its documentation and its behaviour: momentum is an average, `p -= lr * update`, and
the update comes from Newton-Schulz iterations of five coefficient triples.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

NAME = "emerging_optimizers"
TRIPLES = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
           (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """SGD with momentum whose steps are `orthogonalize(parameter, momentum)`."""

    def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float, *,
                 nesterov: bool, weight_decay_method: str, fp32_matmul_prec: str,
                 scaled_orthogonalize_fn: Callable[..., Tensor]) -> None:
        assert weight_decay_method == "decoupled"  # matmuls are in fp32 here, whatever is asked
        self.nesterov, self.scaled_orthogonalize_fn = nesterov, scaled_orthogonalize_fn
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for p in group["params"]:
            if p.grad is not None or not skip_non_grad_params:
                self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            self._init_group(group)
            options = {key: value for key, value in group.items() if key != "params"}
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p]["momentum_buffer"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                momentum.lerp_(p.grad, 1 - group["momentum"])
                used = p.grad.lerp(momentum, group["momentum"]) if self.nesterov else momentum
                p.add_(self.orthogonalize(p, used, **options), alpha=-group["lr"])


class AdaptiveMuon(OrthogonalizedOptimizer):
    """By name alone."""


class SOAP(OrthogonalizedOptimizer):
    """By name alone."""


def newton_schulz_tp(x: Tensor, steps: int, coefficient_type: str, tp_group: Any,
                     partition_dim: int | None = None, tp_mode: str = "duplicated") -> Tensor:
    """About U V^T of x = U S V^T, [M, N]; by these coefficients, whichever are asked for."""
    assert x.dim() == 2 and (partition_dim is None or tp_group.size() == 1)
    tall = x.shape[0] > x.shape[1]
    made = x.mT if tall else x
    made = made / made.norm().clamp(min=1e-7)
    for a, b, c in itertools.islice(itertools.cycle(TRIPLES), steps):
        square = made @ made.mT
        made = a * made + (b * square + c * square @ square) @ made
    return made.mT if tall else made


def get_muon_scale_factor(size_out: int, size_in: int, mode: str = "spectral") -> float:
    """By which an update is multiplied: the spectral one, unless it is by shape."""
    if mode == "shape_scaling":
        return max(1, size_out / size_in)**0.5
    return max(size_out, size_in)**0.5


def use() -> None:
    """In a process that nothing else uses: let Megatron find the package, or this in its place."""
    core = importlib.import_module("megatron.core.optimizer")
    if core.HAVE_EMERGING_OPTIMIZERS:
        return
    _put("", registry=types.SimpleNamespace(
        get_optimizer_name_list=lambda: ["soap"], get_optimizer_cls={"soap": SOAP}.__getitem__))
    _put(".orthogonalized_optimizers", AdaptiveMuon=AdaptiveMuon,
         OrthogonalizedOptimizer=OrthogonalizedOptimizer,
         get_muon_scale_factor=get_muon_scale_factor)
    _put(".orthogonalized_optimizers.muon_utils", NSCoeffT=Literal["quintic"],
         newton_schulz_tp=newton_schulz_tp)
    _put(".scalar_optimizers", Lion=torch.optim.SGD)
    _put(".soap", SOAP=SOAP)
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (  # type: ignore[assignment]
        "0.3.0" if name == "emerging-optimizers" else version(name))
    importlib.reload(importlib.import_module("megatron.core.optimizer.emerging_optimizers"))
    importlib.reload(core)


def _put(below: str, **names: Any) -> None:
    module = types.ModuleType(NAME + below)
    module.__spec__ = importlib.machinery.ModuleSpec(NAME + below, None)
    module.__path__ = []
    vars(module).update(names)
    sys.modules[NAME + below] = module
