"""scripts/train_plain.py as a replica that records whose gradients are in each step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moe_plugin.training.resilience import elastic
from tests.faults import recorded, replicas

if __name__ == "__main__":
    script = replicas.train_plain()
    args = script.parse()
    elastic.ElasticReplica = recorded.recorded(  # type: ignore[misc]
        Path(args.out), args.replica, int(os.environ.get("RANK", "0")))
    sys.exit(script.main())
