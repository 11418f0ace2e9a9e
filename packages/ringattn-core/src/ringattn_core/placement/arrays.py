# SPDX-License-Identifier: Apache-2.0
"""Which axes each array of a call has, in letters, and over which mesh axes those axes are split.

The letters are those of `docs/notation.md`. A small `b`, `n` or `t` is an axis that may be 1, and is then broadcast;
`groups` has 1, `K` or `N` entries. `S_global` are the keys of the whole sequence, in natural order. No other file lists
the axes of arrays.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

from ..errors import InputError, in_one_line

Query = Float[Array, "B T N H"]
Key = Float[Array, "B S K H"]
Value = Float[Array, "B S K Hv"]
QueryIds = Int[Array, "B T"]
KeyIds = Int[Array, "B S"]
QueryPositions = Int[Array, "*b T"]
KeyPositions = Int[Array, "*b S"]
KeyRange = Int[Array, "b n T"]
Selected = Int[Array, "B T groups chosen"]
QueryOffset = Int[Array, "*b"]
Sinks = Float[Array, "N sinks"]
SharedSinks = Float[Array, " sinks"]
Bias = Float[Array, "b n t S_global"]
DenseMask = Bool[Array, "b n T S_global"]
PerHead = Float[Array, " N"]
Seed = Int[Array, ""]
Output = Float[Array, "B T N Hv"]
LogSumExp = Float[Array, "B N T"]
BATCH_AXES: Final = ("dp", "fsdp", "data", "replica")
"""The usual names of mesh axes that split the batch."""


def as_array(argument: str, x: Any) -> jax.Array:
    """`x` as a JAX array; raises for what JAX cannot convert."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            argument, f"{type(x).__name__} is not an array ({in_one_line(error)})", "Pass what jnp.asarray accepts"
        ) from error


def zero_padding(x: Shaped[Array, "B T *rest"], ids: Int32[Array, "B T"] | None) -> Shaped[Array, "B T *rest"]:
    """`x`, a result or its cotangent, with zeros for padding: the tokens with a negative id. `ids=None` is no padding.

    The cotangent of padding may hold anything. It would enter matrix products with weight 0, and `0 * NaN` is NaN.
    """
    if ids is None:
        return x
    real = jax.lax.expand_dims(ids >= 0, range(2, x.ndim))
    return jnp.where(real, x, jnp.zeros((), x.dtype))


def letters(array: Any, ndim: int | None = None) -> tuple[str, ...]:
    """The letters of an array's axes; with `ndim`, of its last `ndim` axes (some arrays may lack the first axis)."""
    found = tuple(array.dim_str.replace("*", "").split())
    return found if ndim is None else found[len(found) - ndim :]


@functools.cache
def types_of(kind: type) -> dict[str, Any]:
    """The array type of each array field of a dataclass. Fields with several array types are left out."""
    found = {}
    for field in dataclasses.fields(kind):
        types = [held for held in (field.type, *get_args(field.type)) if hasattr(held, "dim_str")]
        if len(types) == 1:
            found[field.name] = types[0]
    return found


def letters_of(kind: type) -> dict[str, tuple[str, ...]]:
    """The letters of each array field of a dataclass, from its type (`types_of`)."""
    return {name: letters(array) for name, array in types_of(kind).items()}


@functools.cache
def axes_with(kind: type, *wanted: str) -> dict[str, int]:
    """For each array field of a dataclass that has an axis with one of these letters, the number of that axis.

    `"B"` does not match an axis `b`.
    """
    named = ((name, *axis) for name, axes in letters_of(kind).items() for axis in enumerate(axes))
    return {name: number for name, number, letter in named if letter in wanted}


def fits(array: Any, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
    """Whether `shape` agrees with the letters of the array type and the known `sizes` of these letters."""
    if len(shape) > len(letters(array)) or (len(shape) < len(letters(array)) and "*" not in array.dim_str):
        return False
    named = zip(letters(array, len(shape)), shape, strict=True)
    return all(size == sizes.get(name.upper(), size) or (size == 1 and broadcasts(name)) for name, size in named)


def broadcasts(letter: str) -> bool:
    """Whether an axis with this letter may have length 1 and broadcast."""
    return letter in ("b", "n", "t", "groups")


@dataclasses.dataclass(frozen=True)
class Roles:
    """Which mesh axes carry the batch, the sequence and the heads."""

    batch: tuple[str, ...]
    sequence: tuple[str, ...]
    heads: tuple[str, ...]

    @property
    def names(self) -> dict[str, tuple[str, ...] | None]:
        """The roles as the arguments `axis_name`, `batch_axis_name` and `head_axis_name` of a call."""
        return {"axis_name": self.sequence or None, "batch_axis_name": self.batch, "head_axis_name": self.heads}

    def of(self, letter: str) -> tuple[str, ...]:
        """The mesh axes over which an axis with this letter is split."""
        carried = {"B": self.batch, "T": self.sequence, "S": self.sequence, "N": self.heads, "K": self.heads}
        carried["GROUPS"] = self.heads
        return carried.get(letter.upper() if broadcasts(letter) else letter, ())

    def spec(self, array: Any, shape: tuple[int, ...] | None = None) -> PartitionSpec:
        """How an array of this type is split over the mesh; a broadcast axis of length 1 is not split."""
        names = letters(array, None if shape is None else len(shape))
        whole = [shape is not None and broadcasts(name) and shape[i] == 1 for i, name in enumerate(names)]
        return PartitionSpec(*(() if w else self.of(name) for name, w in zip(names, whole, strict=True)))
