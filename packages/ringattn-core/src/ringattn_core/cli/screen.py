# SPDX-License-Identifier: Apache-2.0
"""What the place that is written to can show: its width, colours, and characters beyond ASCII."""

import dataclasses
import os
import shutil
from typing import Any, Final, Self

_WIDEST: Final = 120
_BLOCKS: Final = "▀█▒·"


@dataclasses.dataclass(frozen=True)
class Screen:
    """A file or a pipe is plain: ASCII, no colour, and as wide as a page."""

    width: int = 100
    blocks: bool = False
    colour: bool = False

    @classmethod
    def of(cls, stream: Any) -> Self:
        """What `stream` is: only a terminal has more than ASCII, and colour unless `NO_COLOR` is set."""
        if not stream.isatty() or os.environ.get("TERM") == "dumb":
            return cls()
        try:
            _BLOCKS.encode(stream.encoding or "ascii")
        except UnicodeEncodeError:
            return cls(width=_columns())
        return cls(_columns(), blocks=True, colour=not os.environ.get("NO_COLOR"))

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.colour else text

    def dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self.colour else text


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, _WIDEST)
