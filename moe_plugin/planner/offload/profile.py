"""What a model's blocks take, as measured: the input of the plans for memory, a file of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from moe_plugin.planner.files import load_record
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import write_regular

MAX_SECONDS, MAX_BYTES, MAX_BLOCKS = 1e6, 10**16, 10_000  # beyond any block or model


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One block of a model, for one micro-batch.

    Attributes:
        name: unique in its model.
        forward_s, backward_s: seconds; backward without computing forward again.
        activation_bytes: what forward keeps for backward, the block's input included.
        kept_bytes: of these, what stays when forward is computed again: the block's input. It is
            also what travels from the block before, where a model is cut.
        parameter_bytes: of the block's weights.
        gradient_bytes: of their gradients.
        workspace_bytes: needed only while forward or backward run, beyond what they keep.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: int = 0
    kept_bytes: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        for f in fields(self)[1:]:
            value, most = getattr(self, f.name), MAX_SECONDS if f.name[-2:] == "_s" else MAX_BYTES
            if not 0 <= value <= most:
                raise ValueError(f"block {short(self.name)}: {f.name}={short(value)} must be from "
                                 f"0 to {most:g}; measure it again")
        if self.kept_bytes > self.activation_bytes:
            raise ValueError(f"block {short(self.name)}: kept_bytes={self.kept_bytes} must be at "
                             f"most activation_bytes={self.activation_bytes}, which counts the "
                             "input, too")


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model's blocks in the order of forward, and the machine that they were measured on.

    Attributes:
        name: for people.
        blocks: one or more.
        base_bytes: on the device all the time: weights that stay, optimizer state, buffers.
        in_bytes_s, out_bytes_s: bandwidth of copies to the device and from it; 0: no copies.
        duplex: whether copies in both directions run at the same time.
    """

    blocks: list[BlockProfile] = field(default_factory=list)
    name: str = "model"
    base_bytes: int = 0
    in_bytes_s: float = 0.0
    out_bytes_s: float = 0.0
    duplex: bool = True

    def __post_init__(self) -> None:
        if not 1 <= len(self.blocks) <= MAX_BLOCKS:
            raise ValueError(f"profile {short(self.name)} has {len(self.blocks)} blocks; give from "
                             f"1 to {MAX_BLOCKS}")
        names = [block.name for block in self.blocks]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"profile {short(self.name)}: block {short(twice)} occurs twice; give "
                             "each block a name of its own")
        for key, most in (("base_bytes", MAX_BYTES), ("in_bytes_s", 1e15), ("out_bytes_s", 1e15)):
            if not 0 <= getattr(self, key) <= most:
                raise ValueError(f"profile {short(self.name)}: {key}={short(getattr(self, key))} "
                                 f"must be from 0 to {most:g}; measure it again")

    @property
    def compute_s(self) -> float:
        """Seconds of all forwards and backwards, nothing computed twice."""
        return sum(block.forward_s + block.backward_s for block in self.blocks)

    def save(self, path: str | Path) -> Path:
        """Write a file, whole or not at all."""
        return write_regular(path, json.dumps(asdict(self), indent=1) + "\n")


def load_profile(path: str | Path) -> ModelProfile:
    """Read a file of a profile, JSON or YAML; `ValueError` where it does not hold one."""
    return load_record(ModelProfile, path, "profile file", "see docs/activations.md")
