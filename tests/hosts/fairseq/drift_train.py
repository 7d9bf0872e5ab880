"""`drift_train.py PART ARGS...`: `fairseq-train` in which a part of the last rank's layers drifts.
"""

from __future__ import annotations

import sys

from fairseq_cli.train import cli_main

from tests.hosts.drift import drift
from tests.hosts.lost_rank import is_last

if __name__ == "__main__":
    part = sys.argv.pop(1)
    if is_last() and part != "nothing":
        drift(part)
    cli_main()
