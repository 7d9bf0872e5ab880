"""The progress bar shows itself to a terminal only."""

from __future__ import annotations

import io

import pytest

from moe_plugin.observe.features import first_step
from moe_plugin.utils.messages import progress

pytestmark = pytest.mark.fast


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_nothing() -> None:
    stream = io.StringIO()
    with progress(3, "waiting", stream=stream) as bar:
        bar.update(1)
        bar.set_postfix_str("loss 1")
    assert stream.getvalue() == ""


def test_a_terminal_sees_count_and_text() -> None:
    stream = Terminal()
    with progress(3, "waiting", stream=stream) as bar:
        bar.update(2)
        bar.set_postfix_str("loss 1.5")
    assert "waiting" in stream.getvalue() and "2/3" in stream.getvalue(
    ) and "loss 1.5" in stream.getvalue()


@pytest.mark.parametrize(("left", "text"), [
    (199, "; 199 steps left, 4.15 min at this speed"),
    (1, "; 1 step left, 1.25 s at this speed"), (None, "")])
def test_the_first_step_tells_the_rest(left: int | None, text: str) -> None:
    assert first_step(1.25, 8192, left) == "first step: 1.25 s, 6,554 tokens/s" + text
