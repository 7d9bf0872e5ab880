"""One trial of a collective or an all-to-all, measured while its result is used."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.machine import wait_for_device
from moe_plugin.tuning.engine import Tuner, TunerSettings

log = logging.getLogger(__name__)
# the median: the minimum favours a candidate whose times scatter
RULES = TunerSettings(tries=None, warm_up=1, samples=6, statistic=statistics.median, ordered=True,
                      allowance=math.inf)


def bucket_of(size: float) -> int:
    """The logarithm of a size in bytes, rounded up."""
    return max(int(size) - 1, 0).bit_length()


def trial(tuner: Tuner[Any, str], bucket: Any, comm: Comm, x: Tensor,
          run: Callable[[str], Tensor], what: str) -> Tensor:
    """The result of the candidate whose turn it is; its time is that of the slowest rank.

    Args:
        tuner, bucket: of the candidates. x: what they take.
        run: runs the candidate of this name. what: for the log, which says what is settled.
    """
    comm.agree_max([0.0])  # all begin together: else the end of what was before is charged to this
    wait_for_device(x.device)
    begun = time.perf_counter()
    name = tuner.choose(bucket)
    out = run(name)
    wait_for_device(out.device)
    tuner.record(bucket, name, time.perf_counter() - begun, comm.agree_max)
    for decision in tuner.pop_decisions():
        if decision.event == "settle" and comm.rank == 0:
            log.info("%s: %s (slowest rank, %s)", what, decision.choice, decision.why)
    return out
