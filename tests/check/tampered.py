"""A device that breaks one thing on purpose, to see that a check turns red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memra_runtime.check.rig import Options, Rig
from memra_runtime.model import Model

#: Called after a launch inside a round: device, name of what was launched.
Damage = Callable[[Any, str], None]

#: Launches that begin something other than a speculative round.
_PLAIN = ("prefill", "prime", "plain", "run_begin_plain")
QUICK = Options(prompts=("def f(x):\n    return",), max_new=24, quick=True)


class Tampered:
    """Passes everything on to a device; damages what rounds leave, or launches another thing."""

    def __init__(
        self, device: Any, damage: Damage | None = None, instead: dict[str, str] | None = None
    ) -> None:
        self._device, self._damage, self._instead = device, damage, instead or {}
        self._in_round = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def start(self, name: str) -> None:
        """A burst of one round, which may be damaged like any other."""
        self.launch(name.removesuffix("_burst"))

    def launch(self, name: str) -> None:
        self._device.launch(self._instead.get(name, name))
        if name in _PLAIN:
            self._in_round = False
        if name == "run_begin" or name.startswith("round"):
            self._in_round = True
        if self._damage is not None and self._in_round:
            self._damage(self._device, name)


def tampered(
    model: Model,
    damage: Damage | None = None,
    instead: dict[str, str] | None = None,
    options: Options = QUICK,
) -> Rig:
    """A rig on a tampered copy of the model."""
    return Rig(replace(model, device=Tampered(model.device, damage, instead)), options)


def after_round(damage: Callable[[Any], None]) -> Damage:
    """Damage once a round has been committed, however it was launched."""

    def act(device: Any, name: str) -> None:
        if name in ("round", "run_adapt"):
            damage(device)

    return act
