# SPDX-License-Identifier: Apache-2.0
"""How fast `select` and `teach` are on one GPU, beside dense causal attention, and whether they are right there.

The default shape is that of MiniMax-M3: attention has 64 query heads and 4 key heads of 128, the indexer 8 heads of 128
and one key; each query and group chooses 16 blocks of 128 keys. `teach` is timed with its gradients. `--check` compares
choices, losses and gradients with those of the same numbers in float32, for which there is no kernel.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from interleaved import ON_A_DEVICE, Claim, medians, ours, report
from ringattn_sparse import select, teach
from workloads import Shape

DENSE = "dense causal"


def index_arrays(tokens: int, heads: int, size: int, dtype: Any, seed: int = 0) -> list[jax.Array]:
    """Normal numbers: index queries, one index key for all heads, and weights."""
    shapes = (1, tokens, heads, size), (1, tokens, size), (1, tokens, heads)
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def compiled(function: Callable[..., Any], *arrays: Any) -> Callable[[], Any]:
    program = jax.jit(function).lower(*arrays).compile()
    return lambda: program(*arrays)


def measured(arguments: argparse.Namespace) -> tuple[list[Claim], dict[str, float]]:
    """The times of the dense call, of the choices and of `teach` at each length."""
    raw: dict[str, float] = {}
    claims = []
    for tokens in arguments.tokens:
        shape = Shape(1, tokens, arguments.heads, arguments.kv_heads, arguments.head_size)
        attention = shape.arrays()[:3]
        indexer = index_arrays(tokens, arguments.index_heads, arguments.head_size, jnp.bfloat16)
        attend = ours(causal=True, backend=arguments.backend)
        candidates = {DENSE: compiled(attend, *attention)}
        for groups in arguments.groups:
            choose = functools.partial(select, groups=groups, **select_options(arguments))
            candidates[f"select, {groups} groups"] = compiled(choose, *indexer)
        if not arguments.no_teach:
            candidates |= teach_calls(arguments, indexer, attention, chosen(arguments, indexer))
        seconds = medians(candidates, arguments.rounds, ON_A_DEVICE)
        raw |= {f"ms, {name} at {tokens}": 1e3 * x for name, x in seconds.items()}
        dense = seconds.pop(DENSE)
        raw |= {f"{name} over {DENSE} at {tokens}": x / dense for name, x in seconds.items()}
        claims += [
            Claim(f"{name} over {DENSE} at {tokens}", x / dense, "<=", arguments.target)
            for name, x in seconds.items()
            if name.startswith("select")
        ]
    return claims, raw


def select_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"count": arguments.count, "size": arguments.size, "causal": True, "forced": (0, 1)}


def chosen(arguments: argparse.Namespace, indexer: Any) -> jax.Array:
    """The ids of the blocks that each query and key head chooses."""
    return jax.jit(functools.partial(select, groups=arguments.kv_heads, **select_options(arguments)))(*indexer)


def teach_calls(
    arguments: argparse.Namespace, indexer: Any, attention: Any, ids: jax.Array
) -> dict[str, Callable[[], Any]]:
    """`teach` with its gradients, over all keys and over the blocks `ids`."""
    query, key, _ = attention
    _, lse = jax.jit(ours(causal=True, return_lse=True, backend=arguments.backend))(*attention)
    groups = arguments.kv_heads

    def loss(indexer: Any, query: Any, key: Any, lse: Any, ids: Any) -> jax.Array:
        index_query, index_key, weights = indexer
        of_blocks = {} if ids is None else {"selected": ids, "selected_size": arguments.size}
        return teach(index_query, index_key, weights, query, key, lse, groups=groups, causal=True, **of_blocks)

    step = jax.value_and_grad(loss)
    return {
        f"teach, {name}, {groups} groups": compiled(step, indexer, query, key, lse, x)
        for name, x in (("all keys", None), ("chosen keys", ids))
    }


@dataclasses.dataclass(frozen=True)
class Checked:
    """A choice that is compared with that of the same numbers in float32."""

    tokens: int = 1024
    heads: int = 8
    groups: int = 1
    size: int = 128
    count: int = 4
    head_size: int = 128
    dtype: str = "bfloat16"
    options: tuple[tuple[str, Any], ...] = (("causal", True), ("forced", (0, 1)))
    weights: bool = True

    def arrays(self, integers: bool) -> list[Any]:
        """Small integers, whose sums are exact and often equal, with keys that are not finite; or normal numbers."""
        query, key, weights = index_arrays(self.tokens, self.heads, self.head_size, self.dtype, self.tokens)
        if integers:
            query, key, weights = (jnp.round(x) for x in (query, key, weights))
            key = key.at[:, 300, 0].set(jnp.nan).at[:, 5, 1].set(jnp.inf)
        return [query, key, weights if self.weights else None]

    def share_that_differs(self, integers: bool) -> float:
        """The share of the ids that differ."""
        choose = functools.partial(select, count=self.count, size=self.size, groups=self.groups, **dict(self.options))
        arrays = self.arrays(integers)
        wide = [x if x is None else x.astype(jnp.float32) for x in arrays]
        got, right = (np.asarray(jax.jit(choose)(*x)) for x in (arrays, wide))
        return float((got != right).mean())


def documents(tokens: int) -> jax.Array:
    """Segment ids of documents of random lengths, with padding at the end."""
    ids = np.sort(np.random.default_rng(tokens).integers(0, 5, (1, tokens)), 1)
    ids[:, -tokens // 10 :] = -1
    return jnp.asarray(ids, jnp.int32)


CHECKED = {
    "one group": Checked(4096, count=16),
    "4 groups": Checked(4096, count=16, groups=4),
    "one head a group": Checked(groups=8),
    "more tokens than a launch": Checked(2**15, heads=2, groups=2, size=16),
    "not causal": Checked(options=()),
    "forced first and newest": Checked(2048, count=8, options=(("causal", True), ("forced", (2, 3)))),
    "segments": Checked(options=(("causal", True), ("q_segment_ids", documents(1024)))),
    "ragged": Checked(1000, options=(("causal", True),)),
    "no weights": Checked(weights=False),
    "no activation": Checked(options=(("causal", True), ("activation", None))),
    "blocks of 64": Checked(size=64, groups=2),
    "blocks of 16": Checked(size=16, groups=4, count=16),
    "single keys": Checked(size=1, count=64),
    "64 heads": Checked(heads=64),
    "heads of 64": Checked(head_size=64, size=32, count=8),
    "heads of 16": Checked(head_size=16, size=32, count=8),
    "float16": Checked(dtype="float16", groups=4),
}


@dataclasses.dataclass(frozen=True)
class Taught:
    """A call of `teach` that is compared with that of the same numbers in float32."""

    tokens: int = 1024
    heads: int = 16
    kv_heads: int = 4
    head_size: int = 128
    index_heads: int = 8
    index_size: int = 128
    index_keys: int = 0
    """So many index keys, one for each group; 0 for one that all share."""
    groups: int = 4
    dtype: str = "bfloat16"
    count: int = 0
    """So many blocks that each query has chosen; 0 for all keys."""
    size: int = 128
    options: tuple[tuple[str, Any], ...] = (("causal", True),)
    weights: bool = True

    def errors(self) -> dict[str, float]:
        """The relative error of the loss, and the RMS error of each gradient over its RMS."""
        attention = Shape(1, self.tokens, self.heads, self.kv_heads, self.head_size, dtype=self.dtype).arrays()[:3]
        indexer = index_arrays(self.tokens, self.index_heads, self.index_size, self.dtype)
        if self.index_keys:
            shape = 1, self.tokens, self.index_keys, self.index_size
            indexer[1] = jax.random.normal(jax.random.key(9), shape, self.dtype)
        indexer[0] = indexer[0] / self.index_size**0.5
        options = dict(self.options)
        seen = {name: options[name] for name in ("causal", "q_segment_ids", "logits_soft_cap") if name in options}
        _, lse = jax.jit(ours(return_lse=True, backend="xla", **seen))(*attention)
        if self.count:
            blocks = -(-self.tokens // self.size)
            shape = 1, self.tokens, self.groups, self.count
            options["selected"] = jax.random.randint(jax.random.key(3), shape, -1, blocks)
            options["selected_size"] = self.size

        def loss(indexer: Any, query: Any, key: Any) -> jax.Array:
            index_query, index_key, weights = indexer
            weights = weights if self.weights else None
            return teach(index_query, index_key, weights, query, key, lse, groups=self.groups, **options)

        step, given = jax.jit(jax.value_and_grad(loss)), (indexer, *attention[:2])
        results = [step(*given), step(*jax.tree.map(lambda x: x.astype(jnp.float32), given))]
        (loss_got, got), (loss_right, right) = jax.tree.map(np.float64, results)
        errors = {"loss": float(abs(loss_got / loss_right - 1))}
        for name, dx, exact in zip(("index queries", "index keys", "weights"), got, right, strict=True):
            errors[name] = float(np.sqrt(((dx - exact) ** 2).mean() / ((exact**2).mean() or 1.0)))
        return errors


TAUGHT = {
    "one group": Taught(groups=1),
    "4 groups": Taught(2048),
    "a key for each group": Taught(index_keys=4),
    "8 groups, two to a key head": Taught(groups=8),
    "several launches": Taught(12288, heads=4),
    "not causal": Taught(options=()),
    "ragged": Taught(1000),
    "segments": Taught(options=(("causal", True), ("q_segment_ids", documents(1024)))),
    "chosen blocks of 128": Taught(2048, count=4),
    "chosen blocks of 48": Taught(1056, count=4, size=48),
    "chosen keys": Taught(count=64, size=1),
    "soft cap": Taught(options=(("causal", True), ("logits_soft_cap", 5.0))),
    "no weights": Taught(weights=False),
    "no activation": Taught(options=(("causal", True), ("activation", None))),
    "heads of 64": Taught(head_size=64, index_size=64),
    "heads of 16 and 32": Taught(head_size=16, index_size=32),
    "one head a group": Taught(heads=8, groups=8),
    "float16": Taught(dtype="float16"),
}


def checked(arguments: argparse.Namespace) -> tuple[list[Claim], dict[str, float]]:
    """The choices in `CHECKED` and the calls in `TAUGHT` whose name contains the text of `--only`."""
    claims = []
    for name, call in {f"select, {name}": call for name, call in CHECKED.items()}.items():
        if arguments.only in name:
            shares = {"integers": call.share_that_differs(True), "normal numbers": call.share_that_differs(False)}
            print(json.dumps({name: shares}), flush=True)
            claims.append(Claim(f"{name}: ids of integers that differ", shares["integers"], "<=", 0))
            claims.append(Claim(f"{name}: ids of normal numbers that differ", shares["normal numbers"], "<=", 1e-3))
    for name, lesson in {f"teach, {name}": lesson for name, lesson in TAUGHT.items()}.items():
        if arguments.only in name:
            errors = lesson.errors()
            print(json.dumps({name: errors}), flush=True)
            claims += [
                Claim(f"{name}: error of the {of}", error, "<=", 1e-4 if of == "loss" else 1e-2)
                for of, error in errors.items()
                if lesson.weights or of != "weights"
            ]
    return claims, {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton", help="the backend of the attention")
    parser.add_argument("--check", action="store_true", help="compare results, in place of times")
    parser.add_argument("--only", default="", help="with --check: only the calls whose name contains this")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--index-heads", type=int, default=8)
    parser.add_argument("--groups", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--head-size", type=int, default=128, help="of the attention and of the indexer")
    parser.add_argument("--size", type=int, default=128, help="the keys of a block")
    parser.add_argument("--count", type=int, default=16, help="the blocks that a query chooses")
    parser.add_argument("--no-teach", action="store_true", help="time select alone")
    parser.add_argument("--target", type=float, default=0.15, help="the wanted share of the dense call's time")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    claims, raw = checked(arguments) if arguments.check else measured(arguments)
    report("choosing.py", claims, raw)


if __name__ == "__main__":
    main()
