"""Dispatchers: how tokens become expert rows and come back."""

from moe_plugin.dispatch.all_gather import AllGatherDispatcher
from moe_plugin.dispatch.base import Dispatcher, check_capacity, dispatchers
from moe_plugin.dispatch.index_slice import IndexSliceDispatcher
from moe_plugin.dispatch.padded import PaddedDispatcher
from moe_plugin.dispatch.parm import SharedSlotsDispatcher
from moe_plugin.dispatch.ragged import RaggedDispatcher

__all__ = [
    "AllGatherDispatcher", "Dispatcher", "IndexSliceDispatcher", "PaddedDispatcher",
    "RaggedDispatcher", "SharedSlotsDispatcher", "check_capacity", "dispatchers"
]
