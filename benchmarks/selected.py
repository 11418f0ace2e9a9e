# SPDX-License-Identifier: Apache-2.0
"""How fast attention to chosen blocks is on one GPU, beside dense causal attention, and whether it is right there.

The default shape is that of MiniMax-M3: 64 query heads and 4 key heads of 128, and 16 blocks of 128 keys for each query
and key head. Choices are independent of each other (the worst case), of the newest blocks (the best), or those of each
layer in a file of NumPy's that `--choices` names: int32 `[T, layers * groups, n]`, as `examples/train_selected.py`
writes it. `--check` compares outputs and gradients with the XLA backend in float32, for many shapes, in place of times.
`--together` only counts the blocks that neighbouring queries choose together, as a table; it needs no GPU.
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
from interleaved import ON_A_DEVICE, Claim, medians, ours, report, temporary_bytes, with_gradients
from workloads import Shape

Choose = Callable[[int, int, int, int], np.ndarray]
"""A function of tokens, groups, blocks to choose and keys of a block that gives ids `[T, groups, n]`."""
NEIGHBOURS = (8, 16, 64, 128)
TOGETHER = "share of their blocks that neighbouring queries choose together"
DENSE, EVERY = "dense causal", "all blocks"


def independent(tokens: int, groups: int, count: int, size: int) -> np.ndarray:
    """Each query chooses at random among the blocks up to its own, and always the first block and its own."""
    rng = np.random.default_rng(0)
    own = np.arange(tokens, dtype=np.int32)[:, None, None] // size
    ids = (rng.random((tokens, groups, count), np.float32) * (own + 1)).astype(np.int32)
    ids[..., 0], ids[..., 1] = 0, own[..., 0]
    return ids


def newest(tokens: int, groups: int, count: int, size: int) -> np.ndarray:
    """Each query chooses its own block and those before it."""
    ids = np.arange(tokens, dtype=np.int32)[:, None, None] // size - np.arange(count, dtype=np.int32)
    return np.broadcast_to(np.maximum(ids, -1), (tokens, groups, count))


CHOICES: dict[str, Choose] = {"independent": independent, "newest": newest}


def united(ids: np.ndarray, size: int, neighbours: int) -> float:
    """The blocks that so many neighbouring queries choose together over the blocks up to theirs, summed over all."""
    tokens, groups, _ = ids.shape
    seen = np.zeros((tokens // neighbours, groups, tokens // size + 1), bool)  # -1 is the last
    tiles = np.broadcast_to(np.arange(tokens // neighbours).repeat(neighbours)[:, None, None], ids.shape)
    seen[tiles, np.arange(groups)[:, None], ids] = True
    last = (np.arange(tokens // neighbours) * neighbours + neighbours - 1) // size
    return float(seen[..., :-1].sum() / ((last + 1).sum() * groups))


def pairs(ids: np.ndarray, size: int) -> float:
    """The pairs of a query and a key that it sees over the pairs of a causal mask; ids must not repeat for this."""
    tokens, groups, _ = ids.shape
    ordered = np.sort(ids, -1)
    new = np.concatenate([ordered[..., :1] >= 0, (ordered[..., 1:] != ordered[..., :-1]) & (ordered[..., 1:] >= 0)], -1)
    index = np.arange(tokens)[:, None, None]
    keys = np.clip(index + 1 - ordered * size, 0, size) * new
    return float(keys.sum() / groups / (tokens * (tokens + 1) / 2))


def table(arguments: argparse.Namespace, tokens: int) -> str:
    """The shares of `united` for each choice and number of neighbours, in Markdown."""
    lines = [
        "| choice | " + " | ".join(f"{n} queries" for n in NEIGHBOURS) + " |",
        "|---" * (len(NEIGHBOURS) + 1) + "|",
    ]
    for name, ids in chosen(arguments, tokens).items():
        shares = " | ".join(f"{united(ids, arguments.size, n):.2f}" for n in NEIGHBOURS)
        lines.append(f"| {name} | {shares} |")
    return "\n".join(lines)


def program(attend: Callable[..., Any], shape: Shape, part: str) -> tuple[Callable[[], Any], int]:
    """A compiled call on its arrays, and its temporary memory."""
    *inputs, dout = shape.arrays()
    given = (*inputs, dout) if part == "forward+backward" else inputs
    compiled = jax.jit(with_gradients(attend) if part == "forward+backward" else attend).lower(*given).compile()
    return lambda: compiled(*given), temporary_bytes(compiled)


def chosen(arguments: argparse.Namespace, tokens: int) -> dict[str, np.ndarray]:
    """The choices whose times are compared with that of the dense call, by name."""
    found = {
        name: choose(tokens, arguments.groups, arguments.count, arguments.size) for name, choose in CHOICES.items()
    }
    if arguments.choices:
        of_layers = np.load(arguments.choices)[:tokens]
        if of_layers.shape[1] % arguments.groups:
            raise SystemExit(f"{arguments.choices} has {of_layers.shape[1]} choices a query: --groups must divide them")
        layers = np.split(of_layers, of_layers.shape[1] // arguments.groups, 1)
        found |= {f"of layer {n}": ids for n, ids in enumerate(layers)}
    if arguments.every:
        every = np.arange(tokens // arguments.size, dtype=np.int32)
        found[EVERY] = np.broadcast_to(every, (tokens, arguments.groups, every.size))
    return found


def measured(arguments: argparse.Namespace) -> tuple[list[Claim], dict[str, float]]:
    """The times of the dense call and of each choice, at each length."""
    raw: dict[str, float] = {}
    claims = []
    for tokens in arguments.tokens:
        shape = Shape(1, tokens, arguments.heads, arguments.kv_heads, arguments.head_size)
        calls = {DENSE: ours(causal=True, backend=arguments.backend)}
        for name, ids in chosen(arguments, tokens).items():
            if name != EVERY:
                raw |= {f"{TOGETHER}, {n}, {name} at {tokens}": united(ids, arguments.size, n) for n in NEIGHBOURS}
                raw[f"pairs over those of a causal mask, {name} at {tokens}"] = pairs(ids, arguments.size)
            calls[name] = functools.partial(_chosen, jnp.asarray(ids)[None], arguments.size, arguments.backend)
        for part in arguments.parts:
            candidates = {}
            for name, call in calls.items():
                candidates[name], raw[f"temporary bytes, {name}, {part} at {tokens}"] = program(call, shape, part)
            seconds = medians(candidates, arguments.rounds, ON_A_DEVICE)
            raw |= {f"ms, {name}, {part} at {tokens}": 1e3 * x for name, x in seconds.items()}
            dense = seconds.pop(DENSE)
            for name, x in seconds.items():
                target = 1.05 if name == EVERY else arguments.target
                claims.append(Claim(f"{name} over {DENSE}, {part} at {tokens}", x / dense, "<=", target))
    return claims, raw


def _chosen(ids: jax.Array, size: int, backend: str, *arrays: jax.Array) -> jax.Array:
    # Ids come with the data: behind a barrier the compiler does not know them.
    ids = jax.lax.optimization_barrier(ids)
    return ours(causal=True, selected=ids, selected_size=size, backend=backend)(*arrays)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A call whose results are compared with those of the XLA backend in float32."""

    tokens: int
    heads: int
    kv_heads: int
    groups: int
    size: int
    count: int
    head_size: int = 128
    dtype: str = "bfloat16"
    keys: int | None = None
    options: tuple[tuple[str, Any], ...] = (("causal", True),)

    def ids(self) -> jax.Array:
        """Random ids, -1 and repeated ones among them; some queries choose nothing."""
        rng = np.random.default_rng(self.size)
        ids = rng.integers(-1, -(-(self.keys or self.tokens) // self.size), (2, self.tokens, self.groups, self.count))
        ids[:, ::17] = -1
        return jnp.asarray(ids, jnp.int32)

    def errors(self, backend: str) -> dict[str, float]:
        """The RMS difference of each result over the RMS of the right one."""
        shape = Shape(2, self.keys or self.tokens, self.heads, self.kv_heads, self.head_size, self.dtype)
        *inputs, dout = shape.arrays(self.tokens)
        options = dict(self.options) | {"selected": self.ids(), "selected_size": self.size}
        names = ("out", "dq", "dk", "dv")
        got = jax.jit(with_gradients(ours(backend=backend, **options)))(*inputs, dout)
        wide = [x.astype(jnp.float32) for x in (*inputs, dout)]
        right = jax.jit(with_gradients(ours(backend="xla", **options)))(*wide)
        return {name: _difference(a, b) for name, a, b in zip(names, got, right, strict=True)}


def _difference(got: jax.Array, right: jax.Array) -> float:
    a, b = np.asarray(got, np.float64), np.asarray(right, np.float64)
    return float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))


