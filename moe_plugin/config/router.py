"""Settings of the routers (`router`). Most settings are shared by all routers, and routers that
need more settings have a nested section.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field

from moe_plugin.config.declared import (
    built_in,
    fixed_k_of,
    may_be_read,
    readers_of,
    reads_of,
    router_class,
    router_remedy,
)
from moe_plugin.config.options import MOST_EXPERTS, MOST_STEPS, MOST_WIDTH, SettingsSection, option
from moe_plugin.utils.messages import short


@dataclass(kw_only=True)
class HashConfig(SettingsSection):
    """Settings of the hash router's table, which maps token ids to experts."""

    PATH = "router.hash."

    kind: str = option("balanced", "how the table is built. random: any expert for each token id; "
                       "balanced: token ids in order of falling frequency, each assigned to the "
                       "expert with the least load; file: read from `path`",
                       choices=("random", "balanced", "file"), flag="hash")
    vocabulary: int = option(0, "number of token ids; 0: the host's vocabulary size",
                             flag="hash-vocabulary")
    path: str | None = option(None, "text file with one integer per token id: the token's expert "
                              "(kind file) or its frequency (kind balanced)", flag="hash-file")
    seed: int = option(0, "seed of a random table, and of the order of equally frequent tokens in "
                       "a balanced one", flag="hash-seed")

    def check_bounds(self) -> None:
        self.within("vocabulary", 0, 1 << 31, "set it to the size of the vocabulary")
        self.require("path", self.kind != "file" or bool(self.path),
                     "a file where router.hash.kind=file", "name the table")
        where = f"where router.hash.kind={self.kind}"
        self.read_where(self.kind != "file", where, "use router.hash.kind=random", "seed")


@dataclass(kw_only=True)
class SparsityConfig(SettingsSection):
    """Temperature schedule of the dense-to-sparse router, which gradually uses fewer experts."""

    PATH = "router.sparsity."

    start: float = option(2.0, "temperature at the first step", flag="temperature-start")
    end: float = option(0.1, "temperature after `steps` optimizer steps and later",
                        flag="temperature-end")
    steps: int = option(10000, "optimizer steps from start to end; the temperature changes "
                        "geometrically", flag="temperature-steps")
    threshold: float = option(0.1, "experts with a smaller share of a token are skipped; a token's "
                              "best expert is never skipped", flag="gate-threshold")

    def check_bounds(self) -> None:
        for name, temperature in (("start", self.start), ("end", self.end)):
            self.require(name, temperature > 0, "> 0", "use 2.0 for start, 0.1 for end")
        self.require("steps", self.steps >= 1, ">= 1", "use 10000")
        self.require("threshold", 0 <= self.threshold < 1, "in [0, 1)", "use 0.1")


@dataclass(kw_only=True)
class LinksConfig(SettingsSection):
    """How network link costs affect routers and load-balancing losses."""

    PATH = "router.links."

    costs: str | None = option(None, "YAML or JSON file with a square list of lists: seconds per "
                               "byte from rank i to rank j of the expert-parallel group. Default "
                               "(none): from comm.cluster, else 1 within a node and `far` between "
                               "nodes", flag="link-costs")
    far: float = option(8.0, "cost of sending a byte to another node, relative to sending it "
                        "within a node", flag="link-far-cost")
    quota: float = option(0.14, "topology_quota: largest share of choices that may leave the node",
                          flag="off-node-quota")
    blend: float = option(1.0, "loss ta_moe: weight of the link costs in the penalties. 1: link "
                          "costs alone; 0: no link costs, which is the switch loss",
                          flag="topology-blend")
    pair_capacity: float = option(0.0, "ta_moe: if > 0, choices for an expert beyond this factor "
                                  "times its topology-aware share are dropped",
                                  flag="pair-capacity")
    overflow: str = option("drop", "what happens to choices beyond pair_capacity. drop: they are "
                           "dropped; next: they move to the next best expert with free capacity",
                           choices=("drop", "next"), flag="pair-overflow")
    visited: float = option(0.0, "ta_moe, topology_quota: number added to the scores of experts on "
                            "nodes that the token's row visits anyway, for the choice of experts "
                            "only. With dispatch.send, fewer rows travel between nodes; 0: nothing "
                            "is added", flag="visited-bias")

    def check_bounds(self) -> None:
        if not 0 <= self.visited <= 1e6:
            self.require("visited", False, ">= 0 and <= 1e6", "use 0 for no bonus, or 0.02")
        self.require("far", self.far > 0, "> 0", "use 8")
        self.require("quota", 0 <= self.quota <= 1, "in [0, 1]", "use 0.14")
        self.require("blend", 0 <= self.blend <= 1, "in [0, 1]", "use 1")
        self.require("pair_capacity", self.pair_capacity >= 0, ">= 0",
                     "use 0 for no limit")
        self.require("overflow", self.overflow == "drop" or self.pair_capacity >= 1,
                     "'drop' unless router.links.pair_capacity >= 1, so that slots remain free",
                     "use router.links.pair_capacity=1")


