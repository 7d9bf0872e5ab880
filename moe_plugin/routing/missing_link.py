"""What stands for the routing of a layer that must know its neighbours, until it does."""

from __future__ import annotations

from typing import NoReturn

from moe_plugin.config import MoEConfig


class Unlinked:
    """Called in place of a layer's routing, it says what is missing. setting: that asks for it."""

    def __init__(self, setting: str) -> None:
        self.setting = setting

    @classmethod
    def of(cls, config: MoEConfig) -> Unlinked | None:
        """For a layer with these settings; None: it needs no neighbours."""
        if config.router.pre_gate:
            return cls("router.pre_gate=1")
        return cls("router.predict=True") if config.router.predict else None

    def __call__(self, *_: object) -> NoReturn:
        """Raises: ValueError: always."""
        raise ValueError(f"{self.setting} needs to know which block comes next: call "
                         "moe_plugin.pregate.link(model) once the model is built, or leave it out")
