"""Stop strings in a text that comes in pieces: nothing of one is ever given out."""

from __future__ import annotations

from collections.abc import Iterable


class StopText:
    """Passes text on until a stop string is complete, holding back what may be the beginning of one.

    The stop string that is complete first ends the text, the longest on a tie: so the pieces that the text came in do not matter.

    Attributes
    ----------
    found : str or None
        The stop string that ended the text.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now; "" once a stop string was found."""
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        ends = [(at + len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, self.found = min(ends, key=lambda pair: pair[0])
            self._held = ""
            return text[: end - len(self.found)]
        n = max((self._n_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _n_begun(text: str, stop: str) -> int:
        """Characters at the end of `text` that begin `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
