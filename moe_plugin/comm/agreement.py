"""Functions that compare settings and exchange integers between ranks."""

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
    """Check that the settings are equal on all ranks of a group. The check is collective and needs
    one all-gather of 40 bytes.

    The size is fixed, so the check completes even if the ranks pass different settings. If the
    ranks disagree, the settings themselves are also gathered. Simulated ranks share one process and
    are not compared.

    Args:
        comm: the group.
        settings: mapping from the name of each setting to its value. Two values are considered
            equal if their `repr` strings are equal.
    Raises:
        ValueError: If the settings differ. All ranks raise the same error. The message lists each
            setting that differs, its values, and the ranks that use each value.
    """
    if comm.size == 1 or not comm.separate:
        return
    text = json.dumps({name: repr(value) for name, value in settings.items()},
                      sort_keys=True).encode()
    # The lengths are sent, too, because differing settings are padded to the longest length.
    seen = _gather(comm, hashlib.sha256(text).digest() + len(text).to_bytes(8, "big"))
    if len(set(seen)) == 1:
        return
    lengths = [int.from_bytes(digest[_DIGEST:], "big") for digest in seen]
    # An all-gather needs equal sizes. Trailing spaces do not change JSON values.
    texts = _gather(comm, text.ljust(max(lengths)))
    raise ValueError(_differences(comm, [json.loads(text) for text in texts]))


def exchange_ints(comm: Comm, sends: Mapping[int, Sequence[int]],
                  recvs: Mapping[int, int]) -> dict[int, list[int]]:
    """Exchange integers in host memory between ranks (see `Comm.hosts`). Integers that a rank sends
    to itself are copied without any communication.

    Args:
        comm: the group.
        sends: mapping from each receiving rank to the integers that this rank sends to it.
        recvs: mapping from each sending rank to the number of integers that it sends to this rank.
    Returns:
        A mapping from each sending rank to the integers received from it.
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
    return [bytes(row.tolist()) for row in all_WN]


def _differences(comm: Comm, settings: list[dict[str, str]]) -> str:
    names = sorted({name for rank_settings in settings for name in rank_settings})
    differ = [n for n in names
              if len({rank_settings.get(n, "absent") for rank_settings in settings}) > 1]
    shown = "; ".join(_values(name, settings) for name in differ[:SHOWN])
    more = f"; and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
    return (f"settings differ between the {comm.size} ranks of group {comm.name!r}: {shown}{more}. "
            "They must be equal; use the same settings and installed versions on all ranks")


def _values(name: str, settings: list[dict[str, str]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, rank_settings in enumerate(settings):
        ranks.setdefault(rank_settings.get(name, "absent"), []).append(rank)
    values = [f"{value[:SHOWN_VALUE]} on rank {', '.join(map(str, who[:16]))}"
              + (f" and {len(who) - 16} more" if len(who) > 16 else "")
              for value, who in list(ranks.items())[:SHOWN]]
    return f"{name} is {', '.join(values)}"
