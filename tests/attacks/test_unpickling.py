"""Where this package can unpickle without a limit, or make objects of text: each place with the
reason why no file of a stranger gets there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import moe_plugin

pytestmark = pytest.mark.fast
ROOT = Path(moe_plugin.__file__).parent
CALLS = re.compile(
    r"weights_only=False|\"weights_only\": False|(?<!r)pickle\.loads?\(|torch[._]load\(|"
    r"allow_pickle=True|yaml\.(?:load|unsafe_load|full_load)\(|(?<![\w.])(?:eval|exec)\((?!\))|"
    r"trust_remote_code=True")
TRUSTED = "only with --trust-checkpoint"
REASONS = {
    "checkpoint/torch_files.py": f"{TRUSTED}; and the skeleton of a file that it has just written",
    "checkpoint/trust.py": "the restricted loading itself",
    "checkpoint/formats/fairseq/files.py": TRUSTED,
    "checkpoint/formats/megatron/source.py": TRUSTED,
    "checkpoint/formats/megatron/torch_dist.py": TRUSTED,
    "hosts/megatron/restricted.py": TRUSTED,
    "hosts/fairseq/compat/runtime.py": "what ranks of a run send to each other",
    "training/resilience/twins.py": "what ranks of a run send to each other",
}


def _code(path: Path) -> str:
    """A module without its comments and without what its docstrings quote."""
    text = re.sub(r'"""(?:.|\n)*?"""', "", path.read_text(encoding="utf-8"))
    return re.sub(r"#.*", "", text)


def test_every_place_that_unpickles_without_a_limit_has_a_reason() -> None:
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")
             if CALLS.search(_code(path))}
    assert found == set(REASONS)
