# SPDX-License-Identifier: Apache-2.0
"""Kernels that are wrong only for some sizes or for some options together, and the calls that each gets wrong."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from reference_kernels import Dense
from ringattn_conformance.cases import Case
from ringattn_core import Block, Gradients, Partial

LARGEST_FLOAT16: Final = 65504.0


class Changed(Dense):
    """A kernel that computes another block than the one it gets."""

    def __init__(self, change: Callable[[Block], Block]) -> None:
        self.change = change

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        return super().forward(self.change(block), partial)

    def backward(self, block: Block, *arrays: Any) -> Gradients:
        return super().backward(self.change(block), *arrays)


class Interleaved(Dense):
    """From three key heads on, query head `n` reads key head `n % K`."""

    def of_heads(self, x: jax.Array, block: Block) -> jax.Array:
        tiled = jnp.tile(x.astype(jnp.float32), (1, 1, block.group, 1))
        return tiled if block.kv_heads > 2 else super().of_heads(x, block)


class MixedUp(Dense):
    """From five query heads on, each reads the keys of its neighbour."""

    def of_heads(self, x: jax.Array, block: Block) -> jax.Array:
        found = super().of_heads(x, block)
        return jnp.roll(found, 1, 2) if found.shape[2] > 4 else found


class OverflowingScores(Dense):
    """Products of float16 are summed in float16, before the scale."""

    def scores(self, block: Block) -> tuple[jax.Array, jax.Array]:
        s, slope = super().scores(block)
        raw = jnp.einsum("btnh,bsnh->bnts", block.q.astype(jnp.float32), self.of_heads(block.k, block))
        beyond = (block.q.dtype == jnp.float16) & (jnp.abs(raw) > LARGEST_FLOAT16) & ~jnp.isneginf(s)
        return jnp.where(beyond, jnp.inf, s), slope


class OverflowingDerivatives(Dense):
    """The derivatives of the scores are rounded to float16 before they are multiplied by the scale."""

    def derivatives(self, ds: jax.Array, block: Block) -> jax.Array:
        return ds.astype(jnp.float16).astype(jnp.float32) if block.q.dtype == jnp.float16 else ds


class DoubledAtPrecision(Dense):
    """The output is doubled where `precision` is given."""

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        found = super().forward(block, partial)
        last = jnp.asarray(2.0 if block.rule.precision and partial is None else 1.0)
        return dataclasses.replace(found, out=found.out * last)


class NoMaximum(Dense):
    """No maximum is subtracted from the scores."""

    def counted(self, out: jax.Array, largest: jax.Array, lse: jax.Array, block: Block) -> Partial:
        overflows = jnp.swapaxes(jnp.isinf(jnp.exp(largest)), 1, 2)[..., None]
        return super().counted(jnp.where(overflows, jnp.nan, out), largest, lse, block)


class MeanKeys(Dense):
    """`dk` of a key head is the mean over its query heads; `dv` is right."""

    def backward(self, block: Block, *arrays: Any) -> Gradients:
        found = super().backward(block, *arrays)
        return dataclasses.replace(found, dk=found.dk / block.group)


@dataclasses.dataclass(frozen=True)
class Break:
    """A fault, the kernel that has it, and whether it touches a case."""

    fault: str
    kernel: Dense
    touches: Callable[[Case], bool]
    caught_by: str = "`test_mixtures::test_many_options_at_once`"


def _half(case: Case) -> bool:
    return case.dtype != "float32"


def _rule(**changes: Any) -> Callable[[Block], Block]:
    return lambda block: dataclasses.replace(block, rule=dataclasses.replace(block.rule, **changes))


def _where(condition: Callable[[Block], bool], change: Callable[[Block], Block]) -> Changed:
    return Changed(lambda block: change(block) if condition(block) else block)


def _ids(change: Callable[[jax.Array], jax.Array]) -> Changed:
    def changed(block: Block) -> Block:
        if block.q_segments is None or block.kv_segments is None:
            return block
        return dataclasses.replace(block, q_segments=change(block.q_segments), kv_segments=change(block.kv_segments))

    return Changed(changed)


def _through(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x.astype(dtype).astype(jnp.int32)


def _narrow_positions(block: Block) -> Block:
    q, kv = (x.astype(jnp.int16).astype(jnp.int32) for x in (block.q_positions, block.kv_positions))
    return dataclasses.replace(block, q_positions=q, kv_positions=kv)


def _cut_head(size: Callable[[int], int]) -> Changed:
    def changed(block: Block) -> Block:
        head_dim = block.q.shape[-1]
        return dataclasses.replace(block, q=jnp.where(jnp.arange(head_dim) < size(head_dim), block.q, 0))

    return Changed(changed)


def _misread_window(block: Block) -> Block:
    left, right = block.rule.window or (0, 0)
    return _rule(window=(left or 0, right or 0))(block)


def _no_window(condition: Callable[[Block], bool]) -> Changed:
    return _where(condition, _rule(window=None))


BREAKS: Final = {
    "window-ignored-in-half": Break(
        "In half precision the window is ignored.",
        _no_window(lambda block: block.q.dtype != jnp.float32),
        lambda case: case.window is not None and _half(case),
    ),
    "window-lost-with-causal": Break(
        "With `causal` the window is ignored.",
        _no_window(lambda block: block.rule.causal),
        lambda case: case.window is not None and case.causal,
    ),
    "window-lost-with-groups": Break(
        "With grouped heads the window is ignored.",
        _no_window(lambda block: block.group > 1),
        lambda case: case.window is not None and case.heads > case.kv_heads,
    ),
    "window-lost-with-ids": Break(
        "With segment ids the window is ignored.",
        _no_window(lambda block: block.q_segments is not None),
        lambda case: case.window is not None and case.segments is not None,
    ),
    "open-window-misread": Break(
        "A side of a window that is `None` is taken for 0.",
        _where(lambda block: None in (block.rule.window or ()), _misread_window),
        lambda case: isinstance(case.window, tuple) and None in case.window,
    ),
    "causal-lost-with-window-and-ids": Break(
        "With a window and segment ids `causal` is ignored.",
        _where(lambda block: bool(block.rule.window) and block.q_segments is not None, _rule(causal=False)),
        lambda case: case.causal and case.window is not None and case.segments is not None and not case.chunk,
    ),
    "scale-ignored": Break(
        "`softmax_scale` is ignored.",
        Changed(lambda block: _rule(scale=block.q.shape[-1] ** -0.5)(block)),
        lambda case: case.scale is not None,
    ),
    "odd-head-size-cut": Break(
        "Of a head size that is no multiple of 8 the rest is left out.",
        _cut_head(lambda size: size // 8 * 8),
        lambda case: case.head_dim % 8 > 0,
    ),
    "large-head-size-cut": Break(
        "Of a head size above 128 the rest is left out.",
        _cut_head(lambda size: 128),
        lambda case: case.head_dim > 128,
    ),
    "ids-of-8-bits": Break(
        "Segment ids have 8 bits.", _ids(_through(jnp.int8)), lambda case: case.segments is not None
    ),
    "ids-in-float32": Break(
        "Segment ids are compared in float32.", _ids(_through(jnp.float32)), lambda case: case.segments is not None
    ),
    "second-negative-id": Break(
        "Only the id -1 is padding.",
        _ids(lambda ids: jnp.where(ids < -1, 99, ids)),
        lambda case: case.segments is not None and case.lse,
    ),
    "ids-of-the-second-row": Break(
        "From the third row of the batch on, the ids are those of the second.",
        _ids(lambda ids: ids[jnp.minimum(jnp.arange(ids.shape[0]), 1)]),
        lambda case: case.segments is not None and case.batch > 2,
    ),
    "positions-of-16-bits": Break(
        "Positions have 16 bits.", Changed(_narrow_positions), lambda case: case.positions is not None
    ),
    "heads-mixed-up": Break(str(MixedUp.__doc__), MixedUp(), lambda case: case.heads > 4),
    "groups-interleaved": Break(
        str(Interleaved.__doc__), Interleaved(), lambda case: case.kv_heads > 2 and case.heads > case.kv_heads
    ),
    "mean-of-the-group-for-keys": Break(str(MeanKeys.__doc__), MeanKeys(), lambda case: case.heads > case.kv_heads),
    "scores-overflow-float16": Break(
        str(OverflowingScores.__doc__), OverflowingScores(), lambda case: case.dtype == "float16" and case.gain > 1000
    ),
    "derivatives-overflow-float16": Break(
        str(OverflowingDerivatives.__doc__),
        OverflowingDerivatives(),
        lambda case: case.cotangent_gain > 1,
        "`test_ring::test_outputs_and_gradients_are_those_of_the_oracle`",
    ),
    "doubled-at-precision": Break(
        str(DoubledAtPrecision.__doc__), DoubledAtPrecision(), lambda case: bool(case.precision)
    ),
    "no-maximum": Break(str(NoMaximum.__doc__), NoMaximum(), lambda case: case.gain == 40 and not case.soft_cap),
}
