"""Train a GPT model: `torchrun -m moe_plugin.hosts.megatron.train --data-path data/corpus ...`."""

from moe_plugin.hosts.megatron.trainer.train import main

if __name__ == "__main__":
    raise SystemExit(main())
