# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false, reportGeneralTypeIssues=false
"""A ring of a dense block kernel in NumPy: it does with a kernel what core does, and compiles nothing."""

import dataclasses
import functools
from typing import Any, Final

import numpy as np
from ringattn_conformance import oracle
from ringattn_conformance.cases import DTYPES, Case, Inputs
from ringattn_conformance.oracle import per_pair, per_row
from ringattn_conformance.ranks import Placement

Arrays = dict[str, np.ndarray]
Pair = tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Block:
    """Some queries and some keys of a call, in float64. The axes are those of core's `Block`."""

    case: Case
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_positions: np.ndarray
    kv_positions: np.ndarray
    q_index: np.ndarray
    kv_index: np.ndarray
    q_ids: np.ndarray | None
    kv_ids: np.ndarray | None
    bias: np.ndarray | None
    mask: np.ndarray | None
    slopes: np.ndarray | None
    built: np.ndarray | None
    kept: np.ndarray | None
    first: np.ndarray | None
    last: np.ndarray | None
    chosen: np.ndarray | None
    """The ids that each head's query has chosen, `[B, N, T, n]`."""
    causal: bool
    window: tuple[int | None, int | None] | None
    chunk: int | None
    soft_cap: float | None
    scale: float
    dropout: float
    placement: Placement
    rank: int = 0
    hop: int = 0

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    @property
    def half(self) -> bool:
        return self.case.dtype != "float32"

    def but(self, **fields: Any) -> "Block":
        return dataclasses.replace(self, **fields)


