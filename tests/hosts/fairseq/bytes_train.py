"""`fairseq-train` that says what each rank stores and reduces when gradients are clipped:
`bytes_train.py ARGUMENTS...`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from fairseq_cli.train import cli_main
from torch.distributed.tensor import DTensor

from moe_plugin.comm import TorchComm
from moe_plugin.experts.base import is_expert
from moe_plugin.hosts.fairseq.trainer import MoETrainer
from moe_plugin.training.gradients.replicas import ReplicaReducer


def size(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of different storages."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors if x is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for x in local if x.numel()}.values())


def stored(trainer: Any) -> dict[str, int]:
    """Bytes of dense parameters, their gradients, fp32 copies and optimizer state on this rank."""
    model = [p for p in trainer.model.parameters() if not is_expert(p)]
    updated = [p for p in trainer.optimizer.params if not is_expert(p)]
    state = trainer.optimizer.optimizer.state
    masters = [p for p in updated if p.dtype != model[0].dtype]
    given = getattr(trainer.optimizer, "fp16_params", updated)
    return {
        "rank": trainer.data_parallel_rank, "parameters": size(p.detach() for p in model),
        "gradients": size([p.grad for p in model] + [p.grad for p in given if not is_expert(p)]),
        "masters": size(masters), "all": sum(p.numel() * p.element_size() for p in model),
        "state": size(x for p in updated for x in state[p].values() if torch.is_tensor(x))
        if state else 0,
        "experts": size(x for p in trainer.optimizer.params if is_expert(p)
                        for x in state[p].values() if torch.is_tensor(x)) if state else 0,
    }


def measured() -> None:
    """Print `BYTES {...}` in every step, with the number of all-reduces between replicas, and of
    those among them that started before backward ended.
    """
    clip, start, finish = (MoETrainer.clip_grad_norm, TorchComm.start_all_reduce,
                           ReplicaReducer.finish)
    started: list[str] = []
    late: list[bool] = []

    def start_all_reduce(self: TorchComm, x: torch.Tensor) -> Any:
        started.append("late" if late else "behind")
        return start(self, x)

    def clip_grad_norm(self: Any, clip_norm: float) -> torch.Tensor:
        found = {**stored(self), "reductions": len(started), "behind": started.count("behind")}
        print("BYTES", json.dumps(found), flush=True)
        started.clear()
        return clip(self, clip_norm)

    def finish_all(self: ReplicaReducer) -> None:
        late.append(True)
        finish(self)
        late.clear()

    MoETrainer.clip_grad_norm = clip_grad_norm  # type: ignore[method-assign]
    ReplicaReducer.finish = finish_all  # type: ignore[method-assign]
    TorchComm.start_all_reduce = start_all_reduce  # type: ignore[method-assign]


if __name__ == "__main__":
    measured()
    cli_main()
