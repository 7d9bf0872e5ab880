"""Ranks agree: that their settings are equal, by one hash, where a difference is named on every
rank; and on numbers of rows, as small integers between hosts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_plugin.comm.base import Comm

SHOWN, SHOWN_VALUE = 8, 200  # settings in a message, characters of a value
_DIGEST = 32


def agree(comm: Comm, settings: Mapping[str, Any]) -> None:
    """Check that all ranks of a group have equal settings. Collective: one all-gather of 40 bytes.

    Its size is fixed, so it ends with any settings of the ranks; only where they differ are the
    settings themselves gathered. Simulated ranks, threads of one process, are not compared.

    Args:
        settings: values by name; two are equal where their `repr` is.
    Raises:
        ValueError: on every rank; names each setting that differs, its values and their ranks.
    """
    if comm.size == 1 or not comm.separate:
        return
    text = json.dumps({name: repr(value) for name, value in settings.items()},
                      sort_keys=True).encode()
    seen = _gather(comm, hashlib.sha256(text).digest() + len(text).to_bytes(8, "big"))
    if len(set(seen)) == 1:
        return
    lengths = [int.from_bytes(one[_DIGEST:], "big") for one in seen]
    texts = _gather(comm, text.ljust(max(lengths)))
    raise ValueError(_differences(comm, [json.loads(text) for text in texts]))


def exchange_ints(comm: Comm, sends: Mapping[int, Sequence[int]],
                  recvs: Mapping[int, int]) -> dict[int, list[int]]:
    """Exchange integers between hosts (`hosts`). Those for this rank itself are not sent.

    Args:
        sends: by peer, the integers to send.
        recvs: by peer, how many integers it sends to this rank.
    Returns: by peer, the received integers.
    """
    def others(items: Mapping[int, Any]) -> list[int]:
        return [peer for peer in items if peer != comm.rank]

    out = [(p, torch.tensor(list(sends[p]), dtype=torch.int64))
           for p in others(sends) if len(sends[p])]
    buffers = [(p, torch.empty(recvs[p], dtype=torch.int64))
               for p in others(recvs) if recvs[p]]
    comm.hosts.send_receive(out, buffers)
    got = {peer: buffer.tolist() for peer, buffer in buffers}
    got |= {p: [] for p in recvs if not recvs[p]}
    if comm.rank in sends:
        got[comm.rank] = list(sends[comm.rank])
    return got


def _gather(comm: Comm, mine: bytes) -> list[bytes]:
    bytes_N = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(comm.device)
    all_WN = comm.all_gather(bytes_N).cpu().view(comm.size, len(mine))
    return [bytes(one.tolist()) for one in all_WN]


def _differences(comm: Comm, settings: list[dict[str, str]]) -> str:
    names = sorted({name for one in settings for name in one})
    differ = [n for n in names if len({one.get(n, "absent") for one in settings}) > 1]
    shown = "; ".join(_values(name, settings) for name in differ[:SHOWN])
    more = f"; and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
    return (f"settings differ between the {comm.size} ranks of group {comm.name!r}: {shown}{more}. "
            "Must be the same; give all ranks the same settings and install the same versions")


def _values(name: str, settings: list[dict[str, str]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(settings):
        ranks.setdefault(one.get(name, "absent"), []).append(rank)
    values = [f"{value[:SHOWN_VALUE]} on rank {', '.join(map(str, who[:16]))}"
              + (f" and {len(who) - 16} more" if len(who) > 16 else "")
              for value, who in list(ranks.items())[:SHOWN]]
    return f"{name} is {', '.join(values)}"
