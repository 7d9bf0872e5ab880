"""Which layout a call of a layer runs in: as given, as configured or as tuned; and its shadows."""

from __future__ import annotations

from typing import Any

from moe_plugin.comm import Comm, LocalComm
from moe_plugin.config import MoEConfig
from moe_plugin.experts import Experts
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.shadow import ShadowModel
from moe_plugin.records import HostContext, KeptRouting, Placement
from moe_plugin.tuning.default_hardware import default_cluster, default_device
from moe_plugin.tuning.layout_tuner import LayoutTuner
from moe_plugin.tuning.layouts import LayoutCall, Layouts
from moe_plugin.tuning.predicted import PredictedLayout
from moe_plugin.tuning.shadows import Shadows

STATE_VERSION = 1


class LayoutSelector:
    """One interface for layouts that are fixed, tuned or shadowed.

    Args:
        config: the layer's. place: where its parameters are stored. experts: of the layer.
        host: what the host knows of the layer.

    Attributes:
        available: what may be selected. tuner: of `parallel: auto` or `predicted`; None: the
            layout is fixed.
        shadows: of `parallel.shadow`; None: no expert is shadowed.
    """

    def __init__(self, config: MoEConfig, place: Placement, experts: Experts,
                 host: HostContext) -> None:
        self.config, self.place, self.experts, self.host = config, place, experts, host
        self.available = Layouts(config, place, experts.supports_gather)
        self.shadows = self._make_shadows() if config.parallel.shadow else None
        self.tuner = self._make_tuner(host)

    def select(self, kept: KeptRouting, choice: LayoutChoice | None, training: bool) -> LayoutCall:
        """The layout of this call, the same on all ranks.

        choice: asked for by the caller; None: as tuned or configured.
        """
        timer = None
        if self.tuner is None or choice is not None:
            layout = self.available.at(choice or self.available.fixed)
        else:
            layout, timer = self.tuner.layout(kept.routing, training)
        shadows: tuple[int, ...] = ()
        if self.shadows is not None and layout.dispatcher.placement.comm.size > 1:
            shadows = self.shadows.select(kept.routing, training)
        return LayoutCall(layout, self.experts, timer, shadows, self.config.experts.weights_first)

    @property
    def current(self) -> LayoutChoice:
        """The layout of the latest call that was not given one, or of the next if there is none."""
        return self.available.fixed if self.tuner is None else self.tuner.current

    @property
    def load_comm(self) -> Comm:
        """The ranks whose loads differ: those that must agree on a capacity."""
        return LocalComm() if self.available.traits.shares_tokens else self.place.comm

    def report(self, call: LayoutCall) -> dict[str, Any]:
        """Fields of `LayerStats`: layout, decisions since the last call, copies of the tokens."""
        decisions = () if self.tuner is None else self.tuner.pop_decisions()
        copies = self.place.replicas.size if self.place.replicas is not None else 1
        if self.available.traits.shares_tokens:
            copies = self.place.comm.size
        return {"layout": call.layout.choice.label, "copies": copies,
                "decisions": tuple(decision.as_dict() for decision in decisions)}

    def forget_recordings(self) -> None:
        """See `moe_plugin.routing.replay.forget`."""
        for chooser in (self.tuner, self.shadows):
            if chooser is not None:
                chooser.forget_recordings()

    def state(self) -> dict[str, Any]:
        """Where the local experts come from; with a tuner also what it learned."""
        place, more = self.place, {}
        if self.tuner is not None:
            more["tuner"] = self.tuner.state()
        if place.cut is not None:
            more["shards"] = place.cut
        return {"version": STATE_VERSION, "num_experts": place.experts, "ep_size": place.comm.size,
                "ep_rank": place.comm.rank, **more}

    def load_state(self, state: dict[str, Any]) -> None:
        """`ValueError` if a checkpoint's experts are not this rank's. Tuner state is optional."""
        for key, mine in {"shards": None, **self.state()}.items():
            if key != "tuner" and state.get(key) != mine:
                raise ValueError(
                    f"checkpoint has {key}={state.get(key)}, this layer has {key}={mine}; load it "
                    "with the same number of experts, expert-parallel ranks and shards, or reshard "
                    "it with moe_plugin.checkpoint.reshard")
        if self.tuner is not None and state.get("tuner") is not None:
            self.tuner.load_state(state["tuner"])

    def _make_tuner(self, host: HostContext) -> LayoutTuner | PredictedLayout | None:
        mode, probe = self.config.parallel.mode, self.experts.anchor
        if mode == "predicted":
            return PredictedLayout(self.config, self.available, probe)
        if mode == "auto":
            return LayoutTuner(self.config, self.available, probe, replay=host.replay)
        return None

    def _make_shadows(self) -> Shadows:
        config = self.config
        traits = self.available.traits
        if not self.experts.supports_gather or traits.single_layout or traits.bounded:
            raise ValueError(
                f"parallel.shadow={config.parallel.shadow} does not fit custom experts "
                f"or dispatch.name={config.dispatch.name!r}; use 0")
        comm = self.place.comm
        cluster, device = default_cluster(comm, comm.device), default_device(config, comm.device)
        beta = (cluster.inter if cluster.nodes > 1 else cluster.intra).beta_s
        return Shadows(self.place, config.parallel.shadow, ShadowModel(
            model_dim=config.model_dim, hidden_dim=config.hidden_dim, flops=device.flops,
            bytes_s=1 / max(beta, 1e-13), matrices=3 if config.experts.kind == "gated_ffn" else 2),
            self.host.replay)
