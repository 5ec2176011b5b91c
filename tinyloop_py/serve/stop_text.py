"""Ending a text at a string, without ever showing a part of that string."""

from __future__ import annotations


class StopText:
    """Passes text on piece by piece up to the first of the stop strings, which is not passed on.

    What may yet become a stop string is held back until it is known not to.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now; nothing after a stop string was found."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            at, self.found = min(ends, key=lambda end: end[0])
            self._held = ""
            return text[:at]
        n_held = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """How many characters at the text's end are the beginning of `stop`, short of all of it."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
