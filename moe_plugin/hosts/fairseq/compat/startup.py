"""Lets stock fairseq 0.12.2 be imported on Python >= 3.11, and hands over to
`moe_plugin.hosts.fairseq.compat` afterwards.

A `.pth` file of the same name calls `boot()` when Python starts. That costs one finder on
`sys.meta_path` and imports nothing: the work happens when, and only when, somebody imports
`fairseq`. It must be a top-level module, because a module of the package would import the package
before fairseq's `--user-dir` does. Of another fairseq than 0.12 only the import is helped.
"""

from __future__ import annotations

import sys

# as typing's, whose import would cost every start of Python some milliseconds
TYPE_CHECKING = False
if TYPE_CHECKING:
    import importlib.machinery
    import logging
    from types import ModuleType
    from typing import Any

# whatever the task of a run, importing fairseq logs that this one lacks an optional package
_SPEECH, _HINT = "fairseq.tasks.text_to_speech", "Please install tensorboardX"


def _no_hint(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_HINT)


class _Loader:
    """fairseq's own loader, with work before and after."""

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
        # the package itself is imported for this release alone: fairseq's `moe` branch refuses a
        # user dir that was imported before
        if str(getattr(module, "__version__", "")).startswith("0.12."):
            _install()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Finder:
    """Waits for the first `import fairseq`. Looking for its spec alone changes nothing."""

    searching = False

    def find_spec(self, name: str, path: Any = None,
                  target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "fairseq" or self.searching:
            return None
        import importlib.util

        self.searching = True  # the other finders answer
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def hashable_fairseq_dataclasses(original: Any) -> Any:
    """`dataclasses.dataclass`, which gives `FairseqDataclass` subclasses an identity hash.

    fairseq <= 0.12.3 on Python >= 3.11: fields such as `common: CommonConfig = CommonConfig()` are
    refused, because the default is unhashable. A class that defines `__hash__` itself keeps it, so
    each subclass is given one at birth. The default stays a default (a `default_factory` would not
    do: fairseq reads `.default` of these fields).
    """

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        made = original(cls, **options)
        if cls is not None and (cls.__module__, cls.__name__) == ("fairseq.dataclass.configs",
                                                                  "FairseqDataclass"):
            made.__init_subclass__ = classmethod(_keep_identity_hash)
        return made

    return dataclass


def _keep_identity_hash(cls: type, **_: Any) -> None:
    if "__hash__" not in cls.__dict__:
        cls.__hash__ = object.__hash__  # type: ignore[method-assign]


def _install() -> None:
    from moe_plugin.hosts.fairseq.compat import install

    install()


def boot() -> None:
    """Wait for fairseq; the `.pth` file calls this when Python starts.

    Calling it again does nothing.
    """
    if "fairseq" not in sys.modules and not any(
            isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
