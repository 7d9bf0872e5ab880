"""Train a GPT language model with our MoE layer: the short script of this package on Megatron's own
loop.

    torchrun --nproc_per_node 2 -m moe_plugin.hosts.megatron.train --data-path data/corpus
    --num-layers 4 ...

It is `python -m moe_plugin.hosts.megatron.launch pretrain_gpt_moe` by another name; `--cpu` stands
for the launcher's `--moe-cpu`. See docs/megatron.md.
"""

from __future__ import annotations

import sys

from moe_plugin.hosts.megatron import launch
from moe_plugin.hosts.megatron.endings import end_process

_OPTIONS = {"--cpu": launch.CPU, launch.CPU: launch.CPU}


def main(argv: list[str] | None = None) -> int:
    """Command line; the status with which the process ends (`endings.status_of`)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    options = [_OPTIONS[word] for word in argv if word in _OPTIONS]
    return launch.main([*options, "pretrain_gpt_moe",
                        *(word for word in argv if word not in _OPTIONS)])


if __name__ == "__main__":
    end_process(main)
