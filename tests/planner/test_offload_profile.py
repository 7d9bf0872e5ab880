"""Profiles of a model's blocks: files there and back, bad values by name."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from moe_plugin.planner.offload.schedule import BlockProfile, ModelProfile, load_profile

pytestmark = pytest.mark.fast

PROFILE = ModelProfile(
    name="two", base_bytes=10**9, in_bytes_s=2e9, out_bytes_s=1e9, duplex=False, blocks=[
        BlockProfile(name="0", forward_s=1e-5, backward_s=0.25, activation_bytes=100,
                     kept_bytes=10, parameter_bytes=7, gradient_bytes=7, workspace_bytes=3),
        BlockProfile(name="1", forward_s=2.0, backward_s=3.0)])


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    assert load_profile(PROFILE.save(tmp_path / "p.json")) == PROFILE
    assert isinstance(load_profile(tmp_path / "p.json").blocks[0], BlockProfile)
    assert PROFILE.compute_s == pytest.approx(5.25001)


@pytest.mark.parametrize(("change", "match"), [
    ({"blocks": []}, "has 0 blocks; it must have from 1"),
    ({"blocks": [{"name": "a", "forward_s": 1}]}, "backward_s"),
    ({"blocks": [{"name": "a", "forward_s": -1, "backward_s": 1}]}, "'a': forward_s=-1.0 must be"),
    ({"blocks": [{"name": "a", "forward_s": float("nan"), "backward_s": 1}]}, "forward_s=nan"),
    ({"blocks": [{"name": "a", "forward_s": 1, "backward_s": 1, "kept_bytes": 2}]},
     "kept_bytes=2 must be at most activation_bytes=0"),
    ({"blocks": [{"name": "a", "forward_s": 1, "backward_s": 1}] * 2}, "'a' occurs twice"),
    ({"in_bytes_s": -1}, "in_bytes_s=-1.0 must be from 0"),
    ({"speed": 1}, "unknown key 'speed'"),
])
def test_bad_profiles_are_refused_by_name(tmp_path: Path, change: dict, match: str) -> None:
    (tmp_path / "p.json").write_text(json.dumps(asdict(PROFILE) | change))
    with pytest.raises(ValueError, match=match):
        load_profile(tmp_path / "p.json")


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[1]"):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(ValueError, match="profile file"):
            load_profile(tmp_path / "p.json")
    with pytest.raises(ValueError, match="profile file .* cannot be read"):
        load_profile(tmp_path / "none.json")