CHECKED = {
    "16 heads a group, blocks of 128": Checked(2048, 64, 4, 4, 128, 4),
    "16 heads a group, blocks of 128, not causal": Checked(1024, 32, 2, 2, 128, 3, options=()),
    "16 heads a group, one group": Checked(1024, 32, 2, 1, 64, 4),
    "8 heads a group, blocks of 64": Checked(1536, 16, 2, 2, 64, 5),
    "8 heads a group, heads of 64": Checked(2048, 16, 2, 2, 64, 5, head_size=64),
    "8 heads a group, ragged": Checked(1000, 16, 2, 2, 16, 9, keys=1411),
    "8 heads a group, blocks of 32, a window": Checked(1536, 16, 2, 2, 32, 9, options=(("sliding_window", (500, 0)),)),
    "8 heads a group, a soft cap and sinks": Checked(
        1024, 16, 2, 2, 64, 5,
        options=(("causal", True), ("logits_soft_cap", 20.0), ("softmax_aux", np.ones(16, np.float32))),
    ),
    "4 heads a group, blocks of 64": Checked(1536, 16, 4, 4, 64, 5),
    "a group of ids for each head": Checked(1024, 8, 2, 8, 64, 5),
    "blocks of 4": Checked(1024, 8, 8, 8, 4, 60),
    "single keys, one group": Checked(1024, 16, 16, 1, 1, 200),
    "blocks of 5": Checked(1024, 8, 2, 2, 5, 50),
    "heads of 256": Checked(1024, 8, 4, 4, 64, 5, head_size=256),
    "float16": Checked(1024, 16, 2, 2, 64, 5, dtype="float16"),
    "float32": Checked(1024, 16, 2, 2, 64, 5, dtype="float32"),
    "dropout": Checked(1024, 16, 2, 2, 64, 5, options=(("causal", True), ("dropout_prob", 0.25), ("dropout_seed", 3))),
}  # fmt: skip
ERRORS = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 2e-5}
"""The largest RMS error: about twice what rounding alone gives."""


