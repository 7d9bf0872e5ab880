"""As apex's: Adam over lists of tensors, its step number in the group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import amp_C
import torch

from apex.multi_tensor_apply import multi_tensor_applier


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False,
                 set_grad_none: bool = True, capturable: bool = False,
                 master_weights: bool = False) -> None:
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": betas,
                                  "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = 1 if adam_w_mode else 0
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int)
        self.multi_tensor_adam = amp_C.multi_tensor_adam

    @torch.no_grad()
    def step(self, closure: Any = None, grads: Any = None, output_params: Any = None,
             scale: Any = None, grad_norms: Any = None, grad_scaler: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            rows = []
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p).float(),
                                         exp_avg_sq=torch.zeros_like(p).float())
                rows.append((p.grad, p.data, *self.state[p].values()))
            lists = [list(column) for column in zip(*rows, strict=True)]
            multi_tensor_applier(self.multi_tensor_adam, self._dummy_overflow_buf, lists,
                                 group["lr"], *group["betas"], group["eps"], group["step"],
                                 self.adam_w_mode, int(group["bias_correction"]),
                                 group["weight_decay"])


FusedSGD = torch.optim.SGD
