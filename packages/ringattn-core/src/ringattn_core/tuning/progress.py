# SPDX-License-Identifier: Apache-2.0
"""How far a tuning is, for whoever watches: a line on a terminal that is written over, and nothing elsewhere."""

import sys
from typing import Final, TextIO

WIDTH: Final = 24


class Progress:
    """Steps done out of `total`, which may shrink; silent where the stream is no terminal."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream is not None and self._stream.isatty()
        self.total = 0
        self.done = 0

    def add(self, steps: int) -> None:
        """So many steps more are to come, or fewer where it is negative."""
        self.total += steps

    def step(self, what: str) -> None:
        """One step begins."""
        if self._shown:
            filled = WIDTH * self.done // max(self.total, 1)
            bar = "#" * filled + "." * (WIDTH - filled)
            self._write(f"[{bar}] {self.done}/{self.total} {what}")
        self.done += 1

    def close(self) -> None:
        """The line is gone, whatever became of the steps."""
        if self._shown:
            self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text[:100]}")
        self._stream.flush()