@dataclass(kw_only=True)
class SelectionConfig(SettingsSection):
    """How one of several configured routers is selected when a call does not specify a router
    index."""

    PATH = "router.selection."

    rule: str = option("first", "rule that selects one of several routers in `name`. first: always "
                       "the first router; layer: MoE layer n uses router n modulo the number of "
                       "routers; cycle: the routers in order, changing with the optimizer step; "
                       "random: a seeded draw for each step and layer; or a registered name",
                       flag="router-selection")
    every: int = option(1, "cycle, random: number of optimizer steps until the next selection",
                        flag="router-selection-every")
    seed: int = option(0, "random: seed of the draws, the same on all ranks",
                       flag="router-selection-seed")
    outside_training: int = option(0, "cycle, random: index in `name`, starting at 0, of the "
                                   "router used outside training", flag="router-selection-eval")

    def check_bounds(self) -> None:
        self.require("rule", bool(self.rule), "a registered name", "use first")
        self.require("every", self.every >= 1, ">= 1", "use 1")
        self.require("outside_training", self.outside_training >= 0, ">= 0",
                     "use 0 for the first router")
        where = f"where router.selection.rule={self.rule}"
        self.read_where(self.rule not in ("first", "layer"), where, "use the rule cycle or random",
                        "every", "seed", "outside_training")
        self.read_where(self.rule != "cycle", where, "use the rule random", "seed")


_SECTIONS = {"hash": HashConfig(), "sparsity": SparsityConfig()}  # read by one router each


def router_names(text: str) -> list[str]:
    """Return the router names listed in `router.name`."""
    return [name.strip() for name in text.split(",")]