def checked(arguments: argparse.Namespace) -> tuple[list[Claim], dict[str, float]]:
    """The errors of the calls in `CHECKED`. With `--only TEXT`, of those whose name contains the text."""
    claims = []
    for name, call in CHECKED.items():
        if arguments.only in name:
            errors = call.errors(arguments.backend)
            print(json.dumps({name: errors}), flush=True)
            claims += [Claim(f"{name}: {x}", error, "<=", ERRORS[call.dtype]) for x, error in errors.items()]
    return claims, {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--check", action="store_true", help="compare results, in place of times")
    parser.add_argument("--together", action="store_true", help="count blocks, in place of times")
    parser.add_argument("--only", default="", help="with --check: only the calls whose name contains this")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--size", type=int, default=128, help="the keys of a block")
    parser.add_argument("--count", type=int, default=16, help="the blocks that a query chooses")
    parser.add_argument("--choices", help="a .npy file of ids [T, layers * groups, n]; --groups must be its")
    parser.add_argument("--every", action="store_true", help="time a choice of all blocks, too")
    parser.add_argument("--parts", nargs="+", default=["forward", "forward+backward"])
    parser.add_argument("--target", type=float, default=0.3, help="the wanted share of the dense call's time")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.together:
        print(*(f"{tokens} tokens\n\n{table(arguments, tokens)}" for tokens in arguments.tokens), sep="\n\n")
        return
    claims, raw = checked(arguments) if arguments.check else measured(arguments)
    report("selected.py", claims, raw)


if __name__ == "__main__":
    main()
