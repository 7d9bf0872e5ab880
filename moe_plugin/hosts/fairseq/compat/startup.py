"""Make unmodified fairseq 0.12 importable on Python >= 3.11, and patch it after the import.

A `.pth` file with the same name as this module calls `boot()` when Python starts. `boot` only adds
a finder to `sys.meta_path`. It imports nothing. The patches are applied only when code imports
`fairseq`. This file must be a top-level module. Importing a module from inside the package would
import the whole package before fairseq's `--user-dir` imports it. For fairseq versions other than
0.12, only the import is patched.
"""

from __future__ import annotations

import sys

# replaces the constant of typing, because importing typing would slow down every start of Python
TYPE_CHECKING = False
if TYPE_CHECKING:
    import importlib.machinery
    import logging
    from types import ModuleType
    from typing import Any

# importing fairseq always logs that this task lacks an optional package, even if it is not used
_SPEECH, _HINT = "fairseq.tasks.text_to_speech", "Please install tensorboardX"


def _no_hint(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_HINT)


class _Loader:
    """Wrapper around fairseq's own loader that does additional work before and after the import."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import dataclasses
        import logging

        original, speech = dataclasses.dataclass, logging.getLogger(_SPEECH)
        dataclasses.dataclass = hashable_fairseq_dataclasses(original)
        if not sys.warnoptions:  # as in `moe_plugin.utils.quiet`
            speech.addFilter(_no_hint)
        try:
            self.inner.exec_module(module)
        finally:
            dataclasses.dataclass = original
            speech.removeFilter(_no_hint)
        # the package itself is imported only for this release: fairseq's `moe` branch refuses a
        # user directory that was imported before
        if str(getattr(module, "__version__", "")).startswith("0.12."):
            _install()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Finder:
    """A module finder that waits for the first `import fairseq`. Looking up the module spec of
    fairseq without importing it does not apply any patch.
    """

    searching = False

    def find_spec(self, name: str, path: Any = None,
                  target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "fairseq" or self.searching:
            return None
        import importlib.util

        self.searching = True  # so that only the other finders answer the search below
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]  # has a loader's methods
        return spec


def hashable_fairseq_dataclasses(original: Any) -> Any:
    """Return a version of `dataclasses.dataclass` that adds an identity hash to subclasses of
    `FairseqDataclass`.

    fairseq <= 0.12.3 contains fields such as `common: CommonConfig = CommonConfig()`. Python >=
    3.11 rejects these fields, because the default is not hashable. `dataclasses.dataclass` does not
    replace a `__hash__` that a class already defines. Therefore, each subclass of
    `FairseqDataclass` gets a `__hash__` when it is created. A `default_factory` cannot be used,
    because fairseq reads the attribute `.default` of these fields.
    """

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        decorated = original(cls, **options)
        if cls is not None and (cls.__module__, cls.__name__) == ("fairseq.dataclass.configs",
                                                                  "FairseqDataclass"):
            decorated.__init_subclass__ = classmethod(_keep_identity_hash)
        return decorated

    return dataclass


def _keep_identity_hash(cls: type, **_: Any) -> None:
    if "__hash__" not in cls.__dict__:
        cls.__hash__ = object.__hash__  # type: ignore[method-assign, assignment]


def _install() -> None:
    from moe_plugin.hosts.fairseq.compat import install

    install()


def boot() -> None:
    """Install the module finder that waits for fairseq. The `.pth` file calls this function when
    Python starts.

    Further calls have no effect.
    """
    if "fairseq" not in sys.modules and not any(
            isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
