"""Known warnings of other libraries that users of this package cannot avoid, and functions that
hide them.

A warning is identified by the module that reports it and by the beginning of its message. All other
warnings, and all errors, are still shown. Nothing is hidden if the user sets warning filters for
Python (`PYTHONWARNINGS=default`, `python -W ...`).
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A known warning.

    Attributes:
        module: the module that reports the warning.
        text: regular expression for the beginning of the warning's message.
    """

    module: str
    text: str


@dataclass(frozen=True)
class KnownLine:
    """A known line that another library logs.

    Attributes:
        logger: name of the logger.
        text: regular expression for the beginning of the line.
    """

    logger: str
    text: str

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for the known line, so that the logger drops it. `Logger.addFilter` expects
        this method.
        """
        return re.match(self.text, record.getMessage()) is None


_SCHEMA = r"'\w+' is validated against ConfigStore schema with the same name"
_TORCH_NORM = "Apex is not installed. Falling back to Torch Norm"
_NO_APEX = "Transformer Engine and Apex are not installed"
_PIN_MEMORY = Known("torch.utils.data.dataloader",
                    "'pin_memory' argument is set as true but no accelerator is found")
# Settings of fairseq 0.12 under hydra 1.3, and calls that torch has renamed since. fairseq has no
# further releases. The last warning appears in every run on CPU.
FAIRSEQ = (
    Known("moe_plugin.hosts.fairseq.compat.runtime", 'version_base="1.1" selects Hydra 1.1'),
    Known("moe_plugin.hosts.fairseq.compat.runtime", "`broadcast_buffers` is deprecated"),
    Known("fairseq_cli.hydra_train", "The version_base parameter is not specified"),
    Known("hydra.experimental.compose", r"hydra.experimental.compose\(\) is no longer exp"),
    Known("hydra.core.default_element", "In '.*': Usage of deprecated keyword in package header"),
    Known("hydra.compose", "The strict flag in the compose API is deprecated"),
    Known("hydra._internal.hydra", "Future Hydra versions will no longer change working directory"),
    Known("hydra.main", _SCHEMA),
    Known("__main__", _SCHEMA),  # in fairseq-generate
    Known("sys", _SCHEMA),
    Known("fairseq_cli.hydra_train", _SCHEMA),
    Known("moe_plugin.hosts.fairseq.compat.flags", _SCHEMA),
    Known("fairseq.tasks.fairseq_task", r"`torch.cuda.amp.autocast\(args...\)` is deprecated"),
    Known("torch.nn.functional", "Support for mismatched key_padding_mask and attn_mask is depr"),
    _PIN_MEMORY,
)
FAIRSEQ_LINES = (  # fairseq imports a user directory twice
    KnownLine("fairseq.utils", r"--user-dir=.*moe_plugin has already been imported"),
)
# Missing optional packages that replace parts of Megatron-core on GPUs (`moe-plugin doctor` lists
# them), and Megatron's own use of deprecated names.
MEGATRON = (
    Known("megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision", _NO_APEX),
    Known("megatron.core.optimizer", _NO_APEX),
    Known("megatron.core.optimizer.optimizer", _NO_APEX),
    Known("megatron.core.optimizer.clip_grads", _NO_APEX),
    Known("megatron.core.models.backends", _TORCH_NORM),
    Known("megatron.core.models.gpt.gpt_layer_specs", _TORCH_NORM),
    Known("megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs", _TORCH_NORM),
    Known("megatron.core.extensions.transformer_engine_spec_provider",
          "Only transformer-engine>=1.7.0 supports MoE experts"),
    Known("megatron.training.utils.common_utils", _NO_APEX),
    Known("megatron.core.transformer.transformer_config", "full scope is deprecated. Use empty"),
    Known("megatron.core.dist_checkpointing.strategies.torch", "`load_state_dict` is deprecated"),
    Known("moe_plugin.hosts.megatron.compat.cpu", "Please use DTensor instead and we are deprec"),
    _PIN_MEMORY,
)
# torchft's messages about each quorum on a machine without NCCL, and about a received state
TORCHFT = (Known("torch.distributed._serialization", "The given buffer is not writable"),)
TORCHFT_LINES = (
    KnownLine("torchft.manager", r".*Unable to reset NCCL flight recorder"),
    # these loggers write empty lines
    *(KnownLine(f"torchft_{name}", r"\Z") for name in ("commits", "quorums", "errors")),
)
# The first node, which hosts the rendezvous store, may end before the other nodes.
TORCHRUN_LINES = (
    KnownLine("torch.distributed.elastic.rendezvous.dynamic_rendezvous",
              r"The node '.*' has failed to shutdown the rendezvous"),
)


def hide(known: Iterable[Known], lines: Iterable[KnownLine] = ()) -> None:
    """Hide known warnings and log lines until the process ends or the filters of `warnings` are
    reset.

    Calling this function again has no further effect.
    """
    if sys.warnoptions:
        return
    for warning in known:
        warnings.filterwarnings("ignore", r"\s*" + warning.text,
                                module=re.escape(warning.module) + r"\Z")
    for line in lines:
        logging.getLogger(line.logger).addFilter(line)


@contextmanager
def hidden(known: Iterable[Known]) -> Iterator[None]:
    """Inside the block, hide known warnings. After the block, the previous filters are restored."""
    with warnings.catch_warnings():
        hide(known)
        yield


def own_log(verbose: bool = False) -> None:
    """Set up logging to standard error for a command of this package. Nothing is changed if the
    program has already set up logging.

    All messages of this package are logged, but messages of other libraries only if their level is
    `WARNING` or higher.

    Args:
        verbose: whether to log all messages of all libraries.
    """
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING,
                            format="%(message)s")
        if not verbose:
            logging.getLogger("moe_plugin").setLevel(logging.INFO)


@contextmanager
def quiet(name: str = "moe_plugin") -> Iterator[None]:
    """Inside the block, show only warnings and errors of a logger."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
