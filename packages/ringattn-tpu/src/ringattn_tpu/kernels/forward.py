# SPDX-License-Identifier: Apache-2.0
"""The output of a block: queries keep their tile while keys and values visit it."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..launch import Step
from ..operands import Facts
from ..tables import FIRST, IDLE, LAST, MASKED
from .scores import (
    HIDDEN,
    LANES,
    START,
    Part,
    bent,
    folded,
    keep_columns,
    kept,
    outer,
    scored,
    selected,
    to_column,
    to_row,
    visible,
    wide,
)


def forward(step: Step, inputs: Any, outputs: Any, scratch: Any, *, facts: Facts, part: int, fresh: bool) -> None:
    """`out` and `lse` continued with the keys that the steps bring; `fresh` says that they begin here.

    `m` is the running maximum of a row, in every lane of it, `total` its running sum, over all lanes of it together,
    and `acc` its output times that. What survives dropout weighs in `acc` what it weighs without: its true weight comes
    last, and in float32. What is there to begin with counts as one key of weight 1 whose score is the lse.
    """
    acc, m, total, columns = scratch["acc"], scratch["m"], scratch["total"], scratch.get("columns")
    visiting = inputs["k"].shape[0]

    @pl.when(step.has(FIRST))
    def _():
        keep_columns(facts, inputs, columns, by_keys=False)
        if fresh:
            acc[...] = jnp.zeros_like(acc)
            m[...] = jnp.full_like(m, START)
            total[...] = jnp.zeros_like(total)
        else:
            lse = to_column(inputs["lse"][...])
            nothing = lse == -jnp.inf
            acc[...] = inputs["out"][...] / facts.keep_weight if facts.dropout else inputs["out"][...]
            m[...] = jnp.where(nothing, START, lse)
            total[...] = jnp.where(nothing, 0.0, 1.0 / LANES)

    def over(masked: bool) -> None:
        for start in range(0, visiting, part):
            _visit(Part(facts, step, inputs, columns, False, start, part), acc, m, total, masked)

    for masked in (False, True):
        pl.when((step.flags & (MASKED | IDLE)) == (MASKED if masked else 0))(lambda masked=masked: over(masked))

    @pl.when(step.has(LAST))
    def _():
        weight = jnp.broadcast_to(total[...].sum(-1, keepdims=True), total.shape)
        nothing = weight == 0.0
        share = (facts.keep_weight if facts.dropout else 1.0) / jnp.where(nothing, 1.0, weight)
        outputs["out"][...] = acc[...] * wide(share, acc.shape[1])
        outputs["lse"][...] = to_row(jnp.where(nothing, -jnp.inf, m[...] + jnp.log2(jnp.where(nothing, 1.0, weight))))


def _visit(part: Part, acc: Any, m: Any, total: Any, masked: bool) -> None:
    facts = part.facts
    k, v = part.inputs["k"][part.lanes, :], part.inputs["v"][part.lanes, :]
    q = part.inputs["q"][...]
    product = outer(q, k, facts)
    s = selected(visible(part) if masked else None, scored(part, bent(part, product)), HIDDEN)
    before = m[...]
    after = jnp.maximum(before, s.max(-1, keepdims=True))
    p = jnp.exp2(s - wide(after, part.width))
    decay = jnp.exp2(before - after)
    total[...] = decay * total[...] + folded(p)
    m[...] = after
    if facts.dropout:
        p = p * kept(part, 1.0)
    seen = jnp.dot(p.astype(v.dtype), v, precision=facts.precision, preferred_element_type=jnp.float32)
    acc[...] = wide(decay, acc.shape[1]) * acc[...] + seen
