"""`fairseq-train` whose last rank sends something else than the gradients that it computed:
`vote_train.py ARGUMENTS...`.
"""

from __future__ import annotations

import os

from fairseq_cli.train import cli_main

from tests.attacks.votes import attack_votes

if __name__ == "__main__":
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        attack_votes()
    cli_main()
