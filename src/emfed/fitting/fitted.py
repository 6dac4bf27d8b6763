"""What a fit came to, and who looks at it on the way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from emfed.artifacts.result import Result
from emfed.core.errors import CheckpointError, SettingsError, check_type
from emfed.core.wording import Setting, Wording
from emfed.fitting.selection import Selection
from emfed.fitting.stopping import Callback, Monitor


@final
@dataclass(frozen=True)
class Fitted:
    """What a fit came to."""

    result: Result
    """The result of the model, or of the candidate that was chosen."""
    selection: Selection | None = None
    """All candidates, where there were several."""
    log_likelihood: float | None = None
    """Per row at the result, where the fit asked for it."""
    remarks: tuple[str, ...] = ()
    """What a user should know."""
    shortfall: str = ""
    """What was missing to convergence, in words; empty if nothing was."""
    thrown_off: str = ""
    """What may have thrown the fit off, in words; it is among the remarks."""

    @property
    def doubts(self) -> list[str]:
        """Why the result must not be taken for that of a fit which ended well; empty if it did."""
        company = self.result.company
        lost = "" if company is None else company.doubt
        return [words for words in (self.shortfall, self.thrown_off, lost) if words]


@final
@dataclass(frozen=True)
class Watch:
    """Who looks at a fit, and where it is kept: no part of what is fitted."""

    callbacks: tuple[Callback, ...] = ()
    monitor: Monitor | None = None
    checkpoint: Path | None = None
    checkpoint_every: int = 100
    resume: bool = False
    curve: bool = False
    """Whether the objective in the records is found out at the end, for some of the rounds."""
    leads_on: bool = False
    """Whether components may be moved, though a stage before has left the start."""

    def __post_init__(self) -> None:
        for callback in self.callbacks:
            if not callable(callback):
                raise SettingsError(
                    f"a callback must be a function of a RoundRecord; got {callback!r}."
                )
        if self.monitor is not None:
            check_type("monitor", self.monitor, Monitor, "Monitor(every=10)")
        path = self.checkpoint
        if path is None:
            if self.resume:
                raise SettingsError(
                    Wording(
                        "{} needs the path of a {}.",
                        *(Setting("resume", True), Setting("checkpoint")),
                    )
                )
        elif not str(path) or str(path) == "." or path.is_dir():
            raise SettingsError(setting="checkpoint", must="be the path of a file", got=str(path))
        elif path.exists() and not self.resume:
            raise CheckpointError(
                Wording(
                    "{} is there already: use {} to continue it, or remove it first.",
                    *(path, Setting("resume", True)),
                )
            )

    @property
    def goes_on(self) -> bool:
        """Whether there is something to go on from."""
        return self.resume and self.checkpoint is not None and self.checkpoint.exists()


NOBODY = Watch()
"""Nobody looks."""
