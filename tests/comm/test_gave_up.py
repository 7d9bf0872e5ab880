"""Ranks that give up (`tests/offload/test_tier_failures.py` has several at a time)."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch.distributed as dist

from moe_plugin.comm import gave_up


class OldError(OSError):
    """Without what errors have since Python 3.11."""

    @property
    def add_note(self) -> NoReturn:
        raise AttributeError("add_note")


def test_a_rank_says_why_on_any_python(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(gave_up, "_several", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(gave_up, "_bounded", said.append)
    monkeypatch.setattr(gave_up, "_break_connections", lambda: said.append("broken"))
    error = OldError("disk is gone")
    error.__notes__ = ["of block 3"]
    for _ in range(2):  # the second time it is known
        gave_up.give_up(error)
    assert error.__notes__ == ["of block 3",
                               "rank 1 of the job gave up: OldError: disk is gone"]
    assert len(said) == 2 and said[1] == "broken"
