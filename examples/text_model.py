# SPDX-License-Identifier: Apache-2.0
"""A Llama-like model over a mesh with the axes fsdp, tp and sp: its parameters, its losses, a sample of its text."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32
from ringattn_core import from_layout, remat_policy, ring_attention, to_layout
from text_corpus import VOCABULARY

# The axes of each parameter by letter: layers L, width M, heads N, key heads K, head size H, hidden F, vocabulary V.
BLOCK = {"query": "LMNH", "key": "LMKH", "value": "LMKH", "out": "LNHM", "gate": "LMF", "up": "LMF", "down": "LFM",
         "before": "LM", "between": "LM"}  # fmt: skip
PARAMETERS = BLOCK | {"token": "VM", "final": "M", "logits": "MV"}
# The mesh axis that splits an axis of the parameters. "fsdp" also splits the rows of the batch, and "sp" the tokens.
SPLIT = {"M": "fsdp", "N": "tp", "K": "tp", "F": "tp", "V": "tp"}
TOKENS = P("fsdp", "sp")
THETA = 5e5
Attention = Literal["ring", "cudnn", "xla"]
"""`ring_attention`, or `jax.nn.dot_product_attention` with one of its implementations."""
ATTENTIONS = get_args(Attention)
Batch = dict[str, jax.Array]
"""The arrays of `text_corpus.Row` as `[B, T]`, in layout order."""


@dataclasses.dataclass(frozen=True)
class Model:
    layers: int
    width: int
    heads: int
    key_heads: int
    head_size: int
    hidden: int
    dtype: str
    """The dtype of activations. Parameters are float32."""
    layout: str
    """The order of tokens."""
    attention: Attention
    joined: bool
    """Whether the documents of a row see each other."""
    remat: bool
    """Whether the backward pass computes layers again, without their attention."""

    def initial(self, seed: int) -> Any:
        """The parameters. The arrays of a block hold all layers on their first axis, for `scan`."""
        sizes = (self.layers, self.width, self.heads, self.key_heads, self.head_size, self.hidden, VOCABULARY)
        size_of = dict(zip("LMNKHFV", sizes, strict=True))
        keys = jax.random.split(jax.random.key(seed), len(PARAMETERS))

        def parameter(key: jax.Array, name: str, axes: str) -> jax.Array:
            shape = [size_of[axis] for axis in axes]
            if axes in ("LM", "M"):
                return jnp.ones(shape)
            depth = 2 * self.layers if name in ("out", "down") else 1  # so many are added up on the way to the logits
            return jax.random.normal(key, shape) / (self.width * depth) ** 0.5

        return {name: parameter(key, name, axes) for key, (name, axes) in zip(keys, PARAMETERS.items(), strict=True)}

    def logits(self, mesh: Mesh, parameters: Any, batch: Batch) -> Float[Array, "B T V"]:
        split = functools.partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, TOKENS))
        attend = self._attention(mesh, batch)

        def block(x: Float[Array, "B T M"], weights: Any) -> tuple[Float[Array, "B T M"], None]:
            w = {name: weight.astype(x.dtype) for name, weight in weights.items()}
            normed = norm(x, w["before"])
            query, key, value = (jnp.einsum("btm,mnh->btnh", normed, w[name]) for name in ("query", "key", "value"))
            seen = attend(rotate(query, batch["positions"]), rotate(key, batch["positions"]), value)
            x = split(x + jnp.einsum("btnh,nhm->btm", seen, w["out"]))
            normed = norm(x, w["between"])
            return split(x + (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]), None

        # A product, because the gradient of a look-up adds in an order that changes from run to run on a GPU.
        x = split(
            jax.nn.one_hot(batch["tokens"], VOCABULARY, dtype=self.dtype) @ parameters["token"].astype(self.dtype)
        )
        if self.remat:
            # The policy keeps the output of attention, so that the backward pass does not run the ring a second time.
            block = jax.checkpoint(block, policy=remat_policy(), prevent_cse=False)
        x, _ = jax.lax.scan(block, x, {name: parameters[name] for name in BLOCK})
        table = parameters["logits"].astype(x.dtype)
        return jnp.matmul(norm(x, parameters["final"]), table, preferred_element_type=jnp.float32)

    def _attention(self, mesh: Mesh, batch: Batch) -> Callable[..., jax.Array]:
        if self.attention != "ring":
            return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=self.attention)
        segments = None if self.joined else batch["segments"]
        ring = {
            "mesh": mesh,
            "axis_name": "sp",
            "batch_axis_name": "fsdp",
            "head_axis_name": "tp",
            "layout": self.layout,
        }
        return functools.partial(ring_attention, causal=True, q_segment_ids=segments, **ring)

    def losses(self, mesh: Mesh, parameters: Any, batch: Batch) -> Float[Array, "B T"]:
        """The loss of each token: how little it expected the next one. 0 where the document has no next one."""
        logits = self.logits(mesh, parameters, batch)
        expected = jnp.sum(logits * jax.nn.one_hot(batch["labels"], VOCABULARY), -1)
        return jnp.where(batch["labels"] >= 0, jax.nn.logsumexp(logits, -1) - expected, 0.0)

    def loss(self, mesh: Mesh, parameters: Any, batch: Batch) -> Float[Array, ""]:
        """The mean over the tokens that have a next one in their document."""
        return jnp.sum(self.losses(mesh, parameters, batch)) / jnp.sum(batch["labels"] >= 0)


def norm(x: Float[Array, "... M"], weight: Float[Array, " M"]) -> Float[Array, "... M"]:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * weight).astype(x.dtype)


def rotate(x: Float[Array, "B T N H"], positions: Int32[Array, "B T"]) -> Float[Array, "B T N H"]:
    """RoPE by `positions`: tokens need not be in natural order."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * THETA ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    rotated = a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)
    return jnp.concatenate(rotated, -1).astype(x.dtype)


def sample(model: Model, mesh: Mesh, parameters: Any, prompt: np.ndarray, count: int, length: int) -> bytes:
    """`count` bytes after the tokens of the prompt, drawn with a temperature of 0.7.

    Every byte runs the model over the whole `length`, to stay short: `decode.py` keeps a cache of keys and values.
    """
    order = to_layout(np.arange(length), model.layout, mesh.shape["sp"], axis=0)
    placed = NamedSharding(mesh, TOKENS)
    rows = mesh.shape["fsdp"]

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def following(parameters: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.asarray(order, jnp.int32), tokens.shape)
        batch = {"tokens": tokens, "segments": 0 * positions, "positions": positions}
        logits = from_layout(model.logits(mesh, parameters, batch), model.layout, mesh.shape["sp"])
        key = jax.random.fold_in(jax.random.key(0), last)
        return jax.random.categorical(key, logits[0, last] / 0.7)

    tokens = np.zeros(length, np.int32)
    tokens[: len(prompt)] = prompt
    for last in range(len(prompt) - 1, len(prompt) + count - 1):
        laid_out = np.broadcast_to(tokens[order], (rows, length))
        array = jax.make_array_from_callback((rows, length), placed, laid_out.__getitem__)
        tokens[last + 1] = following(parameters, array, jnp.int32(last))
    return bytes(tokens[len(prompt) : len(prompt) + count].tolist())
