"""Train a GPT language model with this package's MoE layer. This module runs the package's example
script in Megatron's own training loop.

    torchrun --nproc_per_node 2 -m moe_plugin.hosts.megatron.train --data-path data/corpus
    --num-layers 4 ...

The command above is equivalent to `python -m moe_plugin.hosts.megatron.launch
pretrain_gpt_moe`. The option `--cpu` is equivalent to the launcher's `--moe-cpu`. See
docs/megatron.md.
"""

from __future__ import annotations

import sys

from moe_plugin.hosts.megatron import launch
from moe_plugin.hosts.megatron.launch import end_process

_OPTIONS = {"--cpu": launch.CPU, launch.CPU: launch.CPU}


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status of the process. See `launch.status_of`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    options = [_OPTIONS[word] for word in argv if word in _OPTIONS]
    return launch.main([*options, "pretrain_gpt_moe",
                        *(word for word in argv if word not in _OPTIONS)])


if __name__ == "__main__":
    end_process(main)
