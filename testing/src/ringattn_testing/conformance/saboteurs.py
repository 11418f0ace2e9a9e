# SPDX-License-Identifier: Apache-2.0
"""Backends that each have one known fault, and the tests of the suite that must catch it.

`-p ringattn_testing.conformance.saboteurs` registers all of them in a pytest process, and the correct backends that
they are made of.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import pytest
from ringattn_conformance import tiers
from ringattn_conformance.cases import ENTRIES
from ringattn_conformance.lattice import Point, drawn, points
from ringattn_core import Backend, Feature
from ringattn_core.backends.discovery import registered

from ringattn_testing.conformance import broken_kernels as broken
from ringattn_testing.conformance.broken_kernels import BACKWARD, FORWARD, Broken, Regathered, but, narrow
from ringattn_testing.conformance.reference_kernels import Dense, Flash, Gathering, Tiled


@dataclasses.dataclass(frozen=True)
class Sabotage:
    """A broken kernel, the tests of the suite that catch it, and one that it passes: it is broken in one way only."""

    kernel: Any
    caught_by: tuple[str, ...]
    passes: str


_ORACLE: Final = "test_ring::test_outputs_and_gradients_are_those_of_the_oracle"


def _point(name: str) -> str:
    """The test of a named case, in its place of the full tier."""
    (point,) = (str(one) for one in points() if one.case.name == name and tiers.contains(tiers.FULL, one.tier))
    return f"{_ORACLE}[{{}}-{point}]"


def _mixture(chosen: Callable[[Point], Any]) -> str:
    """The test of the first call of the design in the core tier that is chosen."""
    every = (one for one in drawn(ENTRIES["design"], frozenset(Feature)) if one.tier == tiers.CORE)
    return f"{_ORACLE}[{{}}-{next(filter(chosen, every))}]"


_BLOCK: Final = "test_block::test_two_blocks_in_a_row_give_the_oracle_s_output_and_gradients[{}-%s]"
_FROM_SINKS: Final = "test_block::test_a_kernel_begins_from_the_log_sum_exp_of_sinks[{}-%s]"
_RMS: Final = "test_numerics::test_the_error_of_a_ring_of_eight_in_half_precision_is_that_of_one_device[{}-bfloat16]"
_NAN: Final = "test_numerics::test_a_non_finite_value_reaches_every_row_that_sees_it[{}-%s]"
_LOW: Final = "test_numerics::test_a_bias_below_minus_100000_forbids_as_minus_infinity_does[{}-%s]"
_PADDING: Final = "test_numerics::test_what_padding_holds_harms_nobody[{}-%s]"
_OFFSET: Final = "test_inference::test_an_offset_places_queries_in_a_longer_sequence[{}-%s]"
_PREFILL: Final = "test_inference::test_prefill_that_sends_the_queries[{}-plain]"
_DECODE: Final = "test_inference::test_decoding_from_a_cache[{}-%s]"
_MESH: Final = "test_transforms::test_a_mesh_that_splits_batch_and_heads_too[{}-ring2-contiguous-data2-heads2]"
_VMAP: Final = "test_transforms::test_one_more_axis_by_vmap[{}-vmap-of-grad]"
_SCAN: Final = "test_transforms::test_a_scan_over_layers_is_the_layers_one_by_one[{}-sinks]"
_WIDE: Final = "test_numerics::test_with_numbers_of_64_bits_enabled_nothing_changes[{}-dropout]"
_IN_TURN: Final = "test_sequences::test_a_call_with_one_option_changed_and_then_the_first_again[{}-core]"
_WELL_FORMED: Final = "test_protocol::test_what_is_registered_is_well_formed[{}]"
_INERT: Final = "test_protocol::test_importing_the_descriptor_imports_no_kernel_and_touches_no_device[{}]"
_PLAIN: Final = _point("causal")
_ON_ONE_RANK: Final = _mixture(lambda one: one.case.changes and one.placement.ring == 1)
_DROPOUT: Final = _mixture(lambda one: one.case.dropout and one.placement.ring > 1 and one.case.dtype == "float32")
_HALF_DROPOUT: Final = _mixture(lambda one: one.case.dropout and one.case.dtype != "float32")

SABOTEURS: Final[dict[str, Sabotage]] = {
    "causal-lost-under-grad": Sabotage(
        Broken("The backward pass forgets the last key that a query sees.",
               lambda block: but(block, last=None), BACKWARD),
        (_PLAIN,), _DECODE % "3-plain",
    ),
    "stale-keys": Sabotage(
        Regathered("At the second hop a rank still works on the keys of the first.", broken.stale_keys),
        (_point("gqa"),), _ON_ONE_RANK,
    ),
    "lse-in-log2": Sabotage(
        Regathered("The lse comes back as a logarithm to base 2.", finish=lambda out, lse: (out, lse / jnp.log(2.0))),
        (_point("segments-padding"),), _PLAIN,
    ),
    "max-logits-of-the-last-hop": Sabotage(
        Broken("`max_logits` are those of the last hop alone.",
               partial=lambda block, right: but(right, max_logits=Dense().forward(block, None).max_logits)),
        (_point("max-logits"),), _PLAIN,
    ),
    "lse-in-bfloat16": Sabotage(
        Broken("The lse is bfloat16 from hop to hop.",
               partial=lambda block, right: but(right, lse=narrow(right.lse))),
        (_PLAIN,), _SCAN,
    ),
    "out-rounded-at-every-hop": Sabotage(
        Broken("The partial output is rounded to the input's dtype at every hop.",
               partial=lambda block, right: but(right, out=narrow(right.out, block.q.dtype))),
        (_RMS,), _PLAIN,
    ),
    "dk-dv-swapped": Sabotage(
        Broken("dk and dv change places.", gradients=broken.swapped), (_PLAIN,), _DECODE % "3-plain"
    ),
    "sinks-at-every-hop": Sabotage(
        Regathered("The sinks enter the denominator once a hop.", broken.sinks_at_every_hop),
        (_point("sinks"),), _PLAIN,
    ),
    "sinks-are-nothing": Sabotage(
        broken.BegunElsewhere("A partial result without output is taken for none at all.", lambda sinks: None),
        (_FROM_SINKS % "float32", _point("sinks")), _PLAIN,
    ),
    "every-sink-is-zero": Sabotage(
        broken.BegunElsewhere("The lse of a partial result without output is not read.",
                              lambda sinks: but(sinks, lse=jnp.zeros_like(sinks.lse))),
        (_FROM_SINKS % "bfloat16", _point("sinks")), _PLAIN,
    ),
    "gradients-summed-in-half": Sabotage(
        broken.GradientsSummedInHalf("JAX sums the gradients of keys from tiles of queries in the dtype of the keys."),
        (_RMS,), _PLAIN,
    ),
    "segments-not-rotated": Sabotage(
        Regathered("Keys of all ranks are judged by the ids of the own shard.", broken.segments_not_rotated),
        (_point("segments"),), _PLAIN,
    ),
    "mean-over-the-group": Sabotage(
        Broken("dk and dv of a key head are the mean over its query heads, not the sum.",
               gradients=lambda block, right: but(right, dk=right.dk / block.group, dv=right.dv / block.group)),
        (_point("gqa"),), _PLAIN,
    ),
    "nan-in-empty-rows": Sabotage(
        Broken("A row that sees nothing is 0 divided by 0.", partial=broken.nan_in_empty_rows),
        (_point("segments-unseen-queries"),), _PLAIN,
    ),
    "padding-sees-padding": Sabotage(
        Broken("Padding sees padding: a negative id is an id like any other.", broken.padding_seen),
        (_PADDING % "garbage",), _PLAIN,
    ),
    "low-bias-is-a-number": Sabotage(
        Broken("A bias forbids only where it is -inf, so rows of nothing but -1e9 weigh their keys.",
               broken.low_bias_is_a_number),
        (_LOW % "rows-ring1",), _PLAIN,
    ),
    "first-key-exclusive": Sabotage(
        Broken("The first key that a query sees is exclusive.",
               lambda block: broken.seen(block, first=broken.by(1))),
        (_point("window"), _point("range-spans")), _PLAIN,
    ),
    "last-key-exclusive": Sabotage(
        Broken("The last key that a query sees is exclusive.",
               lambda block: broken.seen(block, last=broken.by(-1))),
        (_point("range-spans"), _point("range-gaps"), _point("range-heads")), _point("gqa"),
    ),
    "one-key-before-the-first": Sabotage(
        Broken("A query sees the key before the first, too.",
               lambda block: broken.seen(block, first=broken.by(-1))),
        (_point("range-spans"), _point("range-gaps"), _point("range-heads")), _PLAIN,
    ),
    "one-key-after-the-last": Sabotage(
        Broken("A query sees the key after the last, too.",
               lambda block: broken.seen(block, last=broken.by(1))),
        (_point("range-spans"), _point("range-gaps")), _point("gqa"),
    ),
    "range-of-the-first-row": Sabotage(
        Broken("All rows of the batch see what the first sees.",
               lambda block: broken.seen(block, broken.one_for_all(0), broken.one_for_all(0))),
        (_point("range-gaps"), _OFFSET % "ranges"), _point("range-spans"),
    ),
    "range-of-the-first-head": Sabotage(
        Broken("All heads see what the first sees.",
               lambda block: broken.seen(block, broken.one_for_all(1), broken.one_for_all(1))),
        (_point("range-heads"), _MESH), _point("range-gaps"),
    ),
    "range-by-key-head": Sabotage(
        Broken("All heads of a group see what the first of the group sees.", broken.range_by_key_head),
        (_point("range-heads"),), _point("range-gaps"),
    ),
    "range-of-the-next-query": Sabotage(
        Broken("A query sees what the query after it sees.",
               lambda block: broken.seen(block, lambda x: jnp.roll(x, -1, 2), lambda x: jnp.roll(x, -1, 2))),
        (_point("range-spans"),), _point("gqa"),
    ),
    "empty-ranges-see-everything": Sabotage(
        Broken("A query with an empty range sees every key.", broken.empty_seen),
        (_point("range-gaps"), _DECODE % "3-ranges"), _point("range-spans"),
    ),
    "ranges-lost-on-hop-1": Sabotage(
        Broken("Ranges that are known at run time hold for the rank's own keys only.", broken.ranges_of_own_keys),
        (_point("range-spans"), _point("range-gaps"), _point("range-heads")), _PLAIN,
    ),
    "ranges-clipped-to-the-shard": Sabotage(
        Broken("Ranges end where the shard of the queries ends.", broken.clipped_to_the_shard),
        (_point("range-spans"),), _PLAIN,
    ),
    "bits-of-the-first-head": Sabotage(
        Broken("All heads have the bits of the first.", broken.bits_of_the_first_head),
        (_point("mask-of-heads"),), _PLAIN,
    ),
    "bits-by-key-head": Sabotage(
        Broken("All heads of a group have the bits of the first of the group.", broken.bits_by_key_head),
        (_point("mask-of-heads"),), _PLAIN,
    ),
    "chosen-blocks-one-off": Sabotage(
        Broken("A query sees the block after each that it chose.", broken.bits_of_the_block_before),
        (_point("selected-keys"), _point("selected-blocks")), _point("causal"),
    ),
    "chosen-blocks-of-the-next-group": Sabotage(
        Broken("The heads of a group see what the next group chose.", broken.bits_of_the_next_set),
        (_point("selected-of-others"),), _point("selected-keys"),
    ),
    "choice-lost-under-grad": Sabotage(
        Broken("The backward pass forgets which blocks were chosen.",
               lambda block: but(block, bits=None, bits_of_head=None, grain=1), BACKWARD),
        (_point("selected-keys"), _point("selected-64")), _point("causal"),
    ),
    "tiles-by-the-first-head": Sabotage(
        broken.TilesOfTheFirstHead("Tiles that the first head does not see are skipped for all heads."),
        (_point("range-heads"),), _point("range-gaps"),
    ),
    "positions-restart": Sabotage(
        Regathered("Positions count from 0 on every shard.", broken.positions_restart), (_PLAIN,), _point("gqa")
    ),
    "dropout-by-local-index": Sabotage(
        Broken("Dropout counts queries from the start of the shard.", broken.local_dropout), (_DROPOUT,), _ON_ONE_RANK
    ),
    "other-dropout-in-half": Sabotage(
        Broken("Dropout draws other bits for narrow numbers.", broken.other_dropout_in_half),
        (_HALF_DROPOUT,), _DROPOUT,
    ),
    "other-dropout-under-x64": Sabotage(
        Broken("With numbers of 64 bits dropout draws other bits.", broken.other_dropout_under_x64),
        (_WIDE,), _PLAIN,
    ),
    "dropout-of-the-first-call": Sabotage(
        broken.KeptUnderTooShortAKey("The key of a kept kernel lacks the probability of dropout."),
        (_IN_TURN,), _PLAIN,
    ),
    "bias-gradient-dropped": Sabotage(
        Broken("The bias has no gradient.", gradients=broken.no_bias_gradient), (_point("bias"),), _PLAIN
    ),
    "fixed-bias-forgotten": Sabotage(
        Broken("The backward pass forgets a bias that is not differentiated.",
               lambda block: but(block, bias=None) if block.bias_fixed else block, BACKWARD),
        (_point("bias-fixed"),), _PLAIN,
    ),
    "hash-of-the-moment": Sabotage(
        broken.HashOfTheMoment("The hash of the kernel changes at every call, so that everything is compiled anew."),
        (_WELL_FORMED,), _INERT,
    ),
    "last-hop-missing": Sabotage(
        Regathered("The keys of the next rank, which arrive last, are never seen.", broken.last_hop_missing),
        (_point("gqa"),), _ON_ONE_RANK,
    ),
    "nan-hidden": Sabotage(
        Broken("NaN in keys and values counts as zero.",
               lambda block: but(block, kv=jax.tree.map(jnp.nan_to_num, block.kv)), FORWARD),
        (_NAN % "k-nan",), _PLAIN,
    ),
    "soft-cap-ignored": Sabotage(
        Broken("The soft cap is ignored, silently.", broken.with_rule(logits_soft_cap=None), FORWARD),
        (_point("soft-cap"),), _PLAIN,
    ),
    "positions-of-the-first-row": Sabotage(
        Broken("All batch rows have the positions of the first.",
               lambda block: broken.seen(block, lambda x: x[:1], lambda x: x[:1])),
        (_OFFSET % "plain",), _PLAIN,
    ),
    "at-most-as-many-queries": Sabotage(
        Broken("Queries beyond the number of keys see no key.", partial=broken.nothing_beyond_the_number_of_keys),
        (_PREFILL,), _PLAIN,
    ),
    "one-query-after-another": Sabotage(
        Broken("Every query is one position after the query before it.", broken.one_query_after_another, FORWARD),
        (_DECODE % "3-plain",), _DECODE % "1-heads-alike",
    ),
    "dq-rounded-at-every-hop": Sabotage(
        Broken("dq is rounded to the input's dtype at every hop.",
               gradients=lambda block, right: but(right, dq=narrow(right.dq, block.q.dtype))),
        (_BLOCK % "one-query-bfloat16",), _PLAIN,
    ),
    "masked-by-a-low-number": Sabotage(
        broken.MaskedByALowNumber("In half precision the scores of masked keys are -10000."),
        (_LOW % "rows-ring2",), _PLAIN,
    ),
    "dropout-by-local-head": Sabotage(
        Broken("Where the mesh splits the heads, dropout counts them from 0 on.",
               lambda block: but(block, head_index=jnp.arange(block.q.shape[2], dtype=jnp.int32))),
        (_MESH,), _PLAIN,
    ),
    "seed-of-the-first-row": Sabotage(
        Broken("All rows of the batch have the dropout seed of the first.", broken.seed_of_the_first_row),
        (_VMAP,), _PLAIN,
    ),
    "slopes-of-the-first-row": Sabotage(
        Broken("All rows of the batch have the slopes of the first.", broken.slopes_of_the_first_row),
        (_VMAP,), _PLAIN,
    ),
    "products-in-bfloat16": Sabotage(
        Broken("Products of float32 are made in bfloat16.",
               lambda block: but(block, q=narrow(block.q), kv=jax.tree.map(narrow, block.kv)), FORWARD),
        (_PLAIN,), _SCAN,
    ),
    "flash-sees-no-last-key": Sabotage(
        Flash("A fused attention takes the last key for exclusive.", lambda first, last, keys: (first, last - 1)),
        (_point("window"), _point("range-heads"), _point("segments")), _WELL_FORMED,
    ),
    "flash-sees-all-before-the-last": Sabotage(
        Flash("A fused attention ignores the first key.", lambda first, last, keys: (0 * first, last)),
        (_point("window"), _point("range-spans"), _point("segments")), _PLAIN,
    ),
}  # fmt: skip
REFERENCES: Final = {
    "reference-dense": Dense(), "reference-tiled": Tiled(), "reference-flash": Flash(),
    "reference-gathering": Gathering(),
}  # fmt: skip


def backend_of(name: str, kernel: Any) -> Backend:
    here = f"{__name__}:SABOTEURS"
    if isinstance(kernel, Dense):
        return Backend(name, 1, ("cpu",), frozenset(Feature), kernel=here)
    if isinstance(kernel, Flash):
        return Backend(name, 1, ("cpu",), kernel.features, kernel=here)
    return Backend(
        name, 1, ("cpu",), frozenset(Feature) - {Feature.MAX_LOGITS, Feature.KEY_RANGE, Feature.SELECTED}, ring=here
    )


def pytest_configure(config: pytest.Config) -> None:
    stack = contextlib.ExitStack()
    kernels = REFERENCES | {name: sabotage.kernel for name, sabotage in SABOTEURS.items()}
    for name, kernel in kernels.items():
        stack.enter_context(registered(backend_of(name, kernel), kernel))
    config.add_cleanup(stack.close)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line for each verdict, for the process that asks."""
    if report.when == "call":
        print(f"\nVERDICT {report.outcome} {report.nodeid.rpartition('/')[2]}")
