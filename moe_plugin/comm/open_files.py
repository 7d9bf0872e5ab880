"""What to do where a process may open no more files: every group of ranks has sockets and pipes."""

from __future__ import annotations

import errno
import os
import resource

_SAID = os.strerror(errno.EMFILE)  # in errors of gloo, which have no number


def too_many(error: BaseException) -> str:
    """The limit, what is needed and the remedy; empty: the error has another cause."""
    if getattr(error, "errno", None) not in (errno.EMFILE, errno.ENFILE) and (
            _SAID not in str(error)):
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    return (f"this process may open {soft} files at once (`ulimit -n`, up to {most} here), which "
            "is too few for its connections: a rank of two in Megatron needs about 160, one of "
            "more ranks needs more. Run `ulimit -n 4096` in the shell that starts the ranks")