@dataclass(kw_only=True)
class RouterConfig(SettingsSection):
    """Settings that determine how experts are chosen for each token."""

    PATH = "router."

    name: str = option("topk", "router, by registered name. With several names, separated by "
                       "commas, `selection` decides which router is used for a call", flag="router")
    top_k: int = option(2, "experts per token (expert_choice: on average; fixed for base, gshard, "
                        "hash and switch; not used by dense_to_sparse)", flag="top-k")
    top_k_at: dict[float, int] = field(default_factory=dict, metadata={
        "help": "changes of the experts per token, by the step from which they apply: 1000=1 (in a "
                "file {1000: 1}), or by the fraction of the run: 0.5=1",
        "flag": "top-k-at", "entry": "step=experts"})
    score: str = option("softmax", "score function: softmax over the experts, sigmoid of each "
                        "logit, or a registered name", flag="router-score")
    normalize: str = option(
        "auto", "whether to divide the chosen scores by their sum: before_drop or after_drop (of "
        "tokens), or none; auto: before_drop if top_k > 1 and the router normalizes, else none; "
        "always: before_drop even for a single expert, whose weight is then 1 and has no gradient",
        choices=("auto", "none", "before_drop", "after_drop", "always"), flag="router-normalize")
    normalize_add: float = option(1e-20, "normalize divides by max(sum + normalize_add, "
                                  "normalize_min); model families use different values "
                                  "(docs/balance.md)", flag="router-normalize-add")
    normalize_min: float = option(0.0, "smallest divisor that normalize uses; 0: no lower bound",
                                  flag="router-normalize-min")
    bias: bool = option(False, "add a learned bias, initially zero, to the logits of linear "
                        "routers (gpt-oss)", flag="router-logit-bias")
    scaling: float = option(1.0, "factor on every gate weight", flag="router-scaling")
    fp32: bool = option(False, "store the router's parameters in float32 in a model of lower "
                        "precision (scores are always float32)", flag="router-fp32")
    noise: float = option(0.0, "training: add noise/num_experts times a standard normal sample to "
                          "the logits", flag="router-noise")
    input_jitter: float = option(0.0, "training: multiply the router's input by a sample of U[1-j, "
                                 "1+j]", flag="router-jitter")
    input_dropout: float = option(0.0, "training: dropout probability on the router's input",
                                  flag="router-input-dropout")
    second_expert_policy: str = option(
        "all", "topk, cosine, ta_moe with top_k = 2, in training: all always uses the second "
        "expert; sampling draws the second expert with Gumbel noise; random uses the second expert "
        "with probability min(1, 2 g2)", choices=("all", "sampling", "random"),
        flag="router-second-expert")
    batch_prioritized: bool = option(False, "when an expert's slots run out, drop the least "
                                     "confident tokens rather than the last tokens",
                                     flag="batch-prioritized")
    groups: int = option(0, "sam, group_limited, sigmoid_bias: number of groups of consecutive "
                         "experts, e.g. one group per node; 0: no groups", flag="router-groups")
    group_top_k: int = option(1, "group_limited, sigmoid_bias: number of groups from which a token "
                              "may choose experts", flag="router-group-top-k")
    group_scores: int = option(0, "group_limited, sigmoid_bias: number of best scores in a group "
                               "that are summed to the group's score; 0: top_k // group_top_k, at "
                               "least 1", flag="router-group-scores")
    bias_rate: float = option(1e-3, "sigmoid_bias: change of a bias per step",
                              flag="router-bias-rate")
    quantile_ema: float = option(0.0, "quantile: fraction of a bias that is kept from the previous "
                                 "step; 0: only the latest step's quantiles count",
                                 flag="router-quantile-ema")
    cosine_dim: int = option(256, "cosine: width in which tokens and experts are compared",
                             flag="router-cosine-dim")
    pre_gate: int = option(0, "1: each MoE block chooses the experts of the next block, one block "
                           "early; the first block also has its own gate. 0: each block chooses "
                           "its own experts", flag="pre-gate")
    predict: bool = option(False, "evaluation with experts.store=host or disk: while a block "
                           "computes, fetch the experts that the next block's gate would choose "
                           "for the block's tokens", flag="predict-experts")
    force: str = option("none", "balance: replace the router's choices by choices that are as even "
                        "as possible, for benchmarks (docs/balance.md)",
                        choices=("none", "balance"), flag="router-force")
    mixer_eps: float = option(0.01, "sparsemixer: experts whose logit is within twice this "
                              "fraction of the best logit share its weight",
                              flag="router-mixer-eps")
    sinkhorn_rounds: int = option(20, "sinkhorn: number of rounds that scale rows and columns",
                                  flag="router-sinkhorn-rounds")
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    hash: HashConfig = field(default_factory=HashConfig)
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    links: LinksConfig = field(default_factory=LinksConfig)

    def check_bounds(self) -> None:
        self.require("name", bool(self.names) and all(self.names),
                     "a registered name, or several separated by commas", "use topk")
        self.require("score", bool(self.score), "a registered name", "use softmax")
        self.require("top_k", self.top_k >= 1, ">= 1", "use 1 (Switch) or 2 (GShard)")
        self.top_k_at = {int(step) if step >= 1 and step == int(step) else step: k
                         for step, k in self.top_k_at.items()}
        steps = list(self.top_k_at)
        self.require("top_k_at", steps == sorted(steps), "in ascending order",
                     "write the first change first, e.g. 100=2,200=1")
        self.require("top_k_at", all(0 < step < 1 for step in steps) or all(
            2 <= step <= MOST_STEPS and step == int(step) for step in steps),
                     f"by steps from 2 to {MOST_STEPS}, or by fractions of the run between 0 and 1",
                     "set the first step's number of experts with router.top_k")
        self.require("top_k_at", all(k >= 1 for k in self.top_k_at.values()), ">= 1 expert",
                     "use 1 or 2")
        self.require("noise", self.noise >= 0, ">= 0", "use 0 for no noise")
        for name in ("input_jitter", "input_dropout"):
            self.require(name, 0 <= getattr(self, name) < 1, "in [0, 1)", "use 0 for none")
        for name in ("normalize_add", "normalize_min"):
            if not 0 <= getattr(self, name) <= 1:
                self.require(name, False, "in [0, 1]", "leave it out")
        self.require("scaling", self.scaling > 0, "> 0", "use 1")
        two = self.second_expert_policy == "all" or set(self.several_k) == {2}
        self.require("second_expert_policy", two, "'all' unless router.top_k=2",
                     f"router.top_k is {', then '.join(map(str, self.several_k))}: set it to 2 or "
                     "the policy to 'all'")
        self.within("groups", 0, MOST_EXPERTS, "use 0 for no groups")
        self.require("group_top_k", 1 <= self.group_top_k <= max(1, self.groups),
                     f"in 1..router.groups={self.groups}", "use 1")
        self.within("group_scores", 0, MOST_EXPERTS, "use 0")
        self.require("bias_rate", self.bias_rate >= 0, ">= 0", "use 0.001")
        self.require("quantile_ema", 0 <= self.quantile_ema < 1, "in [0, 1)", "use 0")
        several, selection = len(self.names), self.selection
        self.require("selection.rule", selection.rule == "first" or several > 1,
                     f"'first' with the single router {short(self.name)}",
                     "list several in router.name, e.g. switch,hash")
        self.require("selection.outside_training", selection.outside_training < several,
                     f"in 0..{several - 1}", f"router.name lists {several}")
        self.within("cosine_dim", 1, MOST_WIDTH, "use the default")
        self.within("pre_gate", 0, 1, "use 1 to choose experts one block early, else 0")
        self.require("predict", not (self.predict and self.pre_gate),
                     "off where router.pre_gate=1, which already determines the experts",
                     "leave it out")
        self.require("mixer_eps", 0 <= self.mixer_eps <= 1, "in 0..1", "use 0.01")
        self.within("sinkhorn_rounds", 1, 10_000, "use the default")
        self.require("force", self.force == "none" or self.second_expert_policy == "all",
                     "none unless router.second_expert_policy=all, as other policies drop some of "
                     "the choices", "use all")
        if self.normalize == "none":
            self.read_where(False, "where router.normalize=none", "use before_drop",
                            "normalize_add", "normalize_min")
        self.read_where(self.groups > 0, "where router.groups=0", "use router.groups",
                        "group_scores")
        self.check_read()

    def check_read(self) -> None:
        """Raise a `ValueError` for settings that no configured router reads."""
        where = f"where router.name={short(self.name)}"
        for f in dataclasses.fields(self):
            value, section = getattr(self, f.name), f.default is dataclasses.MISSING
            if value == (_SECTIONS.get(f.name, value) if section else f.default):
                continue
            readers = readers_of(f.name, value)
            if not self.may_be_read(readers):
                (value if section else self).read_where(False, where, router_remedy(readers),
                                                        *(() if section else [f.name]))
        others = [name for name in self.names if "force" not in (reads_of(name) or {"force"})]
        self.read_where(not others, f"with router {', '.join(others)}",
                        "use router.name=topk alone", "force")
        self.read_where(self.normalize in ("none", "always") or max(self.several_k) > 1,
                        "where router.top_k=1 (a weight over itself is always 1)",
                        "raise router.top_k, or use always to divide nevertheless",
                        "normalize")
        self._check_top_k(where)

    def _check_top_k(self, where: str) -> None:
        fixed = sorted({k for name in self.names if (k := fixed_k_of(name)) is not None})
        default = RouterConfig.top_k
        read = self.top_k in (default, *fixed) or self.may_be_read(
            [name for name in built_in() if getattr(router_class(name), "reads_top_k", True)])
        readers = [name for name in self.names if fixed_k_of(name) is None
                   and getattr(router_class(name), "reads_top_k", True)]
        self.require("top_k_at", bool(readers) or not self.top_k_at,
                     f"empty {where}, whose experts per token are fixed",
                     "leave it out, or use router.name=topk")
        if not read:
            self.unread("top_k", f"{' or '.join(map(str, fixed or [default]))} {where}, which does "
                        "not read it", "leave it out, or use router.name=topk")
        if 1 in self.several_k and set(self.names) == {"noisy_topk"}:
            self.unread("top_k" if self.top_k == 1 else "top_k_at",
                        f"> 1 {where}: a softmax over one choice is always 1, so the router would "
                        "receive no gradient from the task",
                        "use 2, or router.name=topk with router.noise")

    def may_be_read(self, readers: Collection[str]) -> bool:
        """Return whether a configured router may read a setting, given the built-in routers
        `readers` that read it."""
        return may_be_read(self.names, readers)

    @property
    def names(self) -> list[str]:
        """The configured routers."""
        return router_names(self.name)

    @property
    def several_k(self) -> list[int]:
        """All configured values of k, the number of experts per token: `top_k`, followed by the
        values in `top_k_at`.
        """
        return [self.top_k, *self.top_k_at.values()]

    @property
    def experts_per_token(self) -> int:
        """The maximum number of experts per token, over all configured routers and all training
        steps.
        """
        return max(fixed_k_of(name) or max(self.several_k) for name in self.names)

    def most_per_token(self, experts: int) -> int:
        """Return the maximum number of experts that can be chosen for one token.

        Args:
            experts: number of experts in the layer.
        """
        return max(experts if getattr(router_class(name), "any_number", False)
                   else fixed_k_of(name) or max(self.several_k) for name in self.names)
