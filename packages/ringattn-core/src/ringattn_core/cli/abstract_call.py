# SPDX-License-Identifier: Apache-2.0
"""A call of `ring_attention` described by shapes and options, without its large arrays."""

import argparse
import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, Final, Self

import jax
import numpy as np
from jax.sharding import AbstractMesh

from .. import masks
from ..call.attention import ring_attention
from ..call.validation import DTYPES
from ..errors import InputError
from ..masks.info import MaskInfo
from ..placement.reorder import to_layout

AXIS: Final = "ring"
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class AbstractCall:
    """A call with `mesh=`. Lengths are those of the whole sequence, batch and heads those of one device.

    `documents` are the lengths of packed documents, the same in every batch row; `bias` is a shape.
    """

    query: Shape
    key: Shape
    value: Shape
    ring: int
    dtype: str = "bfloat16"
    layout: str = "contiguous"
    causal: bool = False
    sliding_window: tuple[int | None, int | None] | None = None
    chunk_size: int | None = None
    documents: tuple[int, ...] | None = None
    restart_positions: bool = False
    prefix: int | None = None
    mask_builder: str | None = None
    logits_soft_cap: float | None = None
    softmax_scale: float | None = None
    sinks: int | None = None
    bias: Shape | None = None
    alibi: bool = False
    dropout_prob: float = 0.0
    return_lse: bool = False
    precision: str | None = None
    fused_backward: bool = False
    two_way: bool = False

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Self:
        """The call that a command line describes; each option is stored under the name of its field."""
        batch, tokens, heads, dim = arguments.query
        keys, key_heads, *value_dim = arguments.kv or (tokens, heads)
        shapes = arguments.query, (batch, keys, key_heads, dim), (batch, keys, key_heads, *(value_dim or (dim,)))
        names = [field.name for field in dataclasses.fields(cls)][3:]
        return cls(*shapes, **{name: getattr(arguments, name) for name in names})

    @property
    def mesh(self) -> AbstractMesh:
        """An abstract mesh, which has no devices, with the ring as its only axis."""
        if self.ring < 1:
            raise InputError("--ring", f"got {self.ring}", "Pass the number of ranks, 1 or more")
        return AbstractMesh((self.ring,), (AXIS,))

    def floating(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the differentiable inputs, by their names in the per-shard signature."""
        heads = self.query[2]
        shapes: dict[str, Shape | None] = {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "softmax_aux": None if self.sinks is None else (heads, self.sinks),
            "bias": self.bias,
            "alibi_slopes": (heads,) if self.alibi else None,
        }
        try:
            dtypes = dict.fromkeys(shapes, jax.numpy.dtype(self.dtype))
        except TypeError:
            raise InputError("--dtype", f"got {self.dtype!r}", f"Known dtypes: {', '.join(DTYPES)}") from None
        dtypes |= dict.fromkeys(("softmax_aux", "alibi_slopes"), jax.numpy.dtype("float32"))
        return {name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in shapes.items() if shape is not None}

    def integers(self) -> dict[str, np.ndarray]:
        """Segment ids and positions in layout order. They have values, not only shapes: they decide what is visible."""
        if self.documents is None:
            if self.restart_positions:
                raise InputError("--restart-positions", "is given without documents", "Pass --documents too")
            return {}
        packed = MaskInfo.from_documents(self.documents, self.query[1], self.restart_positions)
        found = {"q_segment_ids": packed.q_segment_ids, "q_positions": packed.q_positions}
        laid = {name: to_layout(np.asarray(x), self.layout, self.ring) for name, x in found.items() if x is not None}
        laid["q_segment_ids"] = np.repeat(laid["q_segment_ids"], self.query[0], 0)
        return laid | ({"q_positions": laid["q_positions"][0]} if "q_positions" in laid else {})

    def options(self) -> dict[str, Any]:
        """The keyword arguments that are not arrays."""
        names = (
            "layout", "causal", "sliding_window", "chunk_size", "logits_soft_cap", "softmax_scale", "dropout_prob",
            "return_lse", "precision", "fused_backward", "two_way",
        )  # fmt: skip
        found = {name: getattr(self, name) for name in names} | {"axis_name": AXIS}
        if self.dropout_prob:
            found["dropout_seed"] = 0
        if self.prefix is not None:
            found["mask_builder"] = functools.partial(_prefix, self.prefix)
        if self.mask_builder is not None:
            found["mask_builder"] = _imported(self.mask_builder)
        return found

    def attend(self, floating: dict[str, jax.Array], integers: dict[str, Any], mesh: Any, backend: str) -> Any:
        """Calls `ring_attention` on a mesh of devices, with arrays like those of `floating()` and `integers()`."""
        rest = dict(floating)
        operands = (rest.pop("query"), rest.pop("key"), rest.pop("value"))
        more = (rest.pop("softmax_aux", None), rest.pop("bias", None))
        return ring_attention(*operands, *more, **rest, **integers, **self.options(), mesh=mesh, backend=backend)


def _prefix(length: int, *_: int) -> masks.Mask:
    return masks.Prefix(length) | masks.Causal()


def _imported(path: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            "--mask-builder", f"cannot load {path!r} ({error})", "Pass MODULE:FUNCTION of an importable module"
        ) from error
