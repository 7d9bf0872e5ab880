"""A rank dies or stalls in a layer: Megatron's other rank ends in time, by a named error."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.lost_rank import is_last, lose
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, trained

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


def _train_and_lose(how: str, argv: list[str]) -> None:
    if is_last():
        lose(how, "send_receive", 9)
    trained(argv)


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_the_other_rank_says_what_it_waited_for(data: str, how: str) -> None:
    argv = [*MODEL, *EP2, "--data-path", data, "--train-iters", "6", "--moe-timeout", "2"]
    with pytest.raises(AssertionError) as error:
        on_ranks(2, _train_and_lose, how, argv)
    said = str(error.value)
    assert "CommError: rank 0 of 2 in group 'ranks [0, 1]': " in said
    assert "from rank 1 failed" in said and "send_receive of torch." in said
