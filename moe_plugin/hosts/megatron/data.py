"""Write a text as data: `python -m moe_plugin.hosts.megatron.data --input corpus.txt ...`."""

from moe_plugin.hosts.megatron.trainer.data import main

if __name__ == "__main__":
    raise SystemExit(main())
