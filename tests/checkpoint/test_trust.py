"""Which pickles are read: listed classes, members of listed enums, nothing that runs code."""

from __future__ import annotations

import enum
import io
import pickle
from typing import Any

import pytest
import torch
from torch.serialization import get_safe_globals, safe_globals

from moe_plugin.checkpoint.trust import Unpickler, UntrustedFile, load

pytestmark = pytest.mark.fast


class Color(enum.Enum):
    """A listed enum."""

    RED = "red"

    def paint(self) -> str:
        """What a file must not reach."""
        return self.value


class Plain:
    """A listed class that is no enum."""

    RED = "red"


class Attribute:
    """Written as Python 3.11.0 to 3.11.3 write the member of an enum."""

    def __init__(self, of: Any, name: Any) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


def read(value: Any) -> Any:
    listed = [f"{kind.__module__}.{kind.__qualname__}" for kind in (Color, Plain)]
    return Unpickler(io.BytesIO(pickle.dumps(value)), listed, "a file").load()


def test_values_types_and_members_of_listed_classes_are_read():
    """Members in both forms, whichever this Python writes."""
    assert read([1, "a", Color.RED, Attribute(Color, "RED"), torch.bfloat16]) == [
        1, "a", Color.RED, Color.RED, torch.bfloat16]


def test_a_stream_is_read_again_where_its_classes_are_looked_up_later() -> None:
    """As the common state among the objects of a checkpoint is, in a process without Megatron."""
    stream = io.BytesIO()
    torch.save([Color.RED], stream)
    stream.seek(0)
    with pytest.raises(UntrustedFile, match="Color"):
        load(stream, [], "a file")
    assert load(stream, [Color], "a file") == [Color.RED]


def test_what_others_listed_stays_listed() -> None:
    """As Megatron lists its own classes, once in a process; ours are listed for one file."""
    stream = io.BytesIO()
    torch.save([Color.RED], stream)
    for before in ([Color], []):
        with safe_globals(before):
            stream.seek(0)
            assert load(stream, [Color, Plain], "a file") == [Color.RED]
            assert [one for one in get_safe_globals() if one in (Color, Plain)] == before


@pytest.mark.parametrize("value", [
    Attribute(Color, "paint"), Attribute(Color, "__class__"), Attribute(Plain, "RED"),
    Attribute(Attribute(Color, "RED"), "paint"), Attribute(Color, ["RED"]),
    Attribute(torch.float32, "__class__"), enum.Enum, print, eval])
def test_nothing_else_is(value):
    """By name; attributes of other things, and what is no member of an enum."""
    with pytest.raises(UntrustedFile, match="a file contains"):
        read(value)
