"""Dispatchers, which send the rows of tokens to the experts and return the outputs of the experts.
"""

from moe_plugin.dispatch.all_gather import AllGatherDispatcher
from moe_plugin.dispatch.base import (
    DispatchContext,
    Dispatcher,
    DispatchTraits,
    Sent,
    check_settings,
    dispatchers,
)
from moe_plugin.dispatch.bounded import BoundedDispatcher
from moe_plugin.dispatch.deepep import DeepEPDispatcher, ElasticDeepEPDispatcher, HybridEPDispatcher
from moe_plugin.dispatch.exchange import ExchangeDispatcher
from moe_plugin.dispatch.nccl_ep import NCCLDispatcher
from moe_plugin.dispatch.ragged import PaddedDispatcher, ParmS2Dispatcher, RaggedDispatcher
from moe_plugin.dispatch.row_pages import PagedStash
from moe_plugin.dispatch.rows import IndexSliceDispatcher
from moe_plugin.dispatch.token_entry import TokenEntry

__all__ = [
    "AllGatherDispatcher", "BoundedDispatcher", "DeepEPDispatcher", "DispatchContext",
    "DispatchTraits", "Dispatcher", "ElasticDeepEPDispatcher", "ExchangeDispatcher",
    "HybridEPDispatcher", "IndexSliceDispatcher", "NCCLDispatcher", "PaddedDispatcher",
    "PagedStash", "ParmS2Dispatcher", "RaggedDispatcher", "Sent", "TokenEntry", "check_settings",
    "dispatchers",
]
