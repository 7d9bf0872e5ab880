"""Quantized experts with adapters are trained under a limit of 0.36 times the bf16 weights, besides
the memory of a process with a tiny model. Activations and the buffers of compiled functions are a
larger share of this small model than of the model in `scripts.bench.fine_tune_limit`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.20")
pytest.importorskip("accelerate")
from scripts.bench.child import why_not  # noqa: E402
from scripts.bench.fine_tune_limit import SHARE, compare  # noqa: E402

LARGE = {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_experts": 16}
TINY = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4}


def test_losses_are_equal_under_the_limit(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    tiny = compare(str(tmp_path / "tiny"), "nf4_double", 1, TINY, 2, 1.0, besides=1 << 40)
    process = tiny["without"]["cgroup_peak_bytes"]
    found = compare(str(tmp_path / "large"), "nf4_double", 8, LARGE, 2, SHARE + 0.06,
                    besides=process)
    assert found["bf16"] > 750e6
    before, after, _ = found["with"]["losses"]
    assert after < before
