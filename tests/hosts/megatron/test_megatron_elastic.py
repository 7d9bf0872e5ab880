"""What `--moe-lighthouse` refuses; replicas that come and go are in tests/faults."""

from __future__ import annotations

import pytest

pytest.importorskip("torchft", reason="needs torchft: pip install 'moe-plugin[elastic]'")
pytest.importorskip("megatron.core", reason="needs megatron-core")

from moe_plugin.hosts.megatron.run import check_replicas
from tests.hosts.megatron.training import MODEL, arguments_of

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(("flags", "message"), [
    ("--bf16", "--fp16, --bf16 and --use-distributed-optimizer: leave these three out"),
    ("--use-distributed-optimizer", "--moe-lighthouse does not fit --fp16"),
    ("--moe-router-enable-expert-bias", "use --moe-router sigmoid_bias"),
    ("--moe-replica 1048576", "replica=1048576 is out of bounds"),
    ("--moe-lighthouse= --moe-replica 2", "replica=2 requires a lighthouse, "
     "because this run would train alone without it"),
])
def test_what_replicas_cannot_be_is_named(flags: str, message: str) -> None:
    args = arguments_of([*MODEL, "--train-iters", "2", "--moe-lighthouse", "http://a:1",
                         *flags.split()])
    with pytest.raises(ValueError, match=message):
        check_replicas(args)
