"""Kills runs of `transformers.Trainer`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import transformers


class Killed(BaseException):
    """Ends a run as a signal would: nothing handles it."""


@contextlib.contextmanager
def killed_at(step: int) -> Iterator[None]:
    """Kills a run that saves at this step, when the weights are written and other files not yet."""
    whole = transformers.Trainer._save_rng_state

    def killed(self: Any, output_dir: str) -> None:
        if self.state.global_step == step:
            raise Killed
        whole(self, output_dir)

    with mock.patch.object(transformers.Trainer, "_save_rng_state", killed):
        yield
