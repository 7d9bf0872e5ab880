"""Known warnings are hidden, exactly they, in processes of their own: pytest resets filters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings

import pytest

from moe_plugin.utils.quiet import FAIRSEQ, FAIRSEQ_LINES, MEGATRON, hidden

# warns as the first argument says a module does, with the text of the second
WARNS = """
import logging, sys, warnings
from moe_plugin.utils.quiet import FAIRSEQ, FAIRSEQ_LINES, MEGATRON, hidden, hide
def warn(module, text, category=UserWarning):
    code = "import warnings; warnings.warn(text, category)"
    exec(code, {"__name__": module, "text": text, "category": category})
"""
SCHEMA = "\\n'config' is validated against ConfigStore schema with the same name.\\nThis"


def warned(code: str, **variables: str) -> list[str]:
    """What these lines write to standard error."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    done = subprocess.run([sys.executable, "-c", WARNS + code], check=True, text=True,
                          stderr=subprocess.PIPE, env={**kept, **variables})
    return re.findall(r"\w*Warning: *\n?.*|^line .*", done.stderr, re.M)


def test_known_warnings_are_hidden_and_no_others() -> None:
    code = f"""
hide([*FAIRSEQ, *MEGATRON])
warn("sys", "{SCHEMA}")
warn("hydra.main", "{SCHEMA}")
warn("megatron.core.optimizer", "Transformer Engine and Apex are not installed. Falling back")
warn("megatron.core.optimizer.other", "Transformer Engine and Apex are not installed. Falling back")
warn("user", "{SCHEMA}")
warn("hydra.main", "another one")
warn("moe_plugin.layer", "ours", RuntimeWarning)
"""
    shown = warned(code)
    assert [text.split(":")[0] for text in shown] == ["UserWarning"] * 3 + ["RuntimeWarning"]
    assert "Falling back" in shown[0] and "another one" in shown[2] and "ours" in shown[3]
    assert len(warned(code, PYTHONWARNINGS="default")) == 7


def test_they_are_hidden_while_a_command_runs() -> None:
    line = 'warn("megatron.core.optimizer", "Transformer Engine and Apex are not installed, {}")\n'
    shown = warned(f"with hidden(MEGATRON):\n    {line.format('in')}{line.format('out')}")
    assert [text[-3:] for text in shown] == ["out"]
    before = list(warnings.filters)
    with hidden(MEGATRON):
        assert len(warnings.filters) > len(before)
    assert warnings.filters == before


def test_a_line_of_a_log_is_hidden_once_and_by_its_text() -> None:
    code = """
logging.basicConfig(format="line %(message)s", level=logging.INFO)
log = logging.getLogger("fairseq.utils")
hide(FAIRSEQ, FAIRSEQ_LINES)
hide(FAIRSEQ, FAIRSEQ_LINES)
log.info("--user-dir=/home/me/moe_plugin has already been imported.")
log.info("--user-dir=/home/me/others has already been imported.")
log.info("line %d", len(log.filters))
"""
    assert warned(code) == ["line --user-dir=/home/me/others has already been imported.",
                            "line line 1"]
    assert len(warned(code, PYTHONWARNINGS="default")) == 3


@pytest.mark.parametrize("known", [*FAIRSEQ, *MEGATRON, *FAIRSEQ_LINES], ids=str)
def test_each_is_a_known_one_alone(known: object) -> None:
    """No pattern that hides everything of a module, and none for our own modules but where a
    library's warning names the caller.
    """
    text, module = known.text, getattr(known, "module", "")  # type: ignore[attr-defined]
    assert len(text) >= 30 and not re.match(text, "Something else is deprecated")
    assert not module.startswith("moe_plugin") or ".compat." in module


def test_lines_of_torchft_that_say_nothing_are_hidden() -> None:
    shown = warned("""
from moe_plugin.utils.quiet import TORCHFT, TORCHFT_LINES
logging.basicConfig(format="line %(message)s")
hide(TORCHFT, TORCHFT_LINES)
for text in ("", "a commit"):
    logging.getLogger("torchft_commits").warning(text)
for text in ("Unable to reset NCCL flight recorder", "a replica"):
    logging.getLogger("torchft.manager").warning("[replica1:5/0 - step 3] " + text)
""")
    assert shown == ["line a commit", "line [replica1:5/0 - step 3] a replica"]
