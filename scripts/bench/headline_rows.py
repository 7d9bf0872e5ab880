"""Published results that this project builds on: what was published, what our model says of it,
and where it was measured here. Pages and predictions come from these rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from scripts.bench import headline_models as models
from scripts.bench.train.host_sides import OURS
from scripts.bench.train.results import median_ms, newest, reports
from scripts.bench.train.sides import PIECES

HERE = ""  # in the place of a file's name: measured by the study itself
# (file of committed numbers, what of them, what it is and where)
Measured = tuple[str, Callable[[Any], Iterable[float] | float], str]


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One published result.

    Attributes:
        said: as published.
        value: the same as a factor, or as a share where `percent`.
        hardware: what it was measured on.
        predict: our prediction, one number or a range; None: `model` says why there is none.
        model: what the prediction is made of.
        why: of a prediction that is off by more than a quarter, or what is not known.
        measured: None: `needs` says what measuring takes.
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


# -- of committed numbers

def steps(found: Any, host: str, place: str, over: str, under: str,
          shape: str = "") -> list[float]:
    """Median steps of one side over those of another, by shape."""
    return [median_ms(cell.side(over)) / median_ms(cell.side(under))
            for cell in newest(reports(found)) if cell.host == host
            and cell.place.startswith(place) and shape in cell.shape.name]


def pieces(found: Any, kinds: Iterable[str]) -> list[float]:
    """One piece over the best number of pieces."""
    totals = [cell[way]["total"] for kind in kinds for cell in found["cells"][kind]
              for way in ("forward", "backward")]
    return [total["d=1"] / min(total.values()) for total in totals]


def by_load(found: Any) -> list[float]:
    """One piece over pieces by load, of whole evaluations."""
    return [median_ms(cell.side(OURS)) / median_ms(cell.side(PIECES))
            for cell in newest(reports(found), evaluate=True)]


def hierarchical(found: Any) -> list[float]:
    """Linear over 2DH, by grid and size."""
    times: dict[Any, dict[str, float]] = {}
    for number, rows in enumerate((found["rows"], found["rows_with_message_cost"])):
        for row in rows:
            key = number, row["nodes"], row["ranks_per_node"], row["bytes"]
            times.setdefault(key, {})[row["algorithm"]] = row["median_ms"]
    return [cell["linear"] / cell["2dh"] for cell in times.values() if "2dh" in cell]


def einsum(found: Any) -> list[float]:
    return [peer["median_ms"] / cell["median_ms"] for cell in found["one_rank"]
            for peer in cell["peers"] if peer["name"] == "einsum"]


def tokens_s(found: Any, over: str, under: str) -> float:
    rate = {row["mode"]: row["tokens_s"] for row in found["rows"]}
    return rate[over] / rate[under]


def top1_change(found: Any) -> float:
    alone, ours = (statistics.mean(run["top1_error"] for run in found["results"][name])
                   for name in ("independent (k = 5)", "CMCL, features shared"))
    return ours / alone - 1


def of_rows(found: Any, over: str, under: str) -> list[float]:
    return [row[over] / row[under] for row in found["rows"]]


FAIRSEQ = partial(steps, host="fairseq", over="fairseq's moe branch", under="moe-plugin")
ON_ONE: Measured = ("train", partial(FAIRSEQ, place="one machine"),
                    "whole fairseq steps with the branch's layer over ours, 2 ranks on one machine")
ON_NODES: Measured = ("train", partial(FAIRSEQ, place="2x2"), "whole fairseq steps with the "
                      "branch's layer over ours, 2x2 emulated nodes at 200 Mbit/s")
LAYERS: Measured = ("layer", einsum, "layers of top-2 experts on one CPU, the one-hot form over "
                    "ours, 8 and 64 experts, fp32 and bf16")

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
SPARSE = (f"`planner.layer_cost` and `static_layer`, {DEVICE}: the blog's layer with one-hot over "
          "one with sparse dispatch, both in one layout and without overlap, since adapting is of "
          "the later paper.")
ADAPTIVE = ("The same with the best layout, all-to-all and overlap of the later paper; 4,096 to "
            "32,768 tokens a GPU.")
E2E = (f"{DEVICE}; the sizes of the blog's table 1, 24 sequences a GPU, an expert each; the time "
       "of a step with one-hot over one with sparse dispatch, without the optimizer.")
PPMOE_MODEL = ("`planner.layer_cost`, `v100_32g`, DGX-1: a dense layer and one of 64 experts of "
               "GPT-3's 6.7B width; experts inside a node over experts on 64 GPUs of 8 nodes; 1 to "
               "8 sequences, one or two experts per token.")
EPS_MODEL = ("`planner.prefill` with the H800's data sheet; published sizes of the model, 1,024 to "
             "16,384 tokens a GPU; all products at the same rate.")
PRODUCTS = ("In the model overlap gains about a fifth of what is published, or less: the rest "
            "must come from matmuls, whose kernels before and after are not public.")
EPS_MEASURED: Measured = ("train", by_load, "whole evaluations in both hosts, one piece over "
                          "pieces by load, emulated nodes")
PREGATE_MODEL = ("not modelled: needs the time of a layer, which is not public. "
                 "`planner.offload.pregate` assumes 0.72 ms, and then gives 1.69 x and 82 %.")
ALPA_NEEDS = ("activations between unequal stages, to each rank over once to each node, emulated "
              "nodes of 200 Mbit/s")


def rows() -> tuple[Headline, ...]:
    """All of them, in the order of the page."""
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
            system="Tutel", result="the same, 512 GPUs", said="2.75 x", value=2.75,
            hardware=f"512 {AZURE}", source=BLOG, predict=lambda: at[512], measured=ON_NODES,
            model=SPARSE, why="The model's cards reach 22 GB/s, as a tuned network does. At "
            f"{models.UNTUNED} times less, the smallest gain by tuning in the same blog, it gives "
            f"{slow:.2f} x. On which of the two the layers ran is not stated."),
        Headline(
            system="Tutel", result="MoE layer over fairseq's, 16 GPUs", said="4.96 x", value=4.96,
            hardware="16 A100", source=TUTEL, predict=lambda: models.adaptive_layer(16),
            model=ADAPTIVE, measured=LAYERS, why="The abstract states neither tokens nor "
            "widths. One-hot dispatch takes the square of the tokens of a GPU, so that the gain "
            "follows them."),
        Headline(
            system="Tutel", result="the same, 2,048 GPUs", said="5.75 x", value=5.75,
            hardware="2,048 A100", source=TUTEL, predict=lambda: models.adaptive_layer(2048),
            model=ADAPTIVE, measured=ON_NODES, why="Tokens and widths are not stated; and the "
            "linear all-to-all of fairseq's layer costs more among 2,048 GPUs than the model says: "
            "see the result on 2DH."),
        Headline(
            system="Tutel", result="2DH all-to-all over the best before, 2,048 GPUs",
            said="up to 20.7 x", value=20.7, hardware="2,048 A100", source=TUTEL,
            predict=models.two_dimensional, model="`planner.all_to_all_cost`, `a100_ib`: linear "
            "over 2DH, the largest of 64 KiB to 256 MiB a GPU.",
            measured=("all_to_all", hierarchical, "linear over 2DH, 16 KiB to 8 MiB a rank, up to "
                      "8x4 emulated ranks at 200 Mbit/s, also with 1 ms for each message"),
            why="Small messages cost their number: 2,040 against 255 between nodes, so that no "
            "cost of a message that is the same in both explains more than 8.0 x. What NCCL's "
            "send and receive cost beyond that among thousands of peers (connections, proxy "
            "threads, flows in switches) is not known: that a channel serves eight peers at a time "
            "(NCCL issue 665), and that a small send took 16.5 us on a DGX A100 (issue 568), "
            "leaves the ratio as it is."),
        Headline(
            system="Tutel", result="adaptive parallelism alone", said="up to 1.74 x", value=1.74,
            hardware=f"A100, number {NOT_SAID}", source=TUTEL,
            predict=lambda: models.adapted("r"), model=f"{DEVICE}: r = 1 over the best r, the "
            "largest of the blog's layer on 16 to 2,048 GPUs with 4,096 to 32,768 tokens each.",
            why="The shapes of the paper's best case are not stated; ours is the largest of a "
            "sweep that may reach further.",
            measured=("adaptive", lambda found: [
                cell["fixed"]["r=1 d=1 linear auto"] / cell["auto_settled"]
                for cell in found.values() if isinstance(cell, dict)],
                "r = 1 over `parallel: auto`, 4 emulated nodes at 200 Mbit/s")),
        Headline(
            system="Tutel", result="adaptive pipelining alone", said="up to 2.00 x", value=2.0,
            hardware=f"A100, number {NOT_SAID}", source=TUTEL,
            predict=lambda: models.adapted("d"), model="The same, one piece over 1 to 8.",
            measured=("overlap", partial(pieces, kinds=("cpu", "wait")), "one piece over the best "
                      "pieces, layers on 2 emulated nodes, 25 to 100 Mbit/s"),
            why="2.00 is the most that overlap can gain in this model, where exchange and matmuls "
            "take as long as each other and everything else nothing. In the blog's layer copies "
            "and small matmuls take their share; the shapes of the paper's best case are "
            f"{NOT_SAID}."),
        Headline(
            system="Tutel", result="running count (cumsum) over fairseq's", said="up to 24 x",
            value=24.0, hardware=AZURE, source=BLOG, model="not modelled: the planner has no cost "
            "of a prefix sum by torch's kernel of 2021.", measured=(
                HERE, lambda found: [one["ratio"] for one in found["counts"]],
                "fairseq's cumsum of a given one-hot mask over our running count, one CPU, where "
                "cumsum walks down 8, 64 or 256 columns of 16,384 rows")),
        Headline(
            system="Tutel", result="all-to-all by NUMA binding and adaptive routing of switches",
            said="2.56 to 5.93 x", hardware=f"512 {AZURE}", source=BLOG, model="not modelled: the "
            "planner takes a link's rate as it is measured, tuned or not.",
            needs="hosts with several NUMA domains and a network of switches"),
        Headline(
            system="Tutel", result="1.1 T language model end to end, 8 GPUs", said="+131 %",
            value=2.31, hardware=f"8 {AZURE}", source=BLOG, predict=lambda: models.whole_model(8),
            model=E2E, measured=ON_ONE, why="Not known. Counting every pass of the branch's code "
            f"over its masks ({models.MASK_BYTES} bytes an element) makes it {masks:.2f} x; the "
            "published gain needs one-hot layers of 1.7 times the modelled time."),
        Headline(
            system="Tutel", result="the same, 512 GPUs", said="+40 %", value=1.4,
            hardware=f"512 {AZURE}", source=BLOG, predict=lambda: models.whole_model(512),
            model=E2E, measured=ON_NODES),
        *(Headline(
            system="Tutel", result=f"SwinV2-MoE over fairseq's layers, {what}", said=f"{value} x",
            value=value, hardware=f"A100, number {NOT_SAID}", source=TUTEL,
            model="not modelled: the planner has no windows, convolutions or patches.",
            measured=(HERE, lambda found, what=what: found["swin"][what],
                      "layers of fairseq's branch over ours, the widths and experts of "
                      "`swin_s` in five blocks, a plain top-1 gate, 8 images a call, one CPU"))
          for what, value in (("training", 1.55), ("inference", 2.11))),
        Headline(
            system="HetuMoE", result="over existing systems", said="at least 15 %", value=1.15,
            hardware=NOT_SAID, source=HETU, model="not modelled: neither systems nor sizes are "
            "in the abstract.", needs="GPUs, and Hetu, which is a framework of its own"),
        Headline(
            system="HetuMoE", result="switch gate, batch 32, over DeepSpeed-MoE", said="8.1 x",
            value=8.1, hardware=NOT_SAID, source=HETU, model="not modelled: one-hot dispatch, "
            "which DeepSpeed had then, depends on tokens and experts, which are not stated.",
            measured=(HERE, lambda found: found["switch"]["einsum"], "switch layer of 16 experts, "
                      "32 x 128 tokens, the one-hot form over ours, one CPU")),
        Headline(
            system="PPMoE", result="over existing MoE layouts", said="over 1.75 x", value=1.75,
            hardware=NOT_SAID, source=PPMOE, predict=lambda: (split[0], whole[1]),
            model=PPMOE_MODEL, needs="Megatron on several nodes with "
            "tensor parallelism inside them; bytes and exactness alone are tested",
            why="It depends on what is compared with, which the abstract does not say: "
            f"{split[0]:.2f} to {split[1]:.2f} x over ranks that split a node's tokens, "
            f"{whole[0]:.2f} to {whole[1]:.2f} x over ranks that all send all of them, as "
            "DeepSpeed's did before its pull request 5626."),
        Headline(
            system="PPMoE", result="throughput of a 20 times smaller backbone", said="90 %",
            value=0.9, percent=True, hardware=NOT_SAID, source=PPMOE,
            predict=lambda: models.pipeline_moe()[2], model=PPMOE_MODEL, measured=(
                "train", partial(steps, host="megatron", place="one machine", shape="switch",
                                 over="dense", under="moe-plugin"),
                "a Megatron model's dense step over ours at equal active width, one expert per "
                "token, 2 ranks, not PPMoE's layout"),
            why="The upper end is one expert per token and eight sequences at a time; with one "
            "sequence, reading the weights of eight experts a GPU takes longer than computing. "
            "The paper's sizes are not in the abstract."),
        Headline(
            system="ForestColl", result="over NCCL and RCCL", said="up to 52 %", value=1.52,
            hardware="DGX A100 and MI250, several boxes", source=FOREST, predict=models.trees,
            model="`planner.forest`, two DGX A100: the busiest wire of the best rings over that "
            "of the trees, no latency.", measured=(
                "collectives", lambda found: [cell["ratio"] for cell in found["cells"]],
                "the faster of gloo and a ring over the trees, five emulated networks of 8 "
                "ranks")),
        Headline(
            system="ForestColl", result="over other generators' schedules", said="up to 61 %",
            hardware="DGX A100 and MI250", source=FOREST, model="not modelled: of other "
            "generators' schedules we have none.", needs="those generators and their solvers"),
        Headline(
            system="ForestColl", result="generating, over other generators",
            said="orders of magnitude", hardware=NOT_SAID, source=FOREST,
            model="not modelled: the time of a program.",
            needs="the other generators; ours plans for 1,024 GPUs in the time that "
            "[forest](forest.md) says"),
        *(Headline(
            system="Parm", result=f"over DeepSpeed-MoE, 1,296 layers, {what}", said=f"{value} x",
            value=value, hardware="8 and 32 GPUs", source=PARM,
            predict=lambda which=which: models.shared_tokens()[which], why=why,
            model="`planner.shared_token_schedules`: exchanges alone, 12 GB/s inside a node and 6 "
            "GB/s a GPU between nodes (assumed; their ratio is what counts), a sweep of as many "
            "layers of our own.",
            measured=(HERE, lambda found: [found["parm"]["plain"] / found["parm"][name]
                                           for name in ("s1", "s2")],
                      "the plain schedule over S1 and S2, forward and backward, two replicas and "
                      "two shards, 2x2 emulated ranks at 200 Mbit/s"))
          for which, (what, value, why) in enumerate((
              ("least", 1.13, "Our sweep has layers of one replica and one shard, too, in which "
               "all schedules are the same one."), ("most", 5.77, "")))),
        *(Headline(
            system="EPS-MoE", result=f"prefill, {name}", said=f"+{100 * value - 100:.1f} %",
            value=value, hardware=f"{sizes[0]} H800", source=EPS, model=EPS_MODEL, why=why,
            predict=partial(models.prefill, *sizes), measured=EPS_MEASURED)
          for name, value, sizes, why in (
              ("DeepSeek-V2", 1.218, (8, 5120, 1536, 160, 6, 59, 21e9), "The predicted gain "
               "follows the tokens of a GPU, for which a range of ours is taken."),
              ("Mixtral 8x7B", 1.322, (4, 4096, 14336, 8, 2, 32, 12.9e9), PRODUCTS),
              ("DBRX", 1.524, (8, 6144, 10752, 16, 4, 40, 36e9), PRODUCTS))),
        Headline(
            system="ATOM", result="over pipelines of decentralized peers", said="up to 20 x",
            value=20.0, hardware="consumer GPUs, slow networks; rates are " + NOT_SAID,
            source="Wu et al. 2024, arXiv 2403.10504, abstract",
            predict=models.streaming_peers, model="[Offload plans](offload_plans.md): 24 layers "
            "of width 2,048, 4 peers, averages every 500 steps, 300 to 10 Mbit/s.",
            measured=("peers", lambda found: [row["factor"] for row in found["rows"]],
                      "two streaming peers over a pipeline, a model of 84 KiB, weights averaged "
                      "every 30 steps, emulated links of 50 to 10 Mbit/s"),
            why="The gain follows the network's rate, which is not stated: the model reaches 20 "
            "between 30 and 10 Mbit/s."),
        Headline(
            system="TeraPipe", result="GPT-3 175B over pipelines of sequences", said="5.0 x",
            value=5.0, hardware="384 V100, 48 AWS p3.16xlarge",
            source="Li et al., ICML 2021, arXiv 2102.07988, abstract", predict=models.token_slices,
            model="`planner.pipeline.slices`, `v100_32g` and NVLink's data sheet: 48 stages of "
            "eight GPUs, 1 to 4 sequences of 2,048 tokens per step.", measured=(
                "pipeline", lambda found: [row["1f1b"]["measured_s"] / row["terapipe"]["measured_s"]
                                           for row in found["slices"]["rows"]],
                "1F1B over slices, two sequences, 4 emulated stages at 200 and 100 Mbit/s, passes "
                "that wait in place of computing"),
            why="The fewer sequences a step has, the more slices gain; how many it had is not in "
            "the abstract. With two the prediction is "
            f"{models.token_slices((2,))[0]:.2f} x."),
        Headline(
            system="KARMA", result="over out-of-core methods, mean of six models", said="1.52 x",
            value=1.52, hardware=NOT_SAID, source="Wahib et al., SC 2020, arXiv 2008.11421, "
            "abstract", model="not modelled: needs times and bytes of the layers of those six "
            "models.", measured=("activations", lambda found: min(
                found["seconds"]["recompute"], found["seconds"]["swap"]) / found["seconds"]["auto"],
                "the better of recomputing and swapping everything over the plan, half of the "
                "memory, one CPU")),
        *(Headline(
            system="CMCL", result=f"top-1 error against independent members, {data}",
            said=f"-{value} %", value=-value / 100, percent=True,
            hardware="five ResNets; a result of learning, not of hardware", source=CMCL,
            model="not modelled: nothing here predicts what a network learns.",
            measured=("ensembles", top1_change, "another data set, noisy digits; five small "
                      "SwinV2-MoE, three seeds, within the error of the images"))
          for data, value in (("CIFAR-10", 14.05), ("SVHN", 6.6))),
        Headline(
            system="SWARM", result="trains 1.01B shared parameters (13B without sharing)",
            said="no ratio", hardware="400 preemptible T4, below 200 Mbit/s",
            source="Ryabinin et al., ICML 2023, arXiv 2301.11913, abstract",
            model="not modelled: the paper states no ratio that a model could predict.",
            needs="hundreds of machines; eight peers are [measured](swarm.md)"),
        Headline(
            system="ByzShield", result="fewer corrupted gradients", said="36 % on average",
            value=0.36, percent=True, hardware="none: worst cases are counted", source=BYZ,
            model="not modelled: it is counted, not predicted. `planner.vote_assignments` counts "
            f"{100 * models.spoiled_files():.0f} %, the mean over 2 to 7 wrong ones of 15 workers, "
            "against repetition.", needs="nothing more: the count is exact"),
        Headline(
            system="ByzShield", result="accuracy under attack", said="about +20 %",
            hardware=f"CIFAR-10, ResNet-18; hardware is {NOT_SAID}", source=BYZ,
            model="not modelled: nothing here predicts what a network learns.",
            needs="training under the attacks of the paper"),
        *(Headline(
            system="TA-MoE", result=f"over {other}", said=said, hardware=NOT_SAID, source=TA,
            model="not modelled: needs the share of the exchange in a step, which is not public. "
            f"The exchange alone is {models.near_links():.1f} times faster on two nodes of "
            "`a100_ib`, if tokens follow the links.", measured=(
                "links", lambda found: [row["seconds"]["plain"] / row["seconds"]["TA-MoE"]
                                        for row in found["steps"]],
                "whole steps of both hosts, the plain router over shares by the links' costs, four "
                "emulated nodes, five networks"))
          for other, said in (("DeepSpeed-MoE", "1.01 to 1.61 x"), ("FastMoE", "1.01 to 4.77 x"),
                              ("FasterMoE", "1.25 to 1.54 x"))),
        Headline(
            system="FasterMoE", result="over ZeRO, GShard and BASE layers", said="up to 17.87 x",
            hardware="up to 64 GPUs", source="He et al., PPoPP 2022, abstract",
            model="not modelled: which system and model the largest gain is over is " + NOT_SAID
            + ".", measured=("spill", lambda found: [
                case["everywhere"]["speedup"] for case in found["others"]["times"].values()],
                "plain layer over shadowed experts, even load to half of the tokens for one "
                "expert, emulated nodes at 200 Mbit/s")),
        Headline(
            system="Pre-gated MoE", result="block latency over fetching on demand", said="1.7 x",
            value=1.7, hardware="one A100 80 GB", source=PREGATED, model=PREGATE_MODEL,
            measured=("offload", partial(tokens_s, over="pre-gated", under="on demand"),
                      "tokens a second, experts ten times the memory limit, files read at "
                      "2,500 MB/s at most, one CPU")),
        Headline(
            system="Pre-gated MoE", result="throughput of resident experts, in 23 % of the memory",
            said="81 %", value=0.81, percent=True, hardware="one A100 80 GB", source=PREGATED,
            model=PREGATE_MODEL, measured=(
                "offload", partial(tokens_s, over="pre-gated", under="resident"),
                "tokens a second under a tenth of the experts' size, files read at 2,500 MB/s at "
                "most, one CPU")),
        *(Headline(
            system="AlpaComm", result=result, said=said, hardware=NOT_SAID, source=ALPA,
            model="not modelled: meshes and models of the result are " + NOT_SAID + ".",
            measured=measured, needs="" if measured else "both models over several nodes")
          for result, said, measured in (
              ("resharding, microbenchmarks", "up to 10 x", (
                  "stage_layouts", partial(of_rows, over="each_s", under="once_s"), ALPA_NEEDS)),
              ("GPT-3 end to end", "10 %", None), ("U-Transformer end to end", "50 %", None))),
    )
