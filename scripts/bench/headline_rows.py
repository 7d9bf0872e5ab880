"""Published results on which this project builds, with predictions and measurements of this
project.

The page of published results and all of its predictions are computed from these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from scripts.bench import headline_models as models
from scripts.bench.headline_numbers import (
    by_load,
    einsum,
    hierarchical,
    of_rows,
    pieces,
    steps,
    tokens_s,
    top1_change,
)

HERE = ""  # used instead of a file name: the study itself measures this number
# (file of committed numbers, function that returns the number, description of the measurement)
Measured = tuple[str, Callable[[Any], Iterable[float] | float], str]


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One published result.

    Attributes:
        system: name of the system.
        result: the result in words.
        said: the number as published.
        value: the same number as a factor, or as a share if `percent` is set.
        percent: whether `value` is a share.
        hardware: hardware of the published measurement.
        source: publication.
        predict: a function that returns our prediction, a number or a range. None if there is no
            prediction; `model` then states the reason.
        model: description of the prediction.
        why: reason for an error of more than a quarter, or the statement that it is not known.
        measured: our measurement. None if there is none; `needs` then states what it would need.
        needs: requirements of a measurement.
    """

    system: str
    result: str
    said: str
    hardware: str
    source: str
    model: str
    value: float | None = None
    percent: bool = False
    predict: Callable[[], models.Range | float] | None = None
    why: str = ""
    measured: Measured | None = None
    needs: str = ""


FAIRSEQ = partial(steps, host="fairseq", over="fairseq's moe branch", under="moe-plugin")
ON_ONE: Measured = ("train", partial(FAIRSEQ, place="one machine"),
                    "whole fairseq steps with the layer of fairseq's moe branch, relative to ours, "
                    "on 2 ranks of one machine")
ON_NODES: Measured = ("train", partial(FAIRSEQ, place="2x2"), "whole fairseq steps with the layer "
                      "of fairseq's moe branch, relative to ours, on 2x2 emulated nodes x ranks "
                      "at 200 Mbit/s")
LAYERS: Measured = ("layer", einsum, "the one-hot form of a layer relative to ours, on one CPU "
                    "with top-2 routing, 8 and 64 experts, fp32 and bf16")

BLOG = "Microsoft Research, Tutel blog, November 2021"
TUTEL = "Hwang et al., MLSys 2023, arXiv 2206.03382, abstract"
HETU = "Nie et al. 2022, arXiv 2203.14685, abstract"
PPMOE = "Chen et al. 2023, arXiv 2304.11414, abstract"
FOREST = "Zhao et al. 2024, arXiv 2402.06787, abstract of an early version"
PARM = "Pan et al. 2024, arXiv 2407.00599, abstract"
EPS = "Qian et al. 2024, arXiv 2410.12247, version 2, table 1"
CMCL = "Lee et al., ICML 2017, abstract"
TA = "Chen et al. 2022, arXiv 2302.09915, abstract"
ALPA = "Zhuang et al. 2022, arXiv 2211.05322, abstract"
PREGATED = "Hwang et al., ISCA 2024, abstract"
BYZ = "Konstantinidis and Ramamoorthy, MLSys 2021, abstract"
AZURE = "A100 80 GB, Azure NDm A100 v4"
NOT_SAID = "not stated"
DEVICE = "`a100_80g` and `a100_ib`"
SPARSE = (f"The prediction uses `planner.layer_cost` and `static_layer` with {DEVICE}. It compares "
          "the blog's layer with one-hot dispatch and with sparse dispatch. Both have the same "
          "layout and no overlap, because adaptive layouts belong to the later paper.")
ADAPTIVE = ("The prediction is that of the blog's layer with the best layout, all-to-all and "
            "overlap of the later paper, for 4,096 to 32,768 tokens per GPU.")
E2E = (f"The prediction uses {DEVICE} and the sizes of the blog's table 1, with 24 sequences and "
       "one expert per GPU. It is the time of a step with one-hot dispatch relative to sparse "
       "dispatch, without the optimizer.")
