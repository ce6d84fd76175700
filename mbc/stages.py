"""Runs the stages of a compilation, and records their names, times and results as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from mbc.errors import MbcError

T = TypeVar("T")
MEASURING = frozenset(("measure", "measure micro-batches", "measure again"))
BUILDING = frozenset(("build package",))


@dataclass
class Stages:
    """Runs stages by name, adds up their times, and writes the result of each run to a folder if asked to."""

    dump_folder: str | None = None
    announce: Callable[[str], None] = lambda name: None
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    runs: int = 0

    @property
    def measuring_seconds(self) -> float:
        """Time of the stages that measure."""
        return sum(self.seconds.get(name, 0.0) for name in MEASURING)

    @property
    def building_seconds(self) -> float:
        """Time of the stages that build."""
        return sum(self.seconds.get(name, 0.0) for name in BUILDING)

    @property
    def planning_seconds(self) -> float:
        """Time of all other stages."""
        return sum(took for name, took in self.seconds.items() if name not in MEASURING | BUILDING)

    def run(self, name: str, stage: Callable[[], T], text: Callable[[T], str] | None = None) -> T:
        """Run a stage and return its result.

        Args:
            name: Name of the stage.
            stage: The function to run.
            text: Turns the result into a text for the dump folder; None for no text.
        """
        self.announce(name)
        started = perf_counter()
        try:
            result = stage()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - started
        self.runs += 1
        if self.dump_folder and text is not None:
            self._dump(Path(self.dump_folder), name, text(result))
        return result

    def _dump(self, folder: Path, name: str, text: str) -> None:
        """Write the text of a run into a separate file, whose name has the number of the run."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self.runs:02}_{name.replace(' ', '_')}.txt").write_text(text, encoding="utf-8")
        except OSError as error:
            raise MbcError(
                "MBC187",
                f"cannot write stages to '{folder}': {error.strerror or error}",
                "choose another --dump-stages",
            ) from error
