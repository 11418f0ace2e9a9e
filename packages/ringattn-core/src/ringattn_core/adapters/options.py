# SPDX-License-Identifier: Apache-2.0
"""Which options of `ring_attention` an adapter takes under their own names, and what it calls the others."""

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from ..call.options import AttentionSettings as AttentionSettings
from ..call.options import RingSettings, TokenOptions
from ..errors import InputError
from ..placement import arrays


class RingArrays(TokenOptions, total=False):
    """Arrays that belong to one call and that other libraries have no name for."""

    softmax_aux: arrays.Sinks | arrays.SharedSinks | None


class RingOptions(RingArrays, RingSettings, total=False):
    """Arrays and settings, for a function that has its own names for the rest."""


class AttentionOptions(RingArrays, AttentionSettings, total=False):
    """Every option that the calling library does not pass itself; it passes bias, mask and dropout."""


def checked(given: Mapping[str, Any], kind: type, renamed: Mapping[str, str]) -> dict[str, Any]:
    """The options given; refuses a name that the TypedDict `kind` lacks.

    `renamed` gives the adapter's name for options of `ring_attention` that it calls otherwise.
    """
    names = kind.__annotations__
    for name in given:
        if name in renamed:
            raise InputError(name, "has another name here", f"Pass {renamed[name]}")
        if name not in names:
            close = difflib.get_close_matches(name, sorted({*names, *renamed.values()}), n=1)
            guess = f" (did you mean {close[0]}?)" if close else ""
            raise InputError(name, f"is no option of this adapter{guess}", f"Options: {', '.join(sorted(names))}")
    return dict(given)


@contextlib.contextmanager
def told_in_words_of(renamed: Mapping[str, str]) -> Iterator[None]:
    """Adds to an error about an argument of `ring_attention` what the adapter calls that argument."""
    try:
        yield
    except InputError as error:
        if error.argument in renamed:
            error.add_note(f"Here {error.argument} is called {renamed[error.argument]}.")
        raise
