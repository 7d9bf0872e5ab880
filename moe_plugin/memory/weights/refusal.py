"""Where weights cannot stream."""

from moe_plugin.config import OffloadConfig


def refuse_streamed_weights(settings: OffloadConfig, host: str) -> None:
    """`ValueError` where weights are to stream in a host that owns the training loop.

    host: its name.
    """
    if settings.weights != "device":
        raise ValueError(
            f"offload.weights={settings.weights} does not fit {host}, which builds all weights at "
            "once and runs the whole model for one micro-batch before the next: use device "
            "(--weights-on device), offload.activations or experts.store, or train with "
            "moe_plugin.hosts.megatron.train or "
            "moe_plugin.hosts.plain.streamed.streamed_trainer")
