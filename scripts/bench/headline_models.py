"""Predict published results with the planner. The constants are estimates from data sheets that the
package installs, or constants in this module with a stated source; none is fitted to published
results. If a publication does not state a setting, the prediction is a range over several values.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from moe_plugin.planner.all_to_all_cost import predict
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster, Link, load_cluster, load_device
from moe_plugin.planner.events import ParmShape
from moe_plugin.planner.forest import plan
from moe_plugin.planner.forest.baselines import baselines
from moe_plugin.planner.forest.presets import preset
from moe_plugin.planner.forest.simulate import program_of
from moe_plugin.planner.layer_cost import LayerShape, layer_cost
from moe_plugin.planner.model import ModelPlan, ModelShape
from moe_plugin.planner.model_search import ScaleRow, scale_table, static_layer_s
from moe_plugin.planner.offload.weight_streaming import Layer, StreamPlan
from moe_plugin.planner.offload.weight_streaming import plan as stream_plan
from moe_plugin.planner.once import GroupShape, all_gather_s, all_reduce_s, all_to_all_s
from moe_plugin.planner.pipeline.schedules import MODES, Pipeline
from moe_plugin.planner.pipeline.slices import cut
from moe_plugin.planner.plan_cost import dense_layer_s, time_of
from moe_plugin.planner.prefill import CUTS, Kernel, PrefillLoad, choices
from moe_plugin.planner.vote_assignments import mols, repetition
from scripts.bench.study import ROOT

CONFIGS = ROOT / "configs"
PEERS, PEER_DELAY_S = 4, 0.01  # of ATOM's comparison with a pipeline
A100, V100 = (load_device(CONFIGS / "devices" / f"{name}.yaml") for name in (
    "a100_80g", "v100_32g"))
AZURE = load_cluster(CONFIGS / "clusters" / "a100_ib.yaml")
# from NVIDIA's data sheets of the V100 (NVLink, 150 GB/s per direction) and the DGX-1 (four network
# cards of 100 Gbit/s); the seconds per message are those of AZURE
DGX1 = Cluster(nodes=8, ranks_per_node=8, nics=4, intra=Link(alpha_s=3e-6, beta_s=1 / 150e9),
               inter=Link(alpha_s=5e-6, beta_s=1 / 12.5e9), copy_s=1 / V100.memory_bytes_s)
# from NVIDIA's data sheet of the H800: half of 989 TFLOP/s in bf16, 200 GB/s NVLink per direction
H800_FLOPS, H800_BYTES_S, LAUNCH_S, MESSAGE_S = 989e12 / 2, 200e9, 1e-5, 3e-6
# four nodes of eight GPUs: 12 of the 16 GB/s of PCIe 3, and half of that per GPU between nodes
PCIE = Cluster(nodes=4, ranks_per_node=8, nics=8, intra=Link(alpha_s=1e-5, beta_s=1 / 12e9),
               inter=Link(alpha_s=2e-5, beta_s=1 / 6e9))
# the layer of Tutel's blog: 32 sequences of 1,024 tokens and one expert on each GPU
LAYER = LayerShape(tokens=32 * 1024, model_dim=2048, hidden_dim=2048, experts=8, top_k=2,
                   capacity_factor=1.0)
TOKENS = (4096, 8192, 16384, 32768)  # tokens per GPU, where the publication does not state them
UNTUNED = 2.56  # slowdown of an untuned all-to-all: the least gain by tuning in Tutel's blog
# bytes that all passes of the branch's code move per element of a tokens x experts x slots mask
MASK_BYTES = 50
Range = tuple[float, float]


def spread(values: Sequence[float]) -> Range:
    return min(values), max(values)


def _scaled(gpus: int, tokens: int, cluster: Cluster = AZURE) -> ScaleRow:
    nodes = gpus // cluster.ranks_per_node
    return scale_table(replace(LAYER, tokens=tokens), cluster, A100, [nodes])[0]


def sparse_layer(gpus: int, slower: float = 1.0) -> float:
    """Return the time of one-hot dispatch divided by the time of sparse dispatch in the same
    layout, the comparison made in Tutel's blog.
    """
    link = replace(AZURE.inter, beta_s=slower * AZURE.inter.beta_s)
    row = _scaled(gpus, LAYER.tokens, replace(AZURE, inter=link))
    return row.static_s / row.plain_s


def adaptive_layer(gpus: int) -> Range:
    """Return the time of one-hot dispatch in one layout divided by the time of sparse dispatch in
    the best layout, as a range over `TOKENS`.
    """
    return spread([_scaled(gpus, tokens).speedup for tokens in TOKENS])


def adapted(of: str) -> float:
    """Return the largest speedup from adapting only `r` or only `d`, over 16 to 2,048 GPUs and all
    `TOKENS`.
    """
    return max(row.plain_s / getattr(row, f"{of}_alone_s") for row in (
        _scaled(2**n, tokens) for n in range(4, 12) for tokens in TOKENS))


def two_dimensional() -> float:
    """Return the largest ratio of the linear all-to-all time to the 2DH all-to-all time, on 2,048
    GPUs with 64 KiB to 256 MiB per GPU.
    """
    cluster = AZURE.with_ranks(2048)
    return max(predict(cluster, "linear", 2**n).seconds / predict(cluster, "2dh", 2**n).seconds
               for n in range(16, 29))


def whole_model(gpus: int, mask_bytes: float = 0.0) -> float:
    """Return the time with one-hot dispatch divided by the time with sparse dispatch, for a
    training step of the 1.1 T model in Tutel's table 1.

    Each GPU processes 24 sequences and stores one expert.

    Args:
        mask_bytes: bytes moved per mask element, in addition to the reads by matmuls.
    """
    cluster = AZURE.with_ranks(gpus)
    model = ModelShape(layers=32, model_dim=4096, ffn_dim=16384, heads=32, vocab=51200,
                       sequence=1024, global_batch=24 * gpus, experts=gpus, capacity_factor=1.0)
    placed = ModelPlan(tp=1, pp=1, dp=gpus, ep=gpus, etp=1, micro_batch=24,
                       layout=LayoutChoice(r=1))
    layer = model.layer(placed.tokens(model))
    masks_s = mask_bytes * layer.top_k * layer.tokens**2 / A100.memory_bytes_s
    seconds = (static_layer_s(layer, cluster, A100) + masks_s,
               layer_cost(layer, cluster, A100, placed.layout).seconds)
    one_hot, sparse = (sum(time_of(model, cluster, A100, placed, s).values()) for s in seconds)
    return one_hot / sparse


@cache
def pipeline_moe() -> tuple[Range, Range, Range]:
    """Return predictions for PPMoE on DGX-1 machines, each as a range.

    The three ranges are the speedup over experts on all ranks of eight nodes, the same speedup if
    every tensor-parallel rank sends all of its rows, and the throughput as a fraction of the dense
    backbone's throughput. The model has dense layers with the width of GPT-3 6.7B, and MoE layers
    with 64 experts. The MoE model has 22 times as many parameters as its dense backbone. Each range
    covers 1 to 8 sequences of 2,048 tokens, and one or two experts per token.
    """
    node, found = DGX1.resized(1), []
    for k, sequences in itertools.product((1, 2), (1, 2, 4, 8)):
        model = ModelShape(layers=32, model_dim=4096, ffn_dim=16384, sequence=2048, experts=64,
                           top_k=k)
        tokens = sequences * model.sequence
        dense = dense_layer_s(model, node, V100, tokens, 8)
        whole_s = sum(dense.values())
        # one of the two all-reduces of a dense layer belongs to the feed-forward layer
        rest_s = whole_s + dense["attention"] + dense["tensor parallel"] / 2
        layer = model.layer(tokens // 8)
        ours = layer_cost(layer, node, V100, LayoutChoice(r=1, gather_tokens=True)).seconds
        theirs = layer_cost(layer, DGX1, V100, LayoutChoice(r=1))
        sends = theirs.phases()["a2a_out"] + theirs.phases()["a2a_back"]
        found.append(((rest_s + theirs.seconds) / (rest_s + ours),
                      (rest_s + theirs.seconds + 7 * sends) / (rest_s + ours),
                      2 * whole_s / (rest_s + ours)))
    return tuple(spread(values) for values in zip(*found, strict=True))


def trees(boxes: int = 2) -> float:
    """Return the load of the busiest link with ring algorithms divided by its load with planned
    trees, on DGX A100 machines.

    The returned value is the largest ratio over three collectives.
    """
    network = preset(f"dgx-a100:{boxes}")
    return max(float(ring.inverse_bandwidth() / program_of(plan(network, kind)).inverse_bandwidth())
               for kind in ("all_gather", "reduce_scatter", "all_reduce")
               for ring in baselines(network, kind) if ring.name == "ring")


def schedule_s(shape: ParmShape, cluster: Cluster, schedule: str, overlap: bool = False) -> float:
    """Predict the time in seconds of a forward pass's exchanges with a closed formula.

    Args:
        schedule: "baseline", "s1" or "s2".
        overlap: whether the all-gather of schedule `s2` overlaps with the second all-to-all.
    """
    world, mp, esp = GroupShape(cluster.ranks), GroupShape(shape.replicas), GroupShape(shape.shards)
    volume = shape.bytes_rows * shape.shards
    if schedule == "baseline":
        parallel = GroupShape(max(1, cluster.ranks // shape.shards), shape.shards)
        gather = all_gather_s(cluster, esp, shape.bytes_in) if shape.shards > 1 else 0.0
        return gather + all_reduce_s(cluster, esp, volume) + 2 * all_to_all_s(
            cluster, parallel, "linear", volume)
    send = all_to_all_s(cluster, world, "linear", volume / shape.replicas)
    gathered = shape.bytes_in if schedule == "s1" else shape.bytes_rows
    gather = all_gather_s(cluster, mp, gathered / shape.replicas) if shape.replicas > 1 else 0.0
    return send + (max(send, gather) if schedule == "s2" and overlap else send + gather)


def shared_tokens(which: int) -> float:
    """Return the exchange time of the plain schedule divided by the time of the faster Parm
    schedule: the smallest (`which=0`) or largest (`which=1`) value over 1,296 layer shapes.
    """
    gains = []
    for batch, length, width, k, f, replicas, shards in itertools.product(
            (2, 4, 8), (512, 1024, 2048), (1024, 2048, 4096, 8192), (1, 2), (1.2, 2.4), (1, 2, 4),
            (1, 2, 4)):
        shape = ParmShape(tokens=batch * length, model_dim=width, rows_factor=k * f,
                          replicas=replicas, shards=shards)
        plain, *split = (schedule_s(shape, PCIE, name, True) for name in ("baseline", "s1", "s2"))
        gains.append(plain / min(split))
    return spread(gains)[which]


def prefill(gpus: int, width: int, inner: int, experts: int, k: int, layers: int,
            active: float) -> Range:
    """Return the speedup of EPS-MoE as a range.

    The speedup is the time of a prefill in one piece divided by the time with the best number of
    pieces.

    The range covers 1,024 to 16,384 tokens per GPU. All matmuls are assumed to run at the same
    rate. Attention is assumed to cost only the time of its weight matrices.

    Args:
        width: width of a token.
        inner: inner width of an expert.
        k: number of experts per token.
        active: number of parameters used per token.
    """
    each = 3 * width * inner  # number of parameters of an expert
    kernel = Kernel(((0, 0.0), (1, 2 * each / H800_FLOPS)), LAUNCH_S)
    found = []
    for tokens in (1024, 4096, 16384):
        load = PrefillLoad(experts=experts // gpus, rows=tokens * k * gpus / experts,
                           row_s=2 * width * (1 - 1 / gpus) / H800_BYTES_S,
                           exchange_s=MESSAGE_S * (gpus - 1))
        options = [c for by in CUTS for c in choices(load, {"grouped": kernel}, by)]
        one, best = (min(c.seconds for c in options if c.pieces <= most) for most in (1, 20))
        rest = 2 * tokens * (active - layers * k * each) / H800_FLOPS
        found.append((rest + layers * one) / (rest + layers * best))
    return spread(found)


def token_slices(batches: Sequence[int] = (1, 2, 4)) -> Range:
    """Return the speedup of TeraPipe as a range over the number of sequences per step. The speedup
    is the time with whole sequences divided by the time with the best slices.

    The model is GPT-3 175B in 48 pipeline stages of two layers. Each stage runs on eight V100 GPUs,
    and sequences have 2,048 tokens.
    """
    width, node = 12288, DGX1.resized(1)

    def seconds(length: int, context: int) -> float:
        flops = 24 * width**2 * length + 4 * width * length * (context + length / 2)
        layer = V100.matmul_s(length, flops / 8, 24 * width**2 / 8) + 2 * all_reduce_s(
            node, GroupShape(8), 2 * width * length)
        return 2 * layer

    whole = seconds(2048, 0)
    return spread([(count + 47) * whole / (count * cut(
        seconds, 2048, 1 + 47 / count, granularity=32, gap_s=whole / 200).seconds)
        for count in batches])


def streamed_gpt() -> tuple[StreamPlan, int]:
    """Plan the streaming of a GPT of 24 layers in 16 bits on a peer with 50 TFLOP/s, 11 GiB, and
    12 GB/s to host memory. A step has 8 sequences of 2,048 tokens.

    Returns:
        The plan, and the number of bytes of all weights.
    """
    width, tokens, size = 2048, 2048, 24 * 2048**2  # size: bytes of a layer's weights
    forward_s = (size * tokens + 4 * tokens**2 * width) / 50e12
    return stream_plan([
        Layer(name=str(j), forward_s=forward_s, backward_s=3 * forward_s, load_s=size / 12e9,
              out_s=size / 12e9, weight_bytes=size, gradient_bytes=size,
              kept_bytes=2 * tokens * width, workspace_bytes=34 * tokens * width)
        for j in range(24)], 8, 11 * 2**30), 24 * size


def streaming_peers() -> Range:
    """Return the speedup of ATOM over a pipeline of four peers, at 10 to 300 Mbit/s. The peers
    average the weights every 500 steps; see `streamed_gpt`.
    """
    streamed, size = streamed_gpt()
    return spread([pipelined_s(streamed, rate * 1e6 / 8) / streamed_s(
        streamed, rate * 1e6 / 8, 500, size) for rate in (10, 30, 50, 100, 300)])


def streamed_s(made: StreamPlan, bytes_s: float, every: int, size: int) -> float:
    """Return the step time of peers that stream the whole model, including a share of the time of
    the ring all-reduce that averages `size` bytes of weights after every `every` steps.

    bytes_s: bandwidth of each peer's link in one direction.
    """
    turns = 2 * (PEERS - 1)  # of the reduce-scatter and the all-gather
    return made.seconds + turns * (size / PEERS / bytes_s + PEER_DELAY_S) / every


def pipelined_s(made: StreamPlan, bytes_s: float) -> float:
    """Return the step time if the same peers form a pipeline, with the fastest of its modes.

    The model is split where the least data has to be sent, and all stages take equally long.
    """
    layers = made.model.layers
    edges = sorted(layer.kept_bytes for layer in layers[1:])[:PEERS - 1]
    forward = sum(layer.forward_s for layer in layers)
    backward = sum(layer.backward_s - layer.forward_s for layer in layers)
    pipeline = Pipeline(stages=PEERS, micro_batches=made.model.batches * PEERS,
                        forward_s=forward / PEERS, backward_s=backward / PEERS,
                        send_s=max(edges) / bytes_s + PEER_DELAY_S)
    return min(pipeline.simulate(mode).seconds for mode in MODES)


def near_links() -> float:
    """Return the speedup of TA-MoE on two nodes. The speedup compares TA-MoE's distribution of
    tokens with an even distribution, and considers only the load of the busiest link.
    """
    ranks, nodes = AZURE.ranks_per_node, 2
    near, far = (1 / link.beta_s for link in (AZURE.intra, AZURE.inter))
    return (ranks * near + (nodes - 1) * ranks * far) / (nodes * ranks) / far


def spoiled_files() -> float:
    """Return the gain of ByzShield: the mean fraction of corrupted files that are avoided by
    assigning files with Latin squares instead of repetition.

    The mean is over 2 to 7 faulty workers out of 15. Each file is assigned to three workers.
    """
    squares, groups = mols(5, 3), repetition(5, 3)
    pairs = zip(squares.worst(7)[2:], groups.worst(7)[2:], strict=True)
    return statistics.fmean(1 - a / squares.count / (b / groups.count) for a, b in pairs)


def pipeline_moe_ends(first: int, last: int) -> Range:
    """Return the range from the start of one of PPMoE's predictions to the end of another."""
    found = pipeline_moe()
    return found[first][0], found[last][1]


def stated() -> dict[str, Any]:
    """Return the values that are inserted into the texts of `pages/headlines.yaml`."""
    split, whole, _ = pipeline_moe()
    return {"MASK_BYTES": MASK_BYTES, "UNTUNED": UNTUNED, "slow": sparse_layer(512, UNTUNED),
            "masks": whole_model(8, MASK_BYTES), "split": split, "whole": whole,
            "two_sequences": token_slices((2,))[0], "spoiled": 100 * spoiled_files(),
            "near": near_links()}
