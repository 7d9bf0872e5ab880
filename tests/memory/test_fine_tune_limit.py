"""The program that fine-tunes under a memory limit, with a tiny model and a limit that is never
reached.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.20")
pytest.importorskip("accelerate")
from scripts.bench.child import why_not  # noqa: E402
from scripts.bench.fine_tune_limit import compare  # noqa: E402

TINY = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4}


def test_losses_are_equal_under_the_limit(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    found = compare(str(tmp_path), "nf4_double", 1, TINY, 2, 1.0, besides=1 << 40)
    before, after, _ = found["with"]["losses"]
    assert after < before and found["without"]["losses"] == found["with"]["losses"]
