# SPDX-License-Identifier: Apache-2.0
"""Whether the pictures of docs/gallery.md are those of the calls beside them."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pictures
from pictures import content

DOCS = Path(__file__).parent.parent / "docs"


def test_every_picture_is_that_of_the_options_beside_it(tmp_path: Path):
    shown = pictures.shown()
    assert len({code for _, code in shown}) == len(shown) >= 12
    assert {path for path, _ in shown} == set((DOCS / "pictures").glob("*.svg"))
    for path, code in shown:
        pictures.draw(code, tmp_path / path.name)
        assert content(tmp_path / path.name) == content(path), f"{path.name} is stale. Run: python docs/pictures.py"


def test_a_picture_of_other_options_is_found():
    found = [content(DOCS / "pictures" / f"{name}.svg") for name in ("causal", "strict", "window", "causal-window")]
    assert len({str(pixels) for _, pixels in found}) == len(found)


def test_a_picture_shows_what_a_query_sees():
    i, j = np.arange(pictures.TOKENS)[:, None], np.arange(pictures.TOKENS)
    assert (pictures.seen({"causal": True, "sliding_window": (2, 0)}) == ((j <= i) & (j >= i - 2))).all()
    assert (pictures.seen({"q_segment_ids": jnp.full((1, pictures.TOKENS), -1)}) == (i < 0)).all()


def test_pictures_are_small():
    assert all(path.stat().st_size < 20_000 for path in (DOCS / "pictures").glob("*.svg"))
