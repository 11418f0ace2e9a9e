# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false, reportGeneralTypeIssues=false
"""Kernels that are wrong for some values of an option or of a size only: for each row of the domains, some."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from ringattn_conformance.cases import DTYPES, Case

from ringattn_testing.conformance.breaks import changed, masked, wrong_in
from ringattn_testing.conformance.broken_masks import first_keys
from ringattn_testing.conformance.broken_numbers import cut, of_bias, of_gradients, of_kept, of_results
from ringattn_testing.conformance.numpy_ring import Block, Dense, coordinates, finite

When = Callable[[Case], Any]


@dataclasses.dataclass(frozen=True)
class Values:
    """The calls that have a fault, and the kernel; `core` says whether the core tier catches it."""

    when: When
    kernel: Dense
    core: bool = True


def of(when: When, make: Callable[..., Dense], *given: Any, core: bool = True, **fields: Any) -> Values:
    """A kernel made by `make(..., condition, ...)` that is wrong where `when` holds for the case."""

    def condition(block: Block) -> bool:
        return bool(when(block.case))

    first = (condition, *given) if make is changed else (*given, condition)
    return Values(when, make(*first, **fields), core)


def with_fields(when: When, core: bool = True, **fields: Any) -> Values:
    return of(when, changed, core=core, **fields)


def without_mask(name: str, when: When, core: bool = True) -> Values:
    return of(when, masked, name, lambda block, right: np.ones((1, 1, 1, 1), bool), core=core)


def with_heads(group: int, core: bool = True) -> Values:
    """With groups of this size, query heads read key heads by turns."""

    def wrong(right: Any, block: Block, x: np.ndarray) -> np.ndarray:
        if block.group != group:
            return right(block, x)
        heads = np.arange(block.q.shape[2])
        return x[:, :, (heads + 1) // group % x.shape[2]] if x.shape[2] > 1 else np.where(heads[:, None] % 2, 0, x)

    return Values(lambda case: case.heads == group * case.kv_heads, wrong_in("of_heads", wrong), core)


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


def one_query(option: str) -> When:
    """The calls of a single query, among several keys, that have the option."""
    return lambda case: case.q_length == 1 < case.kv_length and getattr(case, option) not in (None, False, 0.0)


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
        for name in ("q_ids", "bias", "mask", "built", "kept", "first", "last"):
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
    "A soft cap above 20 is ignored": with_fields(large(21), soft_cap=lambda block: None),
    "A soft cap above 200 is ignored": with_fields(large(201), soft_cap=lambda block: None, core=False),
    "A soft cap below 1 is taken for 1": with_fields(large(0, 0.9), soft_cap=lambda block: 1.0),
    "In half precision the tanh of the soft cap is rounded": Values(
        lambda case: case.soft_cap and case.dtype != "float32", wrong_in("scores", tanh_in_half), core=False
    ),
    "A chunk above 64 is taken for 64": with_fields(
        lambda case: case.chunk and case.chunk > 64, chunk=lambda block: 64
    ),
    "A chunk above 200 is taken for 200": with_fields(
        lambda case: case.chunk and case.chunk > 200, chunk=lambda block: 200, core=False
    ),
    "A left side of a window above 100 is taken for 100": with_fields(
        lambda case: (sides(case)[0] or 0) > 100, window=at_most(100)
    ),
    "A left side of a window above 256 is taken for 256": with_fields(
        lambda case: (sides(case)[0] or 0) > 256, window=at_most(256), core=False
    ),
    "The left end of a window is computed as `i - left` in int32": of(
        lambda case: sides(case)[0] is not None, masked, "window", wrapped_window, core=False
    ),
    "A dropout of a half or more is ignored": with_fields(lambda case: case.dropout >= 0.5, kept=lambda block: None),
    "What a dropout above 0.8 keeps is divided by 0.2": Values(
        lambda case: case.dropout > 0.8, wrong_in("keep", divided_by_a_fifth)
    ),
    "From the fifth mask of a builder on, heads have the first": of(
        lambda case: case.builder == "of-heads",
        masked,
        "built",
        lambda block, right: right[:, np.where(np.arange(right.shape[1]) % 7 > 3, 0, np.arange(right.shape[1]))],
        core=False,
    ),
    "Query heads from the 17th on are zero": of(lambda case: case.heads > 16, of_results, zero_from(2, 16)),
    "Query heads from the 33rd on are zero": of(lambda case: case.heads > 32, of_results, zero_from(2, 32), core=False),
    "`dv` of key heads from the sixth on is zero": Values(
        lambda case: case.kv_heads > 5, of_gradients("dv", lambda block, dv: cut(dv.swapaxes(2, 3), 5).swapaxes(2, 3))
    ),
    **{f"Groups of {size} heads are mixed up": with_heads(size, core=size < 6) for size in (3, 6, 7, 9, 24)},
    "Of a head size above 256 the rest is left out": with_fields(
        lambda case: case.head_dim > 256, q=lambda block: cut(block.q, 256)
    ),
    "Of values smaller than half of the keys' size the second half is zero": with_fields(
        lambda case: 2 * case.value_dim < case.head_dim and case.value_dim > 1,
        v=lambda block: cut(block.v, block.v.shape[-1] // 2),
    ),
    "Of a value size above 256 the rest is zero": with_fields(
        lambda case: case.value_dim > 256, v=lambda block: cut(block.v, 256)
    ),
    "Rows of the batch from the ninth on are zero": of(lambda case: case.batch > 8, of_results, zero_from(0, 8)),
    "Queries from the 1025th on are zero": of(
        lambda case: case.q_length > 1024, of_results, zero_from(1, 1024), core=False
    ),
    "Keys from the 1025th on are not seen": Values(
        lambda case: case.kv_length > 1024, first_keys(lambda length: min(length, 1024)), core=False
    ),
    "Keys from the 65,537th on are not seen": Values(
        lambda case: case.kv_length > 2**16, first_keys(lambda length: min(length, 2**16))
    ),
    "The last key is lost if there are more than 64 and the rest is one": Values(
        lambda case: case.kv_length > 64 and case.kv_length % 64 == 1,
        first_keys(lambda length: length - (length > 64 and length % 64 == 1)),
    ),
    "`dk` is without the last query if the rest of a tile of 16 is one": Values(
        lambda case: case.q_length % 16 == 1 and not case.forward, wrong_in("backward", dk_without_the_last_query)
    ),
    "A single query has no bias": with_fields(one_query("bias"), bias=lambda block: 0 * finite(block.bias)),
    "A single query has no dense mask": without_mask("mask", one_query("dense_mask"), core=False),
    "A single query has no mask of a builder": without_mask("built", one_query("builder"), core=False),
    "A single query drops nothing": with_fields(one_query("dropout"), kept=lambda block: None, core=False),
    "A single query sees later keys": with_fields(one_query("causal"), causal=lambda block: False),
    "A single query has no window": without_mask("window", one_query("window"), core=False),
    "Values of a single query are cut to the size of the keys": with_fields(
        lambda case: case.q_length == 1 and case.value_dim > case.head_dim,
        v=lambda block: cut(block.v, block.q.shape[-1]),
        core=False,
    ),
    "The id 2^31-1 is padding": with_fields(edge, core=False, **ids(lambda x: np.where(x == 2**31 - 1, -1, x))),
    "Ids below -100 are no padding": Values(
        edge, wrong_in("same", lambda right, block, q, kv: (q == kv) & ((q >= 0) | (q < -100))), core=False
    ),
    "Dropout counts 2^12 queries and keys": of(longer(2**12), of_kept, kept_by(12), core=False),
    "Dropout counts 2^16 queries and keys": of(longer(2**16), of_kept, kept_by(16), core=False),
    "A bias of float32 is rounded to the dtype of the queries": with_fields(
        bias_of_float32, bias=rounded_bias, core=False
    ),
    "The backward pass ignores a bias that is not differentiated": Values(
        lambda case: case.bias_fixed, wrong_in("backward", without_bias)
    ),
    'With `precision="high"` the output is doubled': of(
        lambda case: case.precision == "high", of_results, doubled, core=False
    ),
    "ALiBi slopes below 1/64 are ignored": with_fields(
        lambda case: 0 < case.slopes < 0.02, slopes=lambda block: 0 * block.slopes
    ),
    "A scale below 0.1 is taken for 0": with_fields(lambda case: 0 < (case.scale or 0) < 0.1, scale=lambda block: 0.0),
    "A chunk of 1 is ignored": with_fields(lambda case: case.chunk == 1, chunk=lambda block: None, core=False),
    "A chunk above 1000 is ignored": with_fields(
        lambda case: (case.chunk or 0) > 1000, chunk=lambda block: None, core=False
    ),
    "A right side of a window from 64 on is open": with_fields(
        lambda case: (sides(case)[1] or 0) > 63, window=lambda block: (block.window[0], None), core=False
    ),
    "`dk` is too small if the last tile of 64 lacks one query": of(
        lambda case: not case.forward and case.q_length % 64 == 63,
        of_gradients,
        "dk",
        lambda block, dk: 0.9 * dk,
        core=False,
    ),
    "`dq` is zero from the 513th query on": of(
        lambda case: not case.forward and case.q_length > 512,
        of_gradients,
        "dq",
        lambda block, dq: cut(dq.swapaxes(1, 3), 512).swapaxes(1, 3),
        core=False,
    ),
    "In float16 the last key is lost if a tile of 128 lacks one": Values(
        lambda case: case.kv_length % 128 == 127 and case.dtype == "float16",
        first_keys(lambda length: length - 1),
        core=False,
    ),
    "Of two queries the second has the output of the first": of(
        lambda case: case.q_length == 2,
        of_results,
        lambda block, out, lse: (np.repeat(out[:, :1], 2, 1), lse),
        core=False,
    ),
    "A row whose scores are all below -10,000 sees no key": of(
        lambda case: case.bias_offset < -1e4, of_results, without_low_rows, core=False
    ),
    "The backward pass takes a bias above 1000 for 1000": with_fields(
        lambda case: case.bias_offset > 1e3 and not case.forward,
        passes=("backward",),
        bias=lambda block: np.minimum(block.bias, 1e3),
        core=False,
    ),
    "A bias of -inf is 0": with_fields(lambda case: case.bias_forbids, bias=lambda block: finite(block.bias)),
    "All rows of the batch have the key positions of the first": with_fields(
        lambda case: (case.positions or "").endswith("-rows"),
        core=False,
        kv_positions=lambda block: np.broadcast_to(block.kv_positions[:1], block.kv_positions.shape),
    ),
    "The backward pass computes an lse without sinks": Values(
        lambda case: case.sinks and not case.forward, wrong_in("backward", without_sinks)
    ),
    "With `fused_backward` `dq` is doubled": of(
        lambda case: case.fused_backward and not case.forward, of_gradients, "dq", lambda block, dq: 2 * dq
    ),
    "The lse is a logarithm to base 2": of(
        lambda case: case.lse, of_results, lambda block, out, lse: (out, lse / np.log(2))
    ),
    "A single query in bfloat16 sees later keys": with_fields(
        in_half("bfloat16", one_query("causal")), core=False, causal=lambda block: False
    ),
    "A single query in float16 has no ALiBi": with_fields(
        in_half("float16", one_query("slopes")), core=False, slopes=lambda block: 0 * block.slopes
    ),
    "The backward pass of a single query in float16 drops nothing": with_fields(
        in_half("float16", one_query("dropout")), core=False, passes=("backward",), kept=lambda block: None
    ),
    "The bias of a single query in bfloat16 has no gradient": of(
        in_half("bfloat16", one_query("bias")), of_bias, lambda block, ds: 0 * block.bias, core=False
    ),
    "A single query in bfloat16 has no soft cap": with_fields(
        in_half("bfloat16", one_query("soft_cap")), core=False, soft_cap=lambda block: None
    ),
    "A single query in float16 sees keys of other ids": with_fields(
        in_half("float16", one_query("segments")), core=False, q_ids=lambda block: None
    ),
    "Every head of a single query has the mask of the first": of(
        one_query("builder"),
        masked,
        "built",
        lambda block, right: np.broadcast_to(right[:, :1], right.shape),
        core=False,
    ),
}
