"""A stand-in for the package `deep_ep` over torch.distributed on a CPU: the published interfaces of
DeepEP 1.2.1 (`Buffer`), DeepEP 2.1.0 (`ElasticBuffer`) and its branch hybrid-ep (`HybridEPBuffer`),
which nobody has in one installation.
"""

from deep_ep.buffer import Buffer, Config
from deep_ep.buffers.elastic import ElasticBuffer, EPHandle
from deep_ep.hybrid_ep_buffer import HybridEPBuffer

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "HybridEPBuffer"]
