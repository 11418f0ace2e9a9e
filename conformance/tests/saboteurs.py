# SPDX-License-Identifier: Apache-2.0
"""Backends that each have one known fault, and the tests of the suite that must catch it.

`-p saboteurs` registers all of them in a pytest process, and the two correct backends that they are made of.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Final

import broken_kernels as broken
import pytest
from reference_kernels import Dense, Gathering
from ringattn_conformance import tiers
from ringattn_conformance.lattice import Point, mixtures, points
from ringattn_core import Backend, Feature
from ringattn_core.backends.discovery import registered


@dataclasses.dataclass(frozen=True)
class Sabotage:
    """A broken kernel, the tests of the suite that catch it, and one that it passes: it is broken in one way only."""

    kernel: Any
    caught_by: tuple[str, ...]
    passes: str

    @property
    def fault(self) -> str:
        return (type(self.kernel).__doc__ or "").strip()


_ORACLE: Final = "test_ring::test_outputs_and_gradients_are_those_of_the_oracle"


def _point(name: str) -> str:
    """The test of a named case, in its place of the full tier."""
    (point,) = (str(one) for one in points() if one.case.name == name and tiers.contains(tiers.FULL, one.tier))
    return f"{_ORACLE}[{{}}-{point}]"


def _mixture(chosen: Callable[[Point], Any]) -> str:
    """The test of the first mixture of the core tier that is chosen."""
    every = (one for one in mixtures(frozenset(Feature)) if one.tier == tiers.CORE)
    return f"{_ORACLE}[{{}}-{next(filter(chosen, every))}]"


_BLOCK: Final = "test_block::test_two_blocks_in_a_row_give_the_oracle_s_output_and_gradients[{}-%s]"
_RMS: Final = "test_numerics::test_the_error_of_a_ring_of_eight_in_half_precision_is_that_of_one_device[{}-bfloat16]"
_NAN: Final = "test_numerics::test_a_non_finite_value_reaches_every_row_that_sees_it[{}-%s]"
_LOW: Final = "test_numerics::test_a_bias_below_minus_100000_forbids_as_minus_infinity_does[{}-%s]"
_PADDING: Final = "test_numerics::test_what_padding_holds_harms_nobody[{}-%s]"
_OFFSET: Final = "test_inference::test_an_offset_places_queries_in_a_longer_sequence[{}-plain]"
_PREFILL: Final = "test_inference::test_prefill_that_sends_the_queries[{}-plain]"
_DECODE: Final = "test_inference::test_decoding_from_a_cache[{}-%s]"
_MESH: Final = "test_transforms::test_a_mesh_that_splits_batch_and_heads_too[{}-ring2-contiguous-data2-heads2]"
_VMAP: Final = "test_transforms::test_one_more_axis_by_vmap[{}-vmap-of-grad]"
_SCAN: Final = "test_transforms::test_a_scan_over_layers_is_the_layers_one_by_one[{}]"
_WELL_FORMED: Final = "test_protocol::test_what_is_registered_is_well_formed[{}]"
_INERT: Final = "test_protocol::test_importing_the_descriptor_imports_no_kernel_and_touches_no_device[{}]"
_PLAIN: Final = _point("causal")
_ON_ONE_RANK: Final = _mixture(lambda one: one.placement.ring == 1)
_DROPOUT: Final = _mixture(lambda one: one.case.dropout and one.placement.ring > 1)
_HALF_DROPOUT: Final = _mixture(lambda one: one.case.dropout and one.case.dtype != "float32")

SABOTEURS: Final[dict[str, Sabotage]] = {
    "causal-lost-under-grad": Sabotage(broken.CausalLostUnderGrad(), (_PLAIN,), _DECODE % "3-plain"),
    "stale-keys": Sabotage(broken.StaleKeys(), (_point("gqa"),), _ON_ONE_RANK),
    "lse-in-log2": Sabotage(broken.LogTwo(), (_point("segments-padding"),), _PLAIN),
    "max-logits-of-the-last-hop": Sabotage(broken.MaxLogitsOfTheLastHop(), (_point("max-logits"),), _PLAIN),
    "lse-in-bfloat16": Sabotage(broken.NarrowLse(), (_PLAIN,), _SCAN),
    "out-rounded-at-every-hop": Sabotage(broken.NarrowOut(), (_RMS,), _PLAIN),
    "dk-dv-swapped": Sabotage(broken.Swapped(), (_PLAIN,), _DECODE % "3-plain"),
    "sinks-at-every-hop": Sabotage(broken.SinksEveryHop(), (_point("sinks"),), _PLAIN),
    "gradients-summed-in-half": Sabotage(broken.GradientsSummedInHalf(), (_RMS,), _PLAIN),
    "segments-not-rotated": Sabotage(broken.SegmentsNotRotated(), (_point("segments"),), _PLAIN),
    "mean-over-the-group": Sabotage(broken.MeanOfGroup(), (_point("gqa"),), _PLAIN),
    "nan-in-empty-rows": Sabotage(broken.NanInEmptyRows(), (_point("segments-unseen-queries"),), _PLAIN),
    "padding-sees-padding": Sabotage(broken.PaddingSeen(), (_PADDING % "garbage",), _PLAIN),
    "low-bias-is-a-number": Sabotage(broken.LowBiasIsANumber(), (_LOW % "rows-ring1",), _PLAIN),
    "window-off-by-one": Sabotage(broken.WindowOffByOne(), (_point("window"),), _PLAIN),
    "positions-restart": Sabotage(broken.PositionsRestart(), (_PLAIN,), _point("gqa")),
    "dropout-by-local-index": Sabotage(broken.LocalDropout(), (_DROPOUT,), _ON_ONE_RANK),
    "other-dropout-in-half": Sabotage(broken.OtherDropoutInHalf(), (_HALF_DROPOUT,), _DROPOUT),
    "bias-gradient-dropped": Sabotage(broken.BiasGradientDropped(), (_point("bias"),), _PLAIN),
    "fixed-bias-forgotten": Sabotage(broken.FixedBiasForgotten(), (_point("bias-fixed"),), _PLAIN),
    "hash-of-the-moment": Sabotage(broken.HashOfTheMoment(), (_WELL_FORMED,), _INERT),
    "last-hop-missing": Sabotage(broken.LastHopMissing(), (_point("gqa"),), _ON_ONE_RANK),
    "nan-hidden": Sabotage(broken.NanHidden(), (_NAN % "k-nan",), _PLAIN),
    "soft-cap-ignored": Sabotage(broken.SoftCapIgnored(), (_point("soft-cap"),), _PLAIN),
    "positions-of-the-first-row": Sabotage(broken.PositionsOfTheFirstRow(), (_OFFSET,), _PLAIN),
    "at-most-as-many-queries": Sabotage(broken.AtMostAsManyQueries(), (_PREFILL,), _PLAIN),
    "one-query-after-another": Sabotage(
        broken.OneQueryAfterAnother(), (_DECODE % "3-plain",), _DECODE % "1-heads-alike"
    ),
    "dq-rounded-at-every-hop": Sabotage(broken.NarrowDq(), (_BLOCK % "one-query-bfloat16",), _PLAIN),
    "masked-by-a-low-number": Sabotage(broken.MaskedByALowNumber(), (_LOW % "rows-ring2",), _PLAIN),
    "builder-by-local-head": Sabotage(broken.BuilderByLocalHead(), (_MESH,), _PLAIN),
    "seed-of-the-first-row": Sabotage(broken.SeedOfTheFirstRow(), (_VMAP,), _PLAIN),
    "products-in-bfloat16": Sabotage(broken.HalfPrecisionProducts(), (_PLAIN,), _SCAN),
}
REFERENCES: Final = {"reference-dense": Dense(), "reference-gathering": Gathering()}


def backend_of(name: str, kernel: Any) -> Backend:
    if isinstance(kernel, Dense):
        return Backend(name, 1, ("cpu",), frozenset(Feature), kernel="saboteurs:SABOTEURS")
    return Backend(name, 1, ("cpu",), frozenset(Feature) - {Feature.MAX_LOGITS}, ring="saboteurs:SABOTEURS")


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
