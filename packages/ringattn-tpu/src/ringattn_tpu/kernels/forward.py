# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a block: the kernel keeps a tile of queries while tiles of keys and values visit it."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..block_sizes import LANES
from ..kernel_inputs import Settings
from ..launch import Step, over_parts
from ..steps import FIRST, LAST
from .dropout import kept
from .query_terms import keep_terms, scaled_products
from .scores import (
    Part,
    folded,
    keep_columns,
    mask_out,
    matmul,
    scores,
    to_column,
    to_row,
    to_width,
)

BASE: Final = 0
TOTAL: Final = 1
LARGEST: Final = 2
"""The rows of `softmax`: row 0 has the number that is subtracted from the scores `s` of each query, row 1 the sum of
`2 ** (s - base)`, and row 2, if asked for, the largest score. The base begins as the lse of the partial result."""
LOWEST: Final = float(jnp.finfo(jnp.float32).min)
"""The base of a query with nothing in its denominator. Only -inf is lower, and exp(-inf - LOWEST) is 0."""


def forward(step: Step, inputs: Any, outputs: Any, scratch: Any, *, settings: Settings, part: int) -> None:
    """Continues `out` and `softmax` with the keys of the steps. One that is no input begins as before any key.

    In the scratch memory, every lane of a row has the same `base` and the same `largest`; the sum of exponentials is
    the sum of `total` over the lanes; and `acc` is the output times this sum. Probabilities that dropout keeps enter
    `acc` unscaled: the last step multiplies by `1 / (1 - dropout_prob)`, in float32.
    """
    acc, base, total, columns = scratch["acc"], scratch["base"], scratch["total"], scratch.get("columns")
    largest, terms = scratch.get("largest"), scratch.get("query_terms")

    @pl.when(step.has(FIRST))
    def _():
        keep_columns(inputs.get("q_integers"), columns)
        if terms is not None:
            keep_terms(inputs["q"][...], settings.product_scale, terms)
        acc[...] = inputs["out"][...] / settings.rule.keep_weight if "out" in inputs else jnp.zeros_like(acc)
        if "softmax" in inputs:
            base[...] = to_column(inputs["softmax"][BASE : BASE + 1, :])
            total[...] = to_column(inputs["softmax"][TOTAL : TOTAL + 1, :]) / LANES
        else:
            base[...] = jnp.full_like(base, LOWEST)
            total[...] = jnp.zeros_like(total)
        if largest is not None:
            nothing = jnp.full_like(largest, -jnp.inf)
            seen = "softmax" in inputs
            largest[...] = to_column(inputs["softmax"][LARGEST : LARGEST + 1, :]) if seen else nothing

    def visit(start: int, masked: bool) -> None:
        one = Part(settings, step, inputs, columns, False, start, part)
        s, _ = scores(one, scaled_products(one, terms))
        _add(one, mask_out(one, s) if masked else s, acc, base, total, largest)

    over_parts(step, inputs["k"].shape[0], part, visit)

    @pl.when(step.has(LAST))
    def _():
        weight = jnp.broadcast_to(total[...].sum(-1, keepdims=True), total.shape)
        share = settings.rule.keep_weight / jnp.where(weight == 0.0, 1.0, weight)
        outputs["out"][...] = (acc[...] * to_width(share, acc.shape[1])).astype(outputs["out"].dtype)
        outputs["softmax"][BASE : BASE + 1, :] = to_row(base[...])
        outputs["softmax"][TOTAL : TOTAL + 1, :] = to_row(weight)
        if largest is not None:
            outputs["softmax"][LARGEST : LARGEST + 1, :] = to_row(largest[...])


def _add(part: Part, s: jax.Array, acc: Any, base: Any, total: Any, largest: Any) -> None:
    """Adds the keys of `part`, with scores `s`, to what the scratch memory holds."""
    settings = part.settings
    most = s.max(-1, keepdims=True)
    before = base[...]
    after = jnp.maximum(before, most)
    p = jnp.exp2(s - to_width(after, part.width))
    decay = jnp.exp2(before - after)
    total[...] = decay * total[...] + folded(p)
    base[...] = after
    if largest is not None:
        largest[...] = jnp.maximum(largest[...], most)
    if settings.rule.dropout_prob:
        p = p * kept(part, 1.0)
    acc[...] = to_width(decay, acc.shape[1]) * acc[...] + matmul(p, part.rows("v"), settings)
