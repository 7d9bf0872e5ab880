"""A process group of this process alone, for peers that want one."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Made for the time of the block, where there is none."""
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
