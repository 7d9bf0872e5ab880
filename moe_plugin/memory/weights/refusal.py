"""Where weights cannot stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from moe_plugin.config import OffloadConfig

_may = ContextVar("weights_may_stream", default=False)


@contextmanager
def weights_may_stream() -> Iterator[None]:
    """Inside, a host builds a model whose weights do."""
    before = _may.set(True)
    try:
        yield
    finally:
        _may.reset(before)


def refuse_streamed_weights(settings: OffloadConfig, host: str) -> None:
    """`ValueError` where weights are to stream in a model of a host that runs it as a whole.

    host: its name.
    """
    if settings.weights != "device" and not _may.get():
        raise ValueError(
            f"offload.weights={settings.weights} does not fit {host}, which builds all weights at "
            "once and runs the whole model for one micro-batch before the next: use device "
            "(--weights-on device), offload.activations or experts.store, or train a language "
            "model by fairseq-train or moe_plugin.hosts.megatron.launch, another one with "
            "moe_plugin.hosts.plain.streamed.streamed_trainer")
