"""One browser for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.observe.chromium import Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()
