# SPDX-License-Identifier: Apache-2.0
"""The gradients of keys and values: the kernel keeps a tile of keys, and queries of all their heads visit the tile."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..kernel_inputs import Settings
from ..launch import Step, over_parts
from ..steps import FIRST, LAST
from .derivatives import derivatives
from .scores import Part, keep_columns, matmul


def backward_keys(step: Step, inputs: Any, outputs: Any, scratch: Any, *, settings: Settings, part: int) -> None:
    """Writes `dk` and `dv`. A tile of keys that no query sees has one idle step, which writes zeros."""
    dk, dv, columns = scratch["dk"], scratch["dv"], scratch.get("columns")

    @pl.when(step.has(FIRST) & (step.at.member == 0))
    def _():
        keep_columns(inputs.get("kv_integers"), columns)
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    def visit(start: int, masked: bool) -> None:
        one = Part(settings, step, inputs, columns, True, start, part)
        found = derivatives(one, None, masked)
        dv[...] += matmul(found.p, one.rows("dout"), settings)
        dk[...] += matmul(found.dproduct, one.rows("q"), settings)

    over_parts(step, inputs["q"].shape[0], part, visit)

    @pl.when(step.has(LAST) & (step.at.member == step.members - 1))
    def _():
        outputs["dk"][...] = (dk[...] * settings.rule.softmax_scale).astype(outputs["dk"].dtype)
        outputs["dv"][...] = dv[...].astype(outputs["dv"].dtype)
