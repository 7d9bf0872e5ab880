"""A warning where nothing keeps the experts of a model balanced in training."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from moe_plugin.comm.base import Comm
from moe_plugin.config import MoEConfig
from moe_plugin.messages import first_process, warn_once
from moe_plugin.records import HostContext
from moe_plugin.routing.contract import RouterModule

# losses that do not look at how many tokens an expert gets
_OTHER_LOSSES = frozenset({"z", "sam_alignment"})
_REMEDY = ("most tokens will visit few experts. Use a balance loss, losses={'gshard': 0.01} "
           "(--moe-losses gshard=0.01; in Megatron also --moe-aux-loss-coeff 0.01), or a router "
           "that needs none, e.g. router.name=sigmoid_bias (--moe-router sigmoid_bias)")


def warn_unbalanced(why: str, remedy: str = _REMEDY) -> None:
    """Warn, once for each text, that nothing keeps the experts balanced."""
    warn_once(__name__, f"{why}: nothing keeps the experts balanced in training, and {remedy}")


def check_balance(router: nn.Module, config: MoEConfig, comm: Comm, host: HostContext) -> None:
    """`warn_unbalanced` for a layer that has neither a balance loss nor a router that balances.

    The first rank of the first layer speaks for all, none where the host does not train; a router
    of another kind than `RouterModule` is believed to balance.
    """
    speaks = host.training and comm.rank == 0 and host.layer_number in (None, 0) and (
        first_process() if host.batch_comm is None else host.batch_comm.rank == 0)
    everywhere = config.router.experts_per_token >= config.num_experts
    if not speaks or everywhere or balances_by_itself(router):
        return
    if not has_balance_loss(config.losses):
        warn_unbalanced(f"router.name={config.router.name!r} with losses={dict(config.losses)!r}")


def balances_by_itself(router: nn.Module) -> bool:
    """Whether a router needs no balance loss; True where it does not say."""
    return router.balances if isinstance(router, RouterModule) else True


def has_balance_loss(losses: Mapping[str, float]) -> bool:
    """Whether one of these losses, name to weight, grows with an uneven load."""
    return any(weight > 0 and name not in _OTHER_LOSSES for name, weight in losses.items())
