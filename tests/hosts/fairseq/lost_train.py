"""`fairseq-train` whose last rank is lost in a layer: `lost_train.py HOW METHOD AT ARGS...`."""

from __future__ import annotations

import sys

from fairseq_cli.train import cli_main

from tests.hosts.lost_rank import is_last, lose

if __name__ == "__main__":
    how, method, at = sys.argv[1:4]
    del sys.argv[1:4]
    if is_last():
        lose(how, method, int(at))
    cli_main()
