"""Collectives that fail after they have returned, as NCCL's do: named all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_plugin import MoELayer
from moe_plugin.comm import CommError, TorchComm
from moe_plugin.config import from_dict
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed
# what torch raises once NCCL's watchdog has aborted a communicator
ABORTED = (
    "NCCL communicator was aborted on rank 1. Original reason for failure was: [Rank 1] Watchdog "
    "caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLTOALL_BASE, NumelIn=12, "
    "NumelOut=12, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.")


class AbortedWork:
    """A work handle whose wait raises what NCCL's does."""

    def wait(self, timeout: Any = None) -> None:
        raise dist.DistBackendError(ABORTED)


def _aborted(*args: Any, **options: Any) -> None:
    raise dist.DistBackendError(ABORTED)


def _as_on_nccl() -> TorchComm:
    comm = TorchComm()
    comm.receive_first = comm.threaded = False
    comm.fails_later = True
    return comm


def _errors() -> list[str]:
    comm, found = _as_on_nccl(), []
    peer = 1 - comm.rank
    comm.all_reduce(torch.zeros(2))
    comm.all_gather(torch.zeros(3, dtype=torch.int64))
    layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 4, "parallel": {"r": 1}}), comm)
    layer(torch.randn(5, 8))
    known = dist.batch_isend_irecv, dist.all_to_all_single
    dist.batch_isend_irecv = lambda ops: [AbortedWork()]
    with pytest.raises(CommError) as error:
        comm.send_receive([(peer, torch.zeros(4))], [(peer, torch.zeros(6))])
    found.append(str(error.value))
    dist.all_to_all_single = dist.all_gather_into_tensor = _aborted
    with pytest.raises(CommError) as error:
        layer(torch.randn(5, 8))
    found.append(str(error.value))
    dist.batch_isend_irecv, dist.all_to_all_single = known
    return found


def test_the_error_names_rank_collective_sizes_and_what_was_started_before() -> None:
    for rank, texts in enumerate(run_gloo(2, _errors)):
        for text in texts:
            assert text.startswith(f"rank {rank} of 2 in group 'ranks [0, 1]': ")
            assert "failed: NCCL communicator was aborted" in text and "ALLTOALL_BASE" in text
            assert "; started before it, and perhaps the cause: " in text
        peer = 1 - rank
        message, layer = texts
        assert (f"send_receive of torch.float32 (send to rank {peer}: (4,); receive from rank "
                f"{peer}: (6,))") in message
        assert "all_to_all of torch." in layer or "send_receive of torch." in layer


def _gloo_error() -> str:
    comm = TorchComm()
    comm.all_reduce(torch.zeros(2))
    dist.all_reduce = _aborted
    with pytest.raises(CommError) as error:
        comm.all_reduce(torch.zeros(3))
    return str(error.value)


def test_where_a_collective_fails_when_it_is_called_no_other_is_named() -> None:
    for text in run_gloo(2, _gloo_error):
        assert "all_reduce(sum) of torch.float32 (3,) failed" in text and "before" not in (
            text.replace("before timing out", ""))
