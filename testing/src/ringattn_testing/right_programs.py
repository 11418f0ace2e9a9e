# SPDX-License-Identifier: Apache-2.0
"""Draws right programs, in which `RINGATTN_CHECK=1` must raise nothing.

`python -m ringattn_testing.right_programs 100` runs a hundred of them.
"""

import os
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ringattn_core import decode_attention, prefill_attention, ring_attention, to_layout
from ringattn_core.placement.layout import Shards

B, T, N, H = 2, 32, 4, 4
TOKENS = P(None, "sp")


def rope(x: np.ndarray) -> np.ndarray:
    """`x [B, T, N, H]` turned by the angles of its tokens in natural order."""
    angle = np.arange(T)[:, None, None] * np.array([1.0, 0.1])
    a, b = x[..., :2], x[..., 2:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


def tokens(kind: str, rng: np.random.Generator) -> list[np.ndarray]:
    """Query, key and value in natural order."""
    q, k, v = (rng.normal(size=(B, T, N, H)) for _ in range(3))
    if kind == "equal values":
        v = np.broadcast_to(v[:, :1], v.shape)
    if kind.startswith("equal tokens"):
        q, k, v = (np.broadcast_to(x[:, :1], x.shape) for x in (q, k, v))
    if kind.startswith("few words"):
        words = rng.permutation(T)[: rng.choice([2, 4])]
        q, k, v = (x[:, words[np.arange(T) % len(words)]] for x in (q, k, v))
    if kind.endswith("rope"):
        q, k = rope(q), rope(k)
    return [x.astype(np.float32) for x in (q, k, v)]


def ids(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Segment ids `[B, T]` in natural order."""
    if kind == "packed":
        ends = [np.sort(rng.choice(np.arange(1, T), 3, False)) for _ in range(B)]
        found = [np.searchsorted(row, np.arange(T), side="right") for row in ends]
    elif kind == "packed and padded":
        found = [np.where(np.arange(T) < 27, np.arange(T) // 9, -1) for _ in range(B)]
    elif kind == "blocks that return":
        size = rng.choice([2, 4, 8, 16])
        found = [rng.integers(0, 3, T // size).repeat(size) for _ in range(B)]
    elif kind == "there and back":
        size = rng.choice([2, 4, 8])
        found = [np.minimum(np.arange(T), np.arange(T)[::-1]) // size for _ in range(B)]
    elif kind == "runs that return":
        found = [np.cumsum(rng.random(T) < 0.2) % 3 for _ in range(B)]
    elif kind == "in turns":
        found = [np.arange(T) % rng.choice([2, 3, 4]) for _ in range(B)]
    else:
        found = [rng.integers(-1, 3, T) for _ in range(B)]
    return np.stack(found).astype(np.int32)


IDS = ("packed", "packed and padded", "blocks that return", "there and back", "runs that return", "in turns", "any")
KINDS = ("any", "equal values", "equal tokens", "equal tokens, rope", "few words", "few words, rope")


class Program:
    """One right program: a call of a function of attention, its arrays, and where it runs."""

    def __init__(self, seed: int):
        rng = self.rng = np.random.default_rng(seed)
        self.ring, self.layout = int(rng.choice([2, 4, 8])), str(rng.choice(["contiguous", "zigzag", "striped"]))
        self.form = str(rng.choice(["mesh", "explicit", "shard_map", "shard_map", "tracked", "pipeline"]))
        self.tokens, self.ids = str(rng.choice(KINDS)), str(rng.choice(IDS))
        self.function = str(rng.choice(["ring_attention"] * 4 + ["expand", "decode_attention", "prefill_attention"]))
        if self.form == "pipeline" and (
            self.ring == 8 or self.function.endswith(("decode_attention", "prefill_attention"))
        ):
            self.form = "mesh"
        if self.form == "shard_map" and self.layout == "contiguous" and self.tokens == "few words":
            self.tokens = "few words, rope"  # a shard may be each word once: errors.md says that it looks replicated
        self.options: dict[str, Any] = {"axis_name": "sp", "batch_axis_name": (), "head_axis_name": ()}
        self.operands = tokens(self.tokens, rng)
        self.arrays: dict[str, tuple[np.ndarray, int]] = {}  # with their axis of tokens
        if self.function in ("ring_attention", "expand"):
            self._options()
        if self.function == "ring_attention" and self.layout == "contiguous" and rng.random() < 0.3:
            self._own_order()

    def __str__(self) -> str:
        more = f"ids {self.ids}, " if "q_segment_ids" in self.arrays else ""
        where = f"{self.form}, {self.layout} on {self.ring}"
        return f"{self.function}, {where}, {self.tokens}, {more}{sorted({**self.arrays, **self.options})}"

    def _options(self) -> None:
        rng, index = self.rng, np.arange(T, dtype=np.int32)
        self.options |= {
            "causal": bool(rng.random() < 0.6),
            "strategy": str(rng.choice(["ring", "all_gather", "auto"])),
        }
        if rng.random() < 0.7:
            self.arrays["q_segment_ids"] = ids(self.ids, rng), 1
        if rng.random() < 0.3:
            own = (index, index // 2, index[::-1].copy(), rng.permutation(index), index % 5, np.zeros_like(index))
            self.arrays["q_positions"] = own[rng.integers(len(own))], 0
        if rng.random() < 0.3:
            self.arrays["check_positions"] = index, 0
        if rng.random() < 0.3:
            self.options["sliding_window"] = 5
            if self.options["causal"] and "q_positions" not in self.arrays:
                self.options["max_distance"] = (5, 0)
        if rng.random() < 0.2:
            below = np.tril(np.ones((T, T), bool))
            masks = (below, rng.random((T, T)) < 0.5, np.eye(T, k=int(rng.integers(-3, 4))) > 0)
            self.arrays["attention_mask"] = masks[rng.integers(len(masks))][None, None], 2

    def _own_order(self) -> None:
        """The caller orders the tokens without `layout`; positions tell a causal mask where they are."""
        order = Shards(str(self.rng.choice(["zigzag", "striped"])), self.ring).order(T)
        for name in ("attention_mask", "check_positions"):
            self.arrays.pop(name, None)
        self.options.pop("max_distance", None)
        self.arrays.setdefault("q_positions", (np.arange(T, dtype=np.int32), 0))
        self.operands = [x[:, order] for x in self.operands]
        self.arrays = {name: (np.take(x, order, axis), axis) for name, (x, axis) in self.arrays.items()}

    def call(self, q: Any, k: Any, v: Any, given: Any) -> Any:
        options = {**self.options, **given, "layout": self.layout}
        if self.function == "decode_attention":
            return decode_attention(q, k, v, jnp.array([3, T]), **options)
        if self.function == "prefill_attention":
            return prefill_attention(q, k, v, jnp.array([T, T]), **options)
        if self.function == "expand":
            weight = jnp.float32(2)
            return ring_attention(q, (k, v), expand=lambda x, w: (x[0] * w, x[1]), expand_params=weight, **options)
        return ring_attention(q, k, v, **options)

    def run(self) -> None:
        """Runs the program; raises what it raises."""
        kind = AxisType.Explicit if self.form == "explicit" else AxisType.Auto
        sizes = {"pp": 2, "sp": self.ring} if self.form == "pipeline" else {"sp": self.ring}
        devices = jax.devices()[: int(np.prod([*sizes.values()]))]
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)
        q, *kv = (jnp.asarray(to_layout(x, self.layout, self.ring)) for x in self.operands)
        given = {name: jnp.asarray(to_layout(x, self.layout, self.ring, n)) for name, (x, n) in self.arrays.items()}
        few = self.function == "decode_attention"
        operands, of_query, call = (q[:, :1] if few else q, *kv), P() if few else TOKENS, self.call
        if self.form in ("shard_map", "tracked"):
            specs = {name: P(*[None] * axis, "sp") for name, (_, axis) in self.arrays.items()}
            all_specs, tracked = (of_query, TOKENS, TOKENS, specs), self.form == "tracked"
            call = jax.shard_map(call, mesh=mesh, in_specs=all_specs, out_specs=of_query, check_vma=tracked)
        if self.form == "pipeline":
            specs = {name: P("pp") if x.shape[0] == B else P() for name, x in given.items()}
            call = jax.shard_map(call, in_specs=(*[P("pp")] * 3, specs), out_specs=P("pp"), axis_names={"pp"})
        with jax.set_mesh(mesh):
            jax.block_until_ready(jax.jit(call)(*operands, given))


def main() -> int:
    from jax._src.dispatch import runtime_tokens

    os.environ["RINGATTN_CHECK"] = "1"
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("ignore")
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    alarms = 0
    for seed in range(first, first + count):
        try:
            program = Program(seed)
            print(f"{seed}: {program}", flush=True)
            program.run()
        except JaxRuntimeError as error:
            runtime_tokens.clear()
            alarms += 1
            print(f"ALARM {seed}: {str(error).strip().splitlines()[-1]}", flush=True)
    print(f"{alarms} false alarms in {count} right programs")
    return alarms


if __name__ == "__main__":
    sys.exit(main())
