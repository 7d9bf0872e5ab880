"""Clusters, devices and models for the planner's tests."""

from __future__ import annotations

from moe_plugin.planner.cluster import Cluster, Device, Link
from moe_plugin.planner.model import ModelShape

A100 = Device(name="a100", flops=150e12, half_rows=256, memory_bytes_s=1.3e12, launch_s=1e-5,
              memory_bytes=80e9)
# the single-layer comparison of the Tutel blog (batch 32, sequence 1,024, k = 2, M = H = 2,048),
# one expert per rank. Constants: 220 TFLOP/s in matmuls, 1.3 TB/s memory, 250 GB/s inside a node, 8
# GB/s per rank between nodes in all-to-all (untuned), 3 and 5 us per message.
BLOG_DEVICE = Device(name="a100", flops=220e12, half_rows=256, memory_bytes_s=1.3e12, launch_s=1e-5)


def cluster(nodes: int = 2, per_node: int = 8, inter: float = 22e9,
            nics: int | None = None) -> Cluster:
    """GPU nodes with a network card a rank."""
    return Cluster(nodes=nodes, ranks_per_node=per_node, nics=nics or per_node, intra=Link(
        alpha_s=3e-6, beta_s=1 / 250e9), inter=Link(alpha_s=5e-6, beta_s=1 / inter),
                   copy_s=1 / 1.3e12)


def model(**changes) -> ModelShape:
    """A small GPT with experts."""
    return ModelShape(
        **{
            "layers": 8, "model_dim": 1024, "ffn_dim": 4096, "heads": 16, "vocab": 32000,
            "sequence": 1024, "global_batch": 64, "experts": 8, **changes
        })
