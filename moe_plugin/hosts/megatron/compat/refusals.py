"""Errors of a layer's settings, whose words stay as they are while Megatron builds a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_ADDED = re.compile(r"( when instantiating \w+)+\Z")


class SettingsError(ValueError):
    """A `ValueError` that ends with its remedy.

    0.15 to 0.19: where a module of a spec cannot be built, Megatron makes its error again, of the
    same class, with " when instantiating CLASS" behind the words, once at each level of the spec.
    """

    def __init__(self, words: str) -> None:
        super().__init__(_ADDED.sub("", words))


@contextmanager
def settings_errors() -> Iterator[None]:
    """`ValueError` inside becomes `SettingsError`, with the same words and traceback."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise SettingsError(str(error)).with_traceback(error.__traceback__) from error.__cause__