class Dense:
    """A kernel that holds all scores. Each method is a place where a kernel can be wrong."""

    def forward(self, block: Block, partial: Any) -> tuple[np.ndarray, np.ndarray]:
        """The normalised output and the lse over the keys of this block and of `partial`."""
        s, _ = self.scores(block)
        lse = self.lse(block, s)
        p = np.exp(s - finite(lse)[..., None])
        out = per_row(self.operand(block, p * self.keep(block, False)), self.of_heads(block, block.v))
        return (out, lse) if partial is None else self.merged(block, partial, (out, lse))

    def backward(self, block: Block, dout: np.ndarray, lse: np.ndarray, delta: np.ndarray, dq: Any) -> Arrays:
        s, slope = self.scores(block, True)
        p = np.where(np.isneginf(s), 0.0, np.exp(s - finite(lse)[..., None]))
        keep = self.keep(block, True)
        dp = per_pair(dout, self.of_heads(block, block.v))
        ds = self.derivatives(block, p * (keep * dp - delta[..., None]))
        dz = self.operand(block, block.scale * ds * slope)
        own = per_row(dz, self.of_heads(block, block.k))
        found = {
            "dq": own if dq is None else self.continued(block, dq, own),
            "dk": self.grouped(block, per_row(np.swapaxes(dz, 2, 3), block.q)),
            "dv": self.grouped(block, per_row(np.swapaxes(self.operand(block, p * keep), 2, 3), dout)),
        }
        if block.bias is not None:
            found["dbias"] = self.of_bias(block, ds)
        if block.slopes is not None:
            found["dslopes"] = self.of_slopes(block, ds)
        return found

    def operand(self, block: Block, x: np.ndarray) -> np.ndarray:
        """Weights or derivatives of scores, as the next product takes them."""
        return x

    def scores(self, block: Block, backward: bool = False) -> tuple[np.ndarray, Any]:
        """Every score, -inf where masked out, and the derivative of the soft cap."""
        s, slope = block.scale * self.products(block), 1.0
        if block.soft_cap is not None:
            bent = np.tanh(s / block.soft_cap)
            s, slope = block.soft_cap * bent, 1 - bent**2
        if block.bias is not None:
            s = s + np.where(block.bias < -1e5, -np.inf, block.bias)
        if block.slopes is not None:
            s = s - block.slopes[:, None, None] * self.distance(block)
        return np.where(self.visible(block), s, -np.inf), slope

    def largest(self, block: Block) -> np.ndarray:
        """The largest score of each head, -inf where it sees nothing."""
        return self.scores(block)[0].max((0, 2, 3))

    def products(self, block: Block) -> np.ndarray:
        return per_pair(block.q, self.of_heads(block, block.k))

    def visible(self, block: Block) -> np.ndarray:
        return functools.reduce(np.logical_and, self.masks(block).values(), np.ones((1, 1, 1, 1), bool))

    def masks(self, block: Block) -> Arrays:
        """The masks of the call by name, each broadcastable to `[B, N, T, S]`."""
        at, found = coordinates(block), {}
        if block.causal:
            found["causal"] = causal(at)
        if block.window is not None:
            found["window"] = window(at, block.window)
        if block.chunk is not None:
            found["chunk"] = chunk_from(block, at)
        if block.q_ids is not None and block.kv_ids is not None:
            found["ids"] = self.same(block, block.q_ids[:, None, :, None], block.kv_ids[:, None, None, :])
        if block.first is not None and block.last is not None:
            found["range"] = within(at, block.first, block.last)
        if block.chosen is not None:
            found["chosen"] = self.choice(block, block.chosen, block.kv_index)
        for name in ("mask", "built"):
            if (given := getattr(block, name)) is not None:
                found[name] = given
        return found

    def choice(self, block: Block, ids: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Whether the block of each key, by its index, is among the ids."""
        return (ids[..., None, :] == (index // block.case.selected_size)[:, None]).any(-1)

    def same(self, block: Block, ids: np.ndarray, kv_ids: np.ndarray) -> np.ndarray:
        return (ids == kv_ids) & (ids >= 0) & (kv_ids >= 0)

    def lse(self, block: Block, s: np.ndarray) -> np.ndarray:
        return log_sum_exp(s, -1)

    def merged(self, block: Block, one: Any, other: Any) -> Any:
        lse = log_sum_exp(np.stack([one[1], other[1]]), 0)
        share = [np.swapaxes(np.exp(x[1] - finite(lse)), 1, 2)[..., None] for x in (one, other)]
        return share[0] * one[0] + share[1] * other[0], lse

    def of_heads(self, block: Block, x: np.ndarray) -> np.ndarray:
        return np.repeat(x, block.group, 2)

    def grouped(self, block: Block, x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], -1, block.group, x.shape[-1]).sum(3)

    def distance(self, block: Block) -> np.ndarray:
        i, j = coordinates(block)
        return np.abs(i - j).astype(np.float64)

    def keep(self, block: Block, backward: bool) -> Any:
        return 1.0 if block.kept is None else block.kept / (1 - block.dropout)

    def derivatives(self, block: Block, ds: np.ndarray) -> np.ndarray:
        return ds

    def continued(self, block: Block, dq: np.ndarray, own: np.ndarray) -> np.ndarray:
        return dq + own

    def of_bias(self, block: Block, ds: np.ndarray) -> np.ndarray:
        assert block.bias is not None
        return summed_to(ds, block.bias.shape)

    def of_slopes(self, block: Block, ds: np.ndarray) -> np.ndarray:
        return -np.sum(ds * self.distance(block), (0, 2, 3))


class OneAfterAnother(Dense):
    """A right kernel that adds the products of float32 in float32, one after another, which rounds most often."""

    def products(self, block: Block) -> np.ndarray:
        if block.half:
            return super().products(block)
        q, k = (np.moveaxis(x.astype(np.float32), 2, 1) for x in (block.q, self.of_heads(block, block.k)))
        total, product = (np.zeros((*q.shape[:3], k.shape[2]), np.float32) for _ in range(2))
        for component in range(q.shape[-1]):
            total += np.multiply(q[..., :, None, component], k[..., None, :, component], out=product)
        return total.astype(np.float64)


class Fused(OneAfterAnother):
    """A right kernel that rounds weights and derivatives of scores to half precision before products, as fused do.

    As FlashAttention-2 does, it divides by what dropout keeps after that.
    """

    def operand(self, block: Block, x: np.ndarray) -> np.ndarray:
        kept = 1 - block.dropout
        return (x * kept).astype(DTYPES[block.case.dtype]).astype(np.float64) / kept if block.half else x


def coordinates(block: Block) -> Pair:
    return block.q_positions[:, None, :, None], block.kv_positions[:, None, None, :]


def causal(at: Pair) -> np.ndarray:
    return at[1] <= at[0]


def window(at: Pair, sides: Any) -> np.ndarray:
    (i, j), (left, right) = at, sides
    return (j >= i - (2**40 if left is None else left)) & (j <= i + (2**40 if right is None else right))


def within(at: Pair, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    return (first <= at[1]) & (at[1] <= last)


def chunk_from(block: Block, at: Pair, start: int = 0) -> np.ndarray:
    i, j = at
    return ((i - start) // block.chunk == (j - start) // block.chunk) & (j <= i)


def log_sum_exp(s: np.ndarray, axis: int) -> np.ndarray:
    """-inf where all are -inf."""
    largest = finite(s.max(axis, keepdims=True, initial=-np.inf))
    total = np.exp(s - largest).sum(axis)
    return np.squeeze(largest, axis) + np.log(total, where=total > 0, out=np.full(total.shape, -np.inf))


def finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isneginf(x), 0.0, x)


def summed_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return x.sum(tuple(axis for axis, size in enumerate(shape) if size == 1), keepdims=True)


def bounds(given: Any, queries: int) -> np.ndarray:
    """One side of a `kv_range` as `[b, n, T, 1]`."""
    x = oracle.bound_of_queries(given)
    x = x.reshape(*(1,) * (4 - x.ndim), *x.shape)
    return np.broadcast_to(x, (*x.shape[:2], queries, 1))


def by_head(problem: oracle.Problem) -> np.ndarray:
    """The ids of each head, `[B, N, T, n]`."""
    heads = problem.q.shape[2]
    return np.moveaxis(np.repeat(problem.selected, heads // problem.selected.shape[2], 2), 2, 1)


BY_ROW: Final = {
    "q": 1, "q_positions": 1, "q_ids": 1, "first": 2, "last": 2, "chosen": 2, "bias": 2, "mask": 2, "built": 2,
    "kept": 2,
}  # fmt: skip
BY_KEY: Final = {"k": 1, "v": 1, "kv_positions": 1, "kv_ids": 1, "bias": 3, "mask": 3, "built": 3, "kept": 3}


@functools.lru_cache(maxsize=96)
def whole(case: Case, placement: Placement) -> tuple[Block, Inputs]:
    """A call as one block of all queries and keys in natural order, with zeros in the padding, and its inputs.

    The block has a case of its own. So what a case keeps, its inputs and the oracle's answer, is freed with the block.
    """
    case = dataclasses.replace(case)
    inputs = case.inputs
    problem = inputs.problem
    (q_positions, kv_positions), (q_ids, kv_ids) = oracle.positions(problem), (problem.q_segments, problem.kv_segments)

    window = case.window if isinstance(case.window, tuple | None) else (case.window, case.window)
    block = Block(
        case, *(x.astype(np.float64) for x in (problem.q, problem.k, problem.v)),
        q_positions, kv_positions, np.arange(problem.q.shape[1]), np.arange(problem.k.shape[1]), q_ids, kv_ids,
        None if problem.bias is None else problem.bias.astype(np.float64), inputs.dense_mask,
        None if problem.slopes is None else problem.slopes.astype(np.float64),
        None if case.masks_of_heads is None else case.masks_of_heads.dense(problem),
        oracle.kept(problem) if case.dropout else None,
        *(None if x is None else bounds(x, case.q_length) for x in problem.kv_range or (None, None)),
        None if problem.selected is None else by_head(problem),
        case.causal, window, case.chunk, case.soft_cap,
        case.head_dim**-0.5 if case.scale is None else case.scale,
        1 - oracle.keep_probability(problem), placement,
    )  # fmt: skip
    return block, inputs


def run(case: Case, placement: Placement, kernel: Dense) -> Arrays:
    """The outputs and gradients of a ring of this kernel, in natural order and in the dtypes of the call."""
    block, inputs = whole(case, placement)
    problem, ranks, dtype = inputs.problem, placement.ring, DTYPES[case.dtype]
    rows, columns = (
        np.split(oracle.order(placement.layout, ranks, length), ranks)
        for length in (block.q.shape[1], block.k.shape[1])
    )
    dout = inputs.dout.astype(np.float64)
    dlse = np.zeros((dout.shape[0], dout.shape[2], dout.shape[1])) if inputs.dlse is None else inputs.dlse
    if block.q_ids is not None:
        dout, dlse = (block.q_ids >= 0)[..., None, None] * dout, (block.q_ids >= 0)[:, None] * dlse
    sinks = None if problem.sinks is None else oracle.sinks_of_heads(problem.sinks, case.heads)
    got: Arrays = {name: np.zeros(x.shape) for name, x in (("dk", block.k), ("dv", block.v), ("dq", block.q))}
    got |= {"out": np.zeros(dout.shape), "lse": np.zeros(dlse.shape)}
    if block.bias is not None:
        got["dbias"] = np.zeros(block.bias.shape)
    if block.slopes is not None:
        got["dslopes"] = np.zeros(block.slopes.shape)
    largest = np.full(case.heads, -np.inf)
    weight = None
    for rank, mine in enumerate(rows):
        blocks = []
        for hop in range(ranks):
            keys = columns[(rank - hop) % ranks]
            fields = {"q_index": mine, "kv_index": keys, "rank": rank, "hop": hop}
            for name in BY_ROW | BY_KEY:
                x = getattr(block, name)
                for of, index in ((BY_ROW, mine), (BY_KEY, keys)):
                    if x is not None and name in of and x.shape[of[name]] > 1:
                        x = np.take(x, index, of[name])
                fields[name] = x
            blocks.append(block.but(**fields))
        partial: Any = None
        for each in blocks:
            partial = kernel.forward(each, partial)
            largest = np.maximum(largest, kernel.largest(each)) if case.max_logits else largest
        out, lse = partial
        if sinks is not None:
            more = log_sum_exp(np.broadcast_to(sinks[None, :, None], (*lse.shape, sinks.shape[1])), -1)
            total = log_sum_exp(np.stack([lse, more]), 0)
            out, lse = out * np.swapaxes(np.exp(lse - finite(total)), 1, 2)[..., None], total
        out = out.astype(dtype).astype(np.float64)
        got["out"][:, mine], got["lse"][:, :, mine] = out, lse
        delta = np.einsum("btnh,btnh->bnt", dout[:, mine], out) - dlse[:, :, mine]
        if sinks is not None:
            part = (
                np.exp(sinks[None, :, None] - finite(lse)[..., None]) * ~np.isneginf(lse)[..., None] * delta[..., None]
            )
            weight = -part.sum((0, 2)) if weight is None else weight - part.sum((0, 2))
        dq = None
        for each in () if case.forward else blocks:
            found = kernel.backward(each, dout[:, mine], lse, delta, dq)
            dq = found["dq"]
            got["dk"][:, each.kv_index] += found["dk"]
            got["dv"][:, each.kv_index] += found["dv"]
            if "dbias" in found:
                at = np.ix_(*(range(size) for size in got["dbias"].shape[:2]),
                            mine if got["dbias"].shape[2] > 1 else [0], each.kv_index)  # fmt: skip
                got["dbias"][at] += found["dbias"]
            if "dslopes" in found:
                got["dslopes"] += found["dslopes"]
        if not case.forward:
            got["dq"][:, mine] = dq
    if weight is not None:
        shared = problem.sinks.ndim == 1 and problem.sinks.shape[0] != case.heads
        got["dsinks"] = weight.sum(0) if shared else weight.reshape(problem.sinks.shape)
    if case.bias_fixed:
        got.pop("dbias", None)
    if not case.lse:
        del got["lse"]
    if case.max_logits:
        got["max_logits"] = largest
    if case.forward:
        got = {name: got[name] for name in ("out", "lse", "max_logits") if name in got}
    dtypes = {"max_logits": np.float32, "lse": np.float32, "dsinks": np.float32, "dslopes": np.float32}
    if problem.bias is not None:
        dtypes["dbias"] = problem.bias.dtype
    with np.errstate(over="ignore"):
        return {name: x.astype(dtypes.get(name, dtype)) for name, x in got.items()}
