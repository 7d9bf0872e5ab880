"""apex's multi-tensor functions by their published signatures, computed on CPU; `calls` names those
that were called.
"""

from __future__ import annotations

import torch
from torch import Tensor

calls: list[str] = []


def _check(lists: list[list[Tensor]], flag: Tensor) -> None:
    # what the CUDA code refuses
    assert flag.dtype == torch.int and lists[0]
    assert len({len(tensors) for tensors in lists}) == 1
    for tensors in lists:
        assert len({(t.dtype, t.device) for t in tensors}) == 1
        assert all(t.is_contiguous() and t.numel() for t in tensors)
        assert tensors[0].dtype in (torch.float32, torch.float16)


def multi_tensor_l2norm(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]],
                        per_tensor_python: bool | None = None) -> tuple[Tensor, Tensor]:
    _check(tensor_lists, noop_flag)
    calls.append("multi_tensor_l2norm")
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor_python else norms[:0]


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]],
                       scale: float) -> None:
    _check(tensor_lists, noop_flag)
    assert isinstance(scale, float)
    calls.append("multi_tensor_scale")
    for source, target in zip(*tensor_lists, strict=True):
        if not source.isfinite().all():
            noop_flag.fill_(1)
        target.copy_(source * scale)


def multi_tensor_adam(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]],
                      lr: float, beta1: float, beta2: float, epsilon: float, step: int, mode: int,
                      bias_correction: int, weight_decay: float) -> None:
    _check(tensor_lists, noop_flag)
    calls.append("multi_tensor_adam")
    for grad, weight, first, second in zip(*tensor_lists, strict=True):
        grad = grad if mode else grad + weight_decay * weight  # mode 1: decoupled decay
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        mean = first / (1 - beta1**step if bias_correction else 1)
        scale = (second / (1 - beta2**step if bias_correction else 1)).sqrt() + epsilon
        weight.sub_(lr * (mean / scale + (weight_decay * weight if mode else 0)))


def multi_tensor_adam_capturable(chunk_size: int, noop_flag: Tensor,
                                 tensor_lists: list[list[Tensor]], lr: Tensor, beta1: float,
                                 beta2: float, epsilon: float, step: Tensor, mode: int,
                                 bias_correction: int, weight_decay: float,
                                 inv_scale: Tensor) -> None:
    raise NotImplementedError("for CUDA graphs, which neither host asks for")


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable
