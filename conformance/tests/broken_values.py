# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false, reportGeneralTypeIssues=false
"""Kernels that are wrong for some values of an option or of a size only: for each row of the domains, some."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from breaks import changed, masked, wrong_in
from broken_masks import first_keys
from broken_numbers import cut, of_bias, of_gradients, of_kept, of_results
from numpy_ring import Block, Dense, coordinates, finite
from ringattn_conformance.cases import DTYPES, Case

When = Callable[[Case], Any]


@dataclasses.dataclass(frozen=True)
class Values:
    """A fault, the calls that have it, and the kernel; `core` says whether the core tier catches it."""

    fault: str
    when: When
    kernel: Dense
    core: bool = True


def of(fault: str, when: When, make: Callable[..., Dense], *given: Any, core: bool = True, **fields: Any) -> Values:
    """A kernel made by `make(..., condition, ...)` that is wrong where `when` holds for the case."""

    def condition(block: Block) -> bool:
        return bool(when(block.case))

    first = (condition, *given) if make is changed else (*given, condition)
    return Values(fault, when, make(*first, **fields), core)


def with_fields(fault: str, when: When, core: bool = True, **fields: Any) -> Values:
    return of(fault, when, changed, core=core, **fields)


def without_mask(name: str, fault: str, when: When, core: bool = True) -> Values:
    return of(fault, when, masked, name, lambda block, right: np.ones((1, 1, 1, 1), bool), core=core)


def with_heads(fault: str, group: int, core: bool = True) -> Values:
    """With groups of this size, query heads read key heads by turns."""

    def wrong(right: Any, block: Block, x: np.ndarray) -> np.ndarray:
        if block.group != group:
            return right(block, x)
        heads = np.arange(block.q.shape[2])
        return x[:, :, (heads + 1) // group % x.shape[2]] if x.shape[2] > 1 else np.where(heads[:, None] % 2, 0, x)

    return Values(fault, lambda case: case.heads == group * case.kv_heads, wrong_in("of_heads", wrong), core)


def sides(case: Case) -> tuple[Any, Any]:
    return case.window if isinstance(case.window, tuple) else (case.window, case.window)


def at_most(most: int) -> Callable[[Block], Any]:
    return lambda block: (min(block.window[0], most), block.window[1])


def wrapped_window(block: Block, right: np.ndarray) -> np.ndarray:
    """The window as int32 has it if `i - left` is computed."""
    (left, bound), (i, j) = block.window, coordinates(block)
    lowest = (i - left).astype(np.int64).astype(np.int32)
    return (j >= lowest) & (j <= i + (2**40 if bound is None else bound))


def tanh_in_half(right: Any, block: Block, backward: bool = False) -> Any:
    if not block.soft_cap or not block.half:
        return right(block, backward)
    bare = dataclasses.replace(block, soft_cap=None, bias=None, slopes=None)
    s, _ = Dense().scores(bare)
    off = np.tanh(finite(s) / block.soft_cap)
    rounded = off.astype(DTYPES[block.case.dtype]).astype(float)
    found, slope = right(block, backward)
    return found + block.soft_cap * (rounded - off), slope


def large(least: float, most: float = np.inf) -> When:
    return lambda case: case.soft_cap and least <= case.soft_cap <= most


def one_query(**options: Any) -> When:
    def when(case: Case) -> bool:
        given = all(getattr(case, name) not in (None, False, 0.0) for name in options)
        return case.q_length == 1 and case.kv_length > 1 and given

    return when


def rounded_bias(block: Block) -> Any:
    return block.bias.astype(DTYPES[block.case.dtype]).astype(float)


def bias_of_float32(case: Case) -> bool:
    return case.bias is not None and case.bias_dtype == "float32" and case.dtype != "float32"


def ids(change: Callable[[np.ndarray], np.ndarray]) -> dict[str, Callable[[Block], Any]]:
    return {"q_ids": lambda block: change(block.q_ids), "kv_ids": lambda block: change(block.kv_ids)}


def edge(case: Case) -> bool:
    return case.segments == "edge-ids"


def kept_by(bits: int) -> Callable[[Any, Block], Any]:
    """The draws of dropout by indices of so many bits."""

    def change(kept: Any, block: Block) -> Any:
        return kept[:, :, np.arange(kept.shape[2]) % 2**bits][..., np.arange(kept.shape[3]) % 2**bits]

    return change


def longer(least: int) -> When:
    return lambda case: case.dropout and max(case.q_length, case.kv_length) > least


def zero_from(axis: int, size: int) -> Callable[[Block, Any, Any], Any]:
    return lambda block, out, lse: (np.moveaxis(cut(np.moveaxis(out, axis, -1), size), -1, axis), lse)


def dk_without_the_last_query(right: Any, block: Block, *arrays: Any) -> Any:
    found = right(block, *arrays)
    if block.q_index.size % 16 == 1:
        last = block.but(
            **{"q_index": block.q_index[-1:], "q": block.q[:, -1:], "q_positions": block.q_positions[:, -1:]}
        )
        for name in ("q_ids", "bias", "mask", "built", "kept"):
            x, axis = getattr(block, name), 1 if name == "q_ids" else 2
            if x is not None and x.shape[axis] > 1:
                last = last.but(**{name: np.take(x, [-1], axis)})
        dout, lse, delta, _ = arrays
        found["dk"] = found["dk"] - right(last, dout[:, -1:], lse[:, :, -1:], delta[:, :, -1:], None)["dk"]
    return found


def without_bias(right: Any, block: Block, *arrays: Any) -> Any:
    return right(block.but(bias=0 * finite(block.bias)) if block.case.bias_fixed and block.bias is not None else block,
                 *arrays)  # fmt: skip


def divided_by_a_fifth(right: Any, block: Block, backward: bool) -> Any:
    return right(block, backward) * (1 - block.dropout) / 0.2 if block.kept is not None else 1.0


def in_half(dtype: str, when: When) -> When:
    return lambda case: case.dtype == dtype and when(case)


def without_low_rows(block: Block, out: np.ndarray, lse: np.ndarray) -> Any:
    low = lse < -1e4
    return np.where(np.swapaxes(low, 1, 2)[..., None], 0, out), np.where(low, -np.inf, lse)


def without_sinks(right: Any, block: Block, dout: np.ndarray, lse: np.ndarray, *rest: Any) -> Any:
    return right(block, dout, Dense().lse(block, Dense().scores(block)[0]), *rest)


def doubled(block: Block, out: np.ndarray, lse: np.ndarray) -> Any:
    return 2 * out, lse


VALUES: Final = {
    "soft-cap-above-20-ignored": with_fields("A soft cap above 20 is ignored.", large(21), soft_cap=lambda block: None),
    "soft-cap-above-200-ignored": with_fields("A soft cap above 200 is ignored.", large(201),
                                              soft_cap=lambda block: None, core=False),
    "soft-cap-below-1-is-1": with_fields("A soft cap below 1 is taken for 1.", large(0, 0.9),
                                         soft_cap=lambda block: 1.0),
    "tanh-in-half": Values("In half precision the tanh of the soft cap is rounded.",
                           lambda case: case.soft_cap and case.dtype != "float32", wrong_in("scores", tanh_in_half),
                           core=False),
    "chunk-above-64-is-64": with_fields("A chunk above 64 is taken for 64.",
                                        lambda case: case.chunk and case.chunk > 64, chunk=lambda block: 64),
    "chunk-above-200-is-200": with_fields("A chunk above 200 is taken for 200.", lambda case: case.chunk
                                          and case.chunk > 200, chunk=lambda block: 200, core=False),
    "left-side-above-100-is-100": with_fields("A left side of a window above 100 is taken for 100.",
                                              lambda case: (sides(case)[0] or 0) > 100, window=at_most(100)),
    "left-side-above-256-is-256": with_fields("A left side of a window above 256 is taken for 256.", lambda case: (
        sides(case)[0] or 0) > 256, window=at_most(256), core=False),
    "left-side-in-int32": of("The left end of a window is computed as `i - left` in int32.",
                             lambda case: sides(case)[0] is not None, masked, "window", wrapped_window, core=False),
    "dropout-above-half-ignored": with_fields("A dropout of a half or more is ignored.",
                                              lambda case: case.dropout >= 0.5, kept=lambda block: None),
    "dropout-above-0.8-is-0.8": Values("What a dropout above 0.8 keeps is divided by 0.2.",
                                       lambda case: case.dropout > 0.8, wrong_in("keep", divided_by_a_fifth)),
    "fifth-mask-is-the-first": of("From the fifth mask of a builder on, heads have the first.",
                                  lambda case: case.builder == "of-heads", masked, "built",
                                  lambda block, right: right[:, np.where(np.arange(right.shape[1]) % 7 > 3, 0,
                                                                         np.arange(right.shape[1]))], core=False),
    "heads-beyond-16": of("Query heads from the 17th on are zero.", lambda case: case.heads > 16, of_results,
                          zero_from(2, 16)),
    "heads-beyond-32": of("Query heads from the 33rd on are zero.", lambda case: case.heads > 32, of_results,
                          zero_from(2, 32), core=False),
    "key-heads-beyond-5": Values("`dv` of key heads from the sixth on is zero.", lambda case: case.kv_heads > 5,
                                 of_gradients("dv", lambda block, dv: cut(dv.swapaxes(2, 3), 5).swapaxes(2, 3))),
    **{f"groups-of-{size}-mixed-up": with_heads(f"Groups of {size} heads are mixed up.", size, core=size < 6)
       for size in (3, 6, 7, 9, 24)},
    "head-size-above-256-cut": with_fields("Of a head size above 256 the rest is left out.",
                                           lambda case: case.head_dim > 256, q=lambda block: cut(block.q, 256)),
    "small-values-cut": with_fields("Of values smaller than half of the keys' size the second half is zero.",
                                    lambda case: 2 * case.value_dim < case.head_dim and case.value_dim > 1,
                                    v=lambda block: cut(block.v, block.v.shape[-1] // 2)),
    "value-size-above-256-cut": with_fields("Of a value size above 256 the rest is zero.", lambda case: case.value_dim
                                            > 256, v=lambda block: cut(block.v, 256)),
    "rows-beyond-8": of("Rows of the batch from the ninth on are zero.", lambda case: case.batch > 8, of_results,
                        zero_from(0, 8)),
    "queries-beyond-1024": of("Queries from the 1025th on are zero.", lambda case: case.q_length > 1024, of_results,
                              zero_from(1, 1024), core=False),
    "keys-beyond-1024": Values("Keys from the 1025th on are not seen.", lambda case: case.kv_length > 1024,
                               first_keys(lambda length: min(length, 1024)), core=False),
    "keys-beyond-65536": Values("Keys from the 65,537th on are not seen.", lambda case: case.kv_length > 2**16,
                                first_keys(lambda length: min(length, 2**16))),
    "last-key-of-65": Values("The last key is lost if there are more than 64 and the rest is one.",
                             lambda case: case.kv_length > 64 and case.kv_length % 64 == 1,
                             first_keys(lambda length: length - (length > 64 and length % 64 == 1))),
    "dk-without-the-last-query": Values("`dk` is without the last query if the rest of a tile of 16 is one.",
                                        lambda case: case.q_length % 16 == 1 and not case.forward,
                                        wrong_in("backward", dk_without_the_last_query)),
    "one-query-without-bias": with_fields("A single query has no bias.", one_query(bias=1),
                                          bias=lambda block: 0 * finite(block.bias)),
    "one-query-without-mask": without_mask("mask", "A single query has no dense mask.", one_query(dense_mask=1),
                                           core=False),
    "one-query-without-builder": without_mask("built", "A single query has no mask of a builder.",
                                              one_query(builder=1), core=False),
    "one-query-without-dropout": with_fields("A single query drops nothing.", one_query(dropout=1),
                                             kept=lambda block: None, core=False),
    "one-query-not-causal": with_fields("A single query sees later keys.", one_query(causal=1),
                                        causal=lambda block: False),
    "one-query-without-a-window": without_mask("window", "A single query has no window.", one_query(window=1),
                                               core=False),
    "one-query-with-small-values": with_fields("Values of a single query are cut to the size of the keys.",
                                               lambda case: case.q_length == 1 and case.value_dim > case.head_dim,
                                               v=lambda block: cut(block.v, block.q.shape[-1]), core=False),
    "largest-id-is-none": with_fields("The id 2^31-1 is padding.", edge, core=False,
                                      **ids(lambda x: np.where(x == 2**31 - 1, -1, x))),
    "ids-below-100-seen": Values("Ids below -100 are no padding.", edge, wrong_in(
        "same", lambda right, block, q, kv: (q == kv) & ((q >= 0) | (q < -100))), core=False),
    "dropout-index-of-12-bits": of("Dropout counts 2^12 queries and keys.", longer(2**12), of_kept, kept_by(12),
                                   core=False),
    "dropout-index-of-16-bits": of("Dropout counts 2^16 queries and keys.", longer(2**16), of_kept, kept_by(16),
                                   core=False),
    "bias-rounded-to-the-queries": with_fields("A bias of float32 is rounded to the dtype of the queries.",
                                               bias_of_float32, bias=rounded_bias, core=False),
    "fixed-bias-forgotten": Values("The backward pass ignores a bias that is not differentiated.",
                                   lambda case: case.bias_fixed, wrong_in("backward", without_bias)),
    "doubled-at-high-precision": of('With `precision="high"` the output is doubled.', lambda case: case.precision
                                    == "high", of_results, doubled, core=False),
    "small-slopes-ignored": with_fields("ALiBi slopes below 1/64 are ignored.", lambda case: 0 < case.slopes < 0.02,
                                        slopes=lambda block: 0 * block.slopes),
    "small-scale-ignored": with_fields("A scale below 0.1 is taken for 0.", lambda case: 0 < (case.scale or 0) < 0.1,
                                       scale=lambda block: 0.0),
    "chunk-of-1-ignored": with_fields("A chunk of 1 is ignored.", lambda case: case.chunk == 1,
                                      chunk=lambda block: None, core=False),
    "chunk-above-1000-ignored": with_fields("A chunk above 1000 is ignored.", lambda case: (case.chunk or 0) > 1000,
                                            chunk=lambda block: None, core=False),
    "right-side-from-64-is-none": with_fields("A right side of a window from 64 on is open.", lambda case: (
        sides(case)[1] or 0) > 63, window=lambda block: (block.window[0], None), core=False),
    "dk-of-63-queries": of("`dk` is too small if the last tile of 64 lacks one query.", lambda case: not case.forward
                           and case.q_length % 64 == 63, of_gradients, "dk", lambda block, dk: 0.9 * dk, core=False),
    "dq-beyond-512": of("`dq` is zero from the 513th query on.", lambda case: not case.forward and case.q_length > 512,
                        of_gradients, "dq", lambda block, dq: cut(dq.swapaxes(1, 3), 512).swapaxes(1, 3), core=False),
    "last-of-127-keys-in-float16": Values("In float16 the last key is lost if a tile of 128 lacks one.", lambda case:
                                          case.kv_length % 128 == 127 and case.dtype == "float16",
                                          first_keys(lambda length: length - 1), core=False),
    "two-queries-alike": of("Of two queries the second has the output of the first.", lambda case: case.q_length == 2,
                            of_results, lambda block, out, lse: (np.repeat(out[:, :1], 2, 1), lse), core=False),
    "scores-below-10000-empty": of("A row whose scores are all below -10,000 sees no key.", lambda case:
                                   case.bias_offset < -1e4, of_results, without_low_rows, core=False),
    "bias-clipped-under-grad": with_fields("The backward pass takes a bias above 1000 for 1000.", lambda case:
                                           case.bias_offset > 1e3 and not case.forward, passes=("backward",),
                                           bias=lambda block: np.minimum(block.bias, 1e3), core=False),
    "bias-of-minus-infinity-lost": with_fields("A bias of -inf is 0.", lambda case: case.bias_forbids,
                                               bias=lambda block: finite(block.bias)),
    "positions-of-keys-of-the-first-row": with_fields(
        "All rows of the batch have the key positions of the first.",
        lambda case: (case.positions or "").endswith("-rows"), core=False,
        kv_positions=lambda block: np.broadcast_to(block.kv_positions[:1], block.kv_positions.shape)),
    "sinks-forgotten-under-grad": Values("The backward pass computes an lse without sinks.",
                                         lambda case: case.sinks and not case.forward,
                                         wrong_in("backward", without_sinks)),
    "dq-doubled-if-fused": of("With `fused_backward` `dq` is doubled.", lambda case: case.fused_backward
                              and not case.forward, of_gradients, "dq", lambda block, dq: 2 * dq),
    "lse-in-log2": of("The lse is a logarithm to base 2.", lambda case: case.lse, of_results,
                      lambda block, out, lse: (out, lse / np.log(2))),
    "one-query-not-causal-in-bfloat16": with_fields(
        "A single query in bfloat16 sees later keys.", in_half("bfloat16", one_query(causal=1)), core=False,
        causal=lambda block: False),
    "one-query-without-slopes-in-float16": with_fields(
        "A single query in float16 has no ALiBi.", in_half("float16", one_query(slopes=1)), core=False,
        slopes=lambda block: 0 * block.slopes),
    "one-query-drops-forward-only-in-float16": with_fields(
        "The backward pass of a single query in float16 drops nothing.", in_half("float16", one_query(dropout=1)),
        core=False, passes=("backward",), kept=lambda block: None),
    "one-query-without-dbias-in-bfloat16": of(
        "The bias of a single query in bfloat16 has no gradient.", in_half("bfloat16", one_query(bias=1)),
        of_bias, lambda block, ds: 0 * block.bias, core=False),
    "one-query-uncapped-in-bfloat16": with_fields(
        "A single query in bfloat16 has no soft cap.", in_half("bfloat16", one_query(soft_cap=1)), core=False,
        soft_cap=lambda block: None),
    "one-query-sees-all-ids-in-float16": with_fields(
        "A single query in float16 sees keys of other ids.", in_half("float16", one_query(segments=1)), core=False,
        q_ids=lambda block: None),
    "one-query-has-the-first-mask": of(
        "Every head of a single query has the mask of the first.", one_query(builder=1), masked, "built",
        lambda block, right: np.broadcast_to(right[:, :1], right.shape), core=False),
}  # fmt: skip
OF_ROWS: Final = {
    "dtype": "tanh-in-half", "lengths": "dk-of-63-queries", "heads": "heads-beyond-32", "batch": "rows-beyond-8",
    "head_dim": "head-size-above-256-cut", "value_dim": "small-values-cut", "causal": "one-query-not-causal",
    "window": "left-side-above-100-is-100", "chunk": "chunk-of-1-ignored", "segments": "largest-id-is-none",
    "positions": "positions-of-keys-of-the-first-row", "builder": "fifth-mask-is-the-first",
    "dense_mask": "one-query-without-mask", "soft_cap": "soft-cap-above-20-ignored", "scale": "small-scale-ignored",
    "bias": "one-query-without-bias", "sinks": "sinks-forgotten-under-grad", "slopes": "small-slopes-ignored",
    "dropout": "dropout-above-half-ignored", "precision": "doubled-at-high-precision", "lse": "lse-in-log2",
    "fused_backward": "dq-doubled-if-fused", "bias_dtype": "bias-rounded-to-the-queries",
    "bias_offset": "scores-below-10000-empty", "bias_forbids": "bias-of-minus-infinity-lost",
    "bias_fixed": "fixed-bias-forgotten",
}  # fmt: skip
"""A broken kernel for each row of `domains.json`."""