PPMOE_MODEL = ("The prediction uses `planner.layer_cost` and `v100_32g` in DGX-1 machines, for a "
               "dense layer and a layer of 64 experts with GPT-3's 6.7B width. It compares experts "
               "inside a node with experts on 64 GPUs of 8 nodes, for 1 to 8 sequences and one or "
               "two experts per token.")
EPS_MODEL = ("The prediction uses `planner.prefill` with the H800's data sheet, the published "
             "sizes of the model, 1,024 to 16,384 tokens per GPU, and the same rate for all "
             "matmuls.")
MATMULS = ("In the model, overlap yields at most about a fifth of the published gain. The rest "
           "must come from faster matmuls, but the kernels before and after are not public.")
EPS_MEASURED: Measured = ("train", by_load, "whole evaluations in both hosts on emulated nodes, "
                          "with one piece relative to pieces by load")
PREGATE_MODEL = ("not modelled: this needs the time of a layer, which is not public. "
                 "`planner.offload.pregate` assumes 0.72 ms and then predicts 1.69 x and 82 %.")
ALPA_NEEDS = ("activations sent between unequal stages to each rank, relative to once to each "
              "node, on emulated nodes at 200 Mbit/s")


def rows() -> tuple[Headline, ...]:
    """Return all rows in the order of the page."""
    slow, masks = models.sparse_layer(512, models.UNTUNED), models.whole_model(
        8, models.MASK_BYTES)
    split, whole, _ = models.pipeline_moe()
    at = {n: models.sparse_layer(n) for n in (8, 512)}
    return (
        Headline(
            system="Tutel", result="MoE layer over fairseq's, 8 GPUs", said="8.49 x", value=8.49,
            hardware=f"8 {AZURE}", source=BLOG, predict=lambda: at[8], measured=LAYERS,
            model=SPARSE),
        Headline(
            system="Tutel", result="MoE layer over fairseq's, 512 GPUs", said="2.75 x", value=2.75,
            hardware=f"512 {AZURE}", source=BLOG, predict=lambda: at[512], measured=ON_NODES,
            model=SPARSE, why="The network cards of the model reach 22 GB/s, as in a tuned "
            f"network. With {models.UNTUNED} times less, the smallest gain by tuning in the same "
            f"blog, the prediction is {slow:.2f} x. The blog does not state which network the "
            "layers used."),
        Headline(
            system="Tutel", result="MoE layer over fairseq's, 16 GPUs", said="4.96 x", value=4.96,
            hardware="16 A100", source=TUTEL, predict=lambda: models.adaptive_layer(16),
            model=ADAPTIVE, measured=LAYERS, why="The abstract states neither tokens nor "
            "widths. The cost of one-hot dispatch grows with the square of the tokens per GPU, so "
            "the gain depends on their number."),
        Headline(
            system="Tutel", result="MoE layer over fairseq's, 2,048 GPUs", said="5.75 x",
            value=5.75, hardware="2,048 A100", source=TUTEL,
            predict=lambda: models.adaptive_layer(2048),
            model=ADAPTIVE, measured=ON_NODES, why="Tokens and widths are not stated. In addition, "
            "the linear all-to-all of fairseq's layer costs more on 2,048 GPUs than the model "
            "predicts; see the result about 2DH."),
        Headline(
            system="Tutel", result="2DH all-to-all over the best previous one, 2,048 GPUs",
            said="up to 20.7 x", value=20.7, hardware="2,048 A100", source=TUTEL,
            predict=models.two_dimensional, model="The prediction uses `planner.all_to_all_cost` "
            "with `a100_ib`: linear relative to 2DH, the largest ratio over 64 KiB to 256 MiB per "
            "GPU.",
            measured=("all_to_all", hierarchical, "linear relative to 2DH, for 16 KiB to 8 MiB per "
                      "rank on up to 8x4 emulated nodes x ranks at 200 Mbit/s, with and without "
                      "1 ms per message"),
            why="The time of small messages depends on their number between nodes: 2,040 for "
            "linear and 255 for 2DH. An equal cost per message therefore explains at most 8.0 x. "
            "The additional cost of NCCL's send and receive among thousands of peers (connections, "
            "proxy threads, flows in switches) is not known. Two published facts do not change the "
            "ratio: a channel serves eight peers at a time (NCCL issue 665), and a small send took "
            "16.5 us on a DGX A100 (NCCL issue 568)."),
        Headline(
            system="Tutel", result="adaptive parallelism alone", said="up to 1.74 x", value=1.74,
            hardware=f"A100, number {NOT_SAID}", source=TUTEL,
            predict=lambda: models.adapted("r"), model=f"The prediction uses {DEVICE}. It is the "
            "largest ratio of r = 1 to the best r, over the blog's layer on 16 to 2,048 GPUs with "
            "4,096 to 32,768 tokens each.",
            why="The shapes of the paper's best case are not stated. Our number is the largest of "
            "a sweep that may cover more shapes.",
            measured=("adaptive", lambda found: [
                cell["fixed"]["r=1 d=1 linear auto"] / cell["auto_settled"]
                for cell in found.values() if isinstance(cell, dict)],
                "r = 1 relative to `parallel: auto`, on 4 emulated nodes at 200 Mbit/s")),
        Headline(
            system="Tutel", result="adaptive pipelining alone", said="up to 2.00 x", value=2.0,
            hardware=f"A100, number {NOT_SAID}", source=TUTEL,
            predict=lambda: models.adapted("d"), model="The prediction uses the same sweep, for "
            "one piece relative to the best of 1 to 8 pieces.",
            measured=("overlap", partial(pieces, kinds=("cpu", "wait")), "layers with one piece "
                      "relative to the best number of pieces, on 2 emulated nodes at 25 to 100 "
                      "Mbit/s"),
            why="In this model, overlap can gain at most 2.00 x, if exchange and matmuls need "
            "equal times and everything else needs no time. In the blog's layer, copies and small "
            f"matmuls need time too. The shapes of the paper's best case are {NOT_SAID}."),
        Headline(
            system="Tutel", result="running count (cumsum) over fairseq's", said="up to 24 x",
            value=24.0, hardware=AZURE, source=BLOG, model="not modelled: the planner has no cost "
            "for a prefix sum by torch's kernel of 2021.", measured=(
                HERE, lambda found: [one["ratio"] for one in found["counts"]],
                "fairseq's cumsum of a given one-hot mask relative to our running count, on one "
                "CPU, for masks of 16,384 rows and 8, 64 or 256 columns")),
        Headline(
            system="Tutel", result="all-to-all by NUMA binding and adaptive routing of switches",
            said="2.56 to 5.93 x", hardware=f"512 {AZURE}", source=BLOG, model="not modelled: the "
            "planner uses the measured rate of a link, tuned or not.",
            needs="hosts with several NUMA domains and a network of switches"),
        Headline(
            system="Tutel", result="1.1 T language model end to end, 8 GPUs", said="+131 %",
            value=2.31, hardware=f"8 {AZURE}", source=BLOG, predict=lambda: models.whole_model(8),
            model=E2E, measured=ON_ONE, why="The reason is not known. If every pass of the "
            f"branch's code over its masks is counted ({models.MASK_BYTES} bytes per element), the "
            f"prediction is {masks:.2f} x. For the published gain, one-hot layers would have to "
            "take 1.7 times the modelled time."),
        Headline(
            system="Tutel", result="1.1 T language model end to end, 512 GPUs", said="+40 %",
            value=1.4,
            hardware=f"512 {AZURE}", source=BLOG, predict=lambda: models.whole_model(512),
            model=E2E, measured=ON_NODES),
        *(Headline(
            system="Tutel", result=f"SwinV2-MoE over fairseq's layers, {what}", said=f"{value} x",
            value=value, hardware=f"A100, number {NOT_SAID}", source=TUTEL,
            model="not modelled: the planner has no windows, convolutions or patches.",
            measured=(HERE, lambda found, what=what: found["swin"][what],
                      "layers of fairseq's moe branch relative to ours, on one CPU with 8 images "
                      "per call, five blocks with the widths and experts of `swin_s`, and a plain "
                      "top-1 gate"))
          for what, value in (("training", 1.55), ("inference", 2.11))),
        Headline(
            system="HetuMoE", result="over existing systems", said="at least 15 %", value=1.15,
            hardware=NOT_SAID, source=HETU, model="not modelled: the abstract states neither "
            "systems nor sizes.", needs="GPUs and Hetu, which is a separate framework"),
        Headline(
            system="HetuMoE", result="switch gate, batch 32, over DeepSpeed-MoE", said="8.1 x",
            value=8.1, hardware=NOT_SAID, source=HETU, model="not modelled: the cost of "
            "DeepSpeed's one-hot dispatch at that time depends on the numbers of tokens and "
            "experts, which are not stated.",
            measured=(HERE, lambda found: found["switch"]["einsum"], "the one-hot form of a switch "
                      "layer relative to ours, on one CPU with 16 experts and 32 x 128 tokens")),
        Headline(
            system="PPMoE", result="over existing MoE layouts", said="over 1.75 x", value=1.75,
            hardware=NOT_SAID, source=PPMOE, predict=lambda: (split[0], whole[1]),
            model=PPMOE_MODEL, needs="Megatron on several nodes with tensor parallelism inside "
            "each node; only bytes and exactness are tested",
            why="The gain depends on the baseline, which the abstract does not state. It is "
            f"{split[0]:.2f} to {split[1]:.2f} x over ranks that divide the tokens of a node, and "
            f"{whole[0]:.2f} to {whole[1]:.2f} x over ranks that each send all tokens, as "
            "DeepSpeed's ranks did before its pull request 5626."),
        Headline(
            system="PPMoE", result="throughput of a 20 times smaller backbone", said="90 %",
            value=0.9, percent=True, hardware=NOT_SAID, source=PPMOE,
            predict=lambda: models.pipeline_moe()[2], model=PPMOE_MODEL, measured=(
                "train", partial(steps, host="megatron", place="one machine", shape="switch",
                                 over="dense", under="moe-plugin"),
                "the step of a dense Megatron model relative to ours at equal active width, on 2 "
                "ranks with one expert per token; the layout is not that of PPMoE"),
            why="The upper end of the prediction has one expert per token and eight sequences at a "
            "time. With one sequence, a GPU needs longer to read the weights of eight experts than "
            "to compute. The abstract does not state the paper's sizes."),
        Headline(
            system="ForestColl", result="over NCCL and RCCL", said="up to 52 %", value=1.52,
            hardware="DGX A100 and MI250, several boxes", source=FOREST, predict=models.trees,
            model="The prediction uses `planner.forest` for two DGX A100: the load of the busiest "
            "wire with the best rings relative to that with trees, without latency.", measured=(
                "collectives", lambda found: [cell["ratio"] for cell in found["cells"]],
                "the faster one of gloo and a ring relative to the trees, on five emulated "
                "networks of 8 ranks")),
        Headline(
            system="ForestColl", result="over other generators' schedules", said="up to 61 %",
            hardware="DGX A100 and MI250", source=FOREST, model="not modelled: we have no "
            "schedules of other generators.", needs="the other generators and their solvers"),
        Headline(
            system="ForestColl", result="time to generate schedules, over other generators",
            said="orders of magnitude", hardware=NOT_SAID, source=FOREST,
            model="not modelled: the result is the run time of a program.",
            needs="the other generators; the page about [planning trees](forest.md) shows the time "
            "of our generator for up to 1,024 GPUs"),
        *(Headline(
            system="Parm", result=f"over DeepSpeed-MoE, 1,296 layers, {what}", said=f"{value} x",
            value=value, hardware="8 and 32 GPUs", source=PARM,
            predict=lambda which=which: models.shared_tokens()[which], why=why,
            model="The prediction uses `planner.shared_token_schedules` for the exchanges alone, "
            "over a different sweep with the same number of layers. It assumes 12 GB/s inside a "
            "node and 6 GB/s per GPU between nodes; only the ratio of these rates matters.",
            measured=(HERE, lambda found: [found["parm"]["plain"] / found["parm"][name]
                                           for name in ("s1", "s2")],
                      "the plain schedule relative to S1 and S2, forward and backward, with two "
                      "replicas and two shards on 2x2 emulated nodes x ranks at 200 Mbit/s"))
          for which, (what, value, why) in enumerate((
              ("smallest", 1.13, "Our sweep includes layers with one replica and one shard, for "
               "which all schedules are equal."), ("largest", 5.77, "")))),
        *(Headline(
            system="EPS-MoE", result=f"prefill, {name}", said=f"+{100 * value - 100:.1f} %",
            value=value, hardware=f"{sizes[0]} H800", source=EPS, model=EPS_MODEL, why=why,
            predict=partial(models.prefill, *sizes), measured=EPS_MEASURED)
          for name, value, sizes, why in (
              ("DeepSeek-V2", 1.218, (8, 5120, 1536, 160, 6, 59, 21e9), "The predicted gain "
               "depends on the number of tokens per GPU, for which we assume a range."),
              ("Mixtral 8x7B", 1.322, (4, 4096, 14336, 8, 2, 32, 12.9e9), MATMULS),
              ("DBRX", 1.524, (8, 6144, 10752, 16, 4, 40, 36e9), MATMULS))),
        Headline(
            system="ATOM", result="over pipelines of decentralized peers", said="up to 20 x",
            value=20.0, hardware="consumer GPUs, slow networks; rates are " + NOT_SAID,
            source="Wu et al. 2024, arXiv 2403.10504, abstract",
            predict=models.streaming_peers, model="The prediction is that of the page about "
            "[streaming peers](offload_plans.md) for 24 layers of width 2,048, 4 peers, averages "
            "every 500 steps, and 300 to 10 Mbit/s.",
            measured=("peers", lambda found: [row["factor"] for row in found["rows"]],
                      "two streaming peers relative to a pipeline, with a model of 84 KiB, weights "
                      "averaged every 30 steps, and emulated links of 50 to 10 Mbit/s"),
            why="The gain depends on the rate of the network, which is not stated. The model "
            "predicts 20 x at a rate between 30 and 10 Mbit/s."),
        Headline(
            system="TeraPipe", result="GPT-3 175B over pipelines of sequences", said="5.0 x",
            value=5.0, hardware="384 V100, 48 AWS p3.16xlarge",
            source="Li et al., ICML 2021, arXiv 2102.07988, abstract", predict=models.token_slices,
            model="The prediction uses `planner.pipeline.slices` with `v100_32g` and NVLink's data "
            "sheet, for 48 stages of eight GPUs and 1 to 4 sequences of 2,048 tokens per step.",
            measured=(
                "pipeline", lambda found: [row["1f1b"]["measured_s"] / row["terapipe"]["measured_s"]
                                           for row in found["slices"]["rows"]],
                "1F1B relative to slices, for two sequences on 4 emulated stages at 200 and 100 "
                "Mbit/s, with passes that wait instead of computing"),
            why="Slices gain more if a step has fewer sequences, whose number the abstract does "
            "not state. For two sequences, the prediction is "
            f"{models.token_slices((2,))[0]:.2f} x."),
        Headline(
            system="KARMA", result="over out-of-core methods, mean of six models", said="1.52 x",
            value=1.52, hardware=NOT_SAID, source="Wahib et al., SC 2020, arXiv 2008.11421, "
            "abstract", model="not modelled: this needs times and bytes of the layers of the six "
            "models.", measured=("activations", lambda found: min(
                found["seconds"]["recompute"], found["seconds"]["swap"]) / found["seconds"]["auto"],
                "the faster one of recomputing and swapping everything, relative to the plan, in "
                "half of the memory on one CPU")),
        *(Headline(
            system="CMCL", result=f"top-1 error against independent members, {data}",
            said=f"-{value} %", value=-value / 100, percent=True,
            hardware="five ResNets; the result does not depend on hardware", source=CMCL,
            model="not modelled: the planner does not predict the quality of trained networks.",
            measured=("ensembles", top1_change, "noisy digits instead of this data set, with five "
                      "small SwinV2-MoE and three seeds; the change is within the error of the "
                      "images"))
          for data, value in (("CIFAR-10", 14.05), ("SVHN", 6.6))),
        Headline(
            system="SWARM", result="trains 1.01B shared parameters (13B without sharing)",
            said="no ratio", hardware="400 preemptible T4, below 200 Mbit/s",
            source="Ryabinin et al., ICML 2023, arXiv 2301.11913, abstract",
            model="not modelled: the paper states no ratio that a model could predict.",
            needs="hundreds of machines; the page about [swarms](swarm.md) has a measurement with "
            "eight peers"),
        Headline(
            system="ByzShield", result="fewer corrupted gradients", said="36 % on average",
            value=0.36, percent=True, hardware="none: worst cases are counted", source=BYZ,
            model="not modelled: the result is counted, not predicted. `planner.vote_assignments` "
            f"counts {100 * models.spoiled_files():.0f} % compared with repetition, the mean over "
            "2 to 7 wrong workers of 15.", needs="no measurement, because the count is exact"),
        Headline(
            system="ByzShield", result="accuracy under attack", said="about +20 %",
            hardware=f"CIFAR-10, ResNet-18; hardware is {NOT_SAID}", source=BYZ,
            model="not modelled: the planner does not predict the quality of trained networks.",
            needs="training under the attacks of the paper"),
        *(Headline(
            system="TA-MoE", result=f"over {other}", said=said, hardware=NOT_SAID, source=TA,
            model="not modelled: this needs the share of the exchange in a step, which is not "
            f"public. The exchange alone is {models.near_links():.1f} times faster on two nodes of "
            "`a100_ib` if tokens follow the links.", measured=(
                "links", lambda found: [row["seconds"]["plain"] / row["seconds"]["TA-MoE"]
                                        for row in found["steps"]],
                "whole steps of both hosts with the plain router, relative to a router that "
                "follows the costs of links, on four emulated nodes and five networks"))
          for other, said in (("DeepSpeed-MoE", "1.01 to 1.61 x"), ("FastMoE", "1.01 to 4.77 x"),
                              ("FasterMoE", "1.25 to 1.54 x"))),
        Headline(
            system="FasterMoE", result="over ZeRO, GShard and BASE layers", said="up to 17.87 x",
            hardware="up to 64 GPUs", source="He et al., PPoPP 2022, abstract",
            model="not modelled: the system and the model of the largest gain are " + NOT_SAID
            + ".", measured=("spill", lambda found: [
                case["everywhere"]["speedup"] for case in found["others"]["times"].values()],
                "the plain layer relative to shadowed experts, on emulated nodes at 200 Mbit/s, "
                "from an even load to half of the tokens for one expert")),
        Headline(
            system="Pre-gated MoE", result="block latency over fetching on demand", said="1.7 x",
            value=1.7, hardware="one A100 80 GB", source=PREGATED, model=PREGATE_MODEL,
            measured=("offload", partial(tokens_s, over="pre-gated", under="on demand"),
                      "tokens per second on one CPU, with experts ten times as large as the memory "
                      "limit and files read at 2,500 MB/s at most")),
        Headline(
            system="Pre-gated MoE", result="throughput of resident experts, in 23 % of the memory",
            said="81 %", value=0.81, percent=True, hardware="one A100 80 GB", source=PREGATED,
            model=PREGATE_MODEL, measured=(
                "offload", partial(tokens_s, over="pre-gated", under="resident"),
                "tokens per second on one CPU, with a memory limit of a tenth of the experts' size "
                "and files read at 2,500 MB/s at most")),
        *(Headline(
            system="AlpaComm", result=result, said=said, hardware=NOT_SAID, source=ALPA,
            model="not modelled: the meshes and models of the result are " + NOT_SAID + ".",
            measured=measured, needs="" if measured else "both models on several nodes")
          for result, said, measured in (
              ("resharding, microbenchmarks", "up to 10 x", (
                  "stage_layouts", partial(of_rows, over="each_s", under="once_s"), ALPA_NEEDS)),
              ("GPT-3 end to end", "10 %", None), ("U-Transformer end to end", "50 %", None))),
    )
