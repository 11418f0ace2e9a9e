# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a block: the kernel keeps a tile of queries while tiles of keys and values visit it."""

from typing import Any, Final

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..block_sizes import LANES
from ..kernel_inputs import Settings
from ..launch import Step, over_parts
from ..steps import FIRST, LAST
from .dropout import kept
from .scores import (
    Part,
    folded,
    keep_columns,
    mask_out,
    matmul,
    products,
    scores,
    to_column,
    to_row,
    to_width,
)

LARGEST: Final = 0
TOTAL: Final = 1
"""The rows of `softmax`: row 0 has the largest score of each query so far, row 1 the sum of `2 ** (s - largest)`."""
LOWEST: Final = float(jnp.finfo(jnp.float32).min)
"""The largest score of a query that has seen no key. Only -inf is lower, and exp(-inf - LOWEST) is 0."""


def forward(step: Step, inputs: Any, outputs: Any, scratch: Any, *, settings: Settings, part: int) -> None:
    """Continues `out` and `softmax` with the keys of the steps; starts them from no keys if they are not inputs.

    In the scratch memory, every lane of a row has the same `largest`; the sum of exponentials is the sum of `total`
    over the lanes; and `acc` is the output times this sum. Probabilities that dropout keeps enter `acc` unscaled: the
    last step multiplies by `1 / (1 - dropout_prob)`, in float32.
    """
    acc, largest, total, columns = scratch["acc"], scratch["largest"], scratch["total"], scratch.get("columns")

    @pl.when(step.has(FIRST))
    def _():
        keep_columns(inputs.get("q_integers"), columns)
        if "out" in inputs:
            before = to_column(inputs["softmax"][TOTAL : TOTAL + 1, :])
            acc[...] = inputs["out"][...] * to_width(before / settings.rule.keep_weight, acc.shape[1])
            largest[...] = to_column(inputs["softmax"][LARGEST : LARGEST + 1, :])
            total[...] = before / LANES
        else:
            acc[...] = jnp.zeros_like(acc)
            largest[...] = jnp.full_like(largest, LOWEST)
            total[...] = jnp.zeros_like(total)

    def visit(start: int, masked: bool) -> None:
        _visit(Part(settings, step, inputs, columns, False, start, part), acc, largest, total, masked)

    over_parts(step, inputs["k"].shape[0], part, visit)

    @pl.when(step.has(LAST))
    def _():
        weight = jnp.broadcast_to(total[...].sum(-1, keepdims=True), total.shape)
        share = settings.rule.keep_weight / jnp.where(weight == 0.0, 1.0, weight)
        outputs["out"][...] = (acc[...] * to_width(share, acc.shape[1])).astype(outputs["out"].dtype)
        outputs["softmax"][LARGEST : LARGEST + 1, :] = to_row(largest[...])
        outputs["softmax"][TOTAL : TOTAL + 1, :] = to_row(weight)


def _visit(part: Part, acc: Any, largest: Any, total: Any, masked: bool) -> None:
    settings = part.settings
    s, _ = scores(part, products(part, "q", "k"))
    s = mask_out(part, s) if masked else s
    before = largest[...]
    after = jnp.maximum(before, s.max(-1, keepdims=True))
    p = jnp.exp2(s - to_width(after, part.width))
    decay = jnp.exp2(before - after)
    total[...] = decay * total[...] + folded(p)
    largest[...] = after
    if settings.rule.dropout_prob:
        p = p * kept(part, 1.0)
    acc[...] = to_width(decay, acc.shape[1]) * acc[...] + matmul(p, part.rows("v"), settings)
