# SPDX-License-Identifier: Apache-2.0
"""How a case runs: on a ring of devices, alone or as one axis of a mesh, or emulated on one device."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from ringattn_core import ring_attention
from ringattn_core.config import RingAttentionConfig
from ringattn_core.contract.call import ARRAYS
from ringattn_core.contract.features import Feature
from ringattn_core.placement import arrays
from ringattn_core.placement.arrays import Roles

from . import oracle
from .cases import KEYWORDS, OF_GRADIENTS, OPERANDS, Case, Inputs, keywords

RING: Final = "ring"
DATA: Final = "data"
HEADS: Final = "heads"
ROLES: Final = Roles((DATA,), (RING,), (HEADS,))
KINDS: Final = {name: ARRAYS[keyword] for name, keyword in KEYWORDS.items()} | {
    "out": arrays.Output, "lse": arrays.LogSumExp, "max_logits": arrays.PerHead,
}  # fmt: skip
"""The array type of every input and result of a call; the type names the axes by letters."""
WORKER: Final = "PYTEST_XDIST_WORKER"
"""Holds `gw0`, `gw1` and so on in workers of pytest-xdist."""
Arrays = dict[str, jax.Array]
Local = Callable[[Arrays, Arrays], Arrays]
"""Runs one rank's call, from its differentiable and its other inputs to its results: `out`, `lse`, `max_logits`."""


def rotated_devices() -> list[jax.Device]:
    """All devices of JAX, rotated so that worker `i` begins with device `i`.

    So a worker's rings can use every device, and calls on one device are spread over all devices.
    """
    devices = jax.devices()
    first = int(os.environ.get(WORKER, "gw0").removeprefix("gw")) % len(devices)
    return [*devices[first:], *devices[:first]]


@dataclasses.dataclass(frozen=True)
class Placement:
    """A ring size and a layout, in a mesh that may also split the batch (over `data` devices) and the heads.

    If `emulated`, one device plays all ranks of the ring by `vmap`.
    """

    ring: int = 4
    layout: str = "contiguous"
    data: int = 1
    heads: int = 1
    check_vma: bool = True
    emulated: bool = False
    strategy: str = "ring"

    def __str__(self) -> str:
        parts = [f"ring{self.ring}", self.layout]
        parts += [f"data{self.data}"] if self.data > 1 else []
        parts += [f"heads{self.heads}"] if self.heads > 1 else []
        parts += [] if self.strategy == "ring" else [self.strategy]
        parts += [] if self.check_vma or self.emulated else ["unchecked"]
        return "-".join([*parts, "emulated"] if self.emulated else parts)

    @property
    def devices(self) -> int:
        return 1 if self.emulated else self.ring * self.data * self.heads

    @property
    def needs(self) -> frozenset[Feature]:
        asked = {"zigzag": [Feature.ZIGZAG], "striped": [Feature.STRIPED]}.get(self.layout, [])
        return frozenset([*asked, Feature.CROSS_LENGTHS] if self.strategy == "all_gather" else asked)

    @property
    def mesh(self) -> Mesh:
        taken = np.array(rotated_devices()[: self.devices])
        return Mesh(taken.reshape(self.data, self.ring, self.heads), (DATA, RING, HEADS))

    def here(self) -> "Placement":
        """This placement, or one device that emulates its ring alone if there are too few devices for the mesh."""
        enough = self.devices <= len(jax.devices())
        return self if enough else dataclasses.replace(self, emulated=True, data=1, heads=1)


@dataclasses.dataclass(frozen=True)
class Placed:
    """A case on a placement: arrays in layout order, how they shard, and the call of one rank."""

    case: Case
    placement: Placement
    backend: str
    inputs: Inputs

    @property
    def operands(self) -> Arrays:
        problem = self.inputs.problem
        given = {name: getattr(problem, name) for name in OPERANDS if not (name == "bias" and self.case.bias_fixed)}
        return {name: jnp.asarray(self.laid_out(name, x)) for name, x in given.items() if x is not None}

    @property
    def fixed(self) -> Arrays:
        bias = self.inputs.problem.bias
        given = self.inputs.fixed | ({"bias": bias} if self.case.bias_fixed and bias is not None else {})
        return {name: jnp.asarray(self.laid_out(name, x)) for name, x in given.items()}

    @property
    def cotangents(self) -> Arrays:
        """The cotangent of each result. That of `max_logits` is all ones, and must change no gradient."""
        ones = np.ones(self.case.heads, np.float32) if self.case.max_logits else None
        given = {"out": self.inputs.dout, "lse": self.inputs.dlse, "max_logits": ones}
        return {name: jnp.asarray(self.laid_out(name, x)) for name, x in given.items() if x is not None}

    def laid_out(self, name: str, x: Any, inverse: bool = False) -> np.ndarray:
        """The array with its sequence axis reordered from natural to layout order, or back if `inverse`."""
        axis = self.axis_of_tokens(name, np.shape(x))
        if axis is None:
            return np.asarray(x)
        order = oracle.order(self.placement.layout, self.placement.ring, np.shape(x)[axis])
        return np.take(np.asarray(x), np.argsort(order) if inverse else order, axis)

    def spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """The sharding of an array over the mesh; broadcast axes of length 1 are replicated."""
        bound = arrays.KeyRange if len(shape) > 2 else arrays.QueryPositions
        return ROLES.spec(bound if name in ("first", "last") else KINDS[name], shape)

    def axis_of_tokens(self, name: str, shape: tuple[int, ...]) -> int | None:
        """The axis that the ring splits; `None` if the ring splits no axis of this array."""
        names = self.spec(name, shape)
        return names.index(RING) if RING in names else None

    def local(self, operands: Arrays, fixed: Arrays, **more: Any) -> Arrays:
        """One rank's call of `ring_attention`; `more` overrides its keyword arguments."""
        placement, case = self.placement, self.case
        options: dict[str, Any] = {"axis_name": RING, "backend": self.backend, **static_options(case)}
        options |= keywords(operands | fixed)
        if placement.layout != "contiguous":
            options["layout"] = placement.layout
        if placement.strategy != "ring":
            options["strategy"] = placement.strategy
        if placement.data > 1:
            options["batch_axis_name"] = DATA
        if placement.heads > 1:
            options["head_axis_name"] = HEADS
        return self.by_name(ring_attention(**options | more))

    def by_name(self, results: Any) -> Arrays:
        """The results of `ring_attention`, which are one array or a tuple, by name."""
        asked = {"out": True, "lse": self.case.lse, "max_logits": self.case.max_logits}
        arrays = results if isinstance(results, tuple) else (results,)
        return dict(zip((name for name in asked if asked[name]), arrays, strict=True))

    def everywhere(self, local: Local | None = None) -> Local:
        """A function of global arrays, in layout order, that runs `local` (default: `self.local`) on every rank."""
        local = local or self.local
        if self.placement.emulated:
            return functools.partial(self._emulated, local)
        *in_specs, out_specs = self.specs
        mesh, check_vma = self.placement.mesh, self.placement.check_vma
        return jax.shard_map(local, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=check_vma)

    @property
    def specs(self) -> tuple[dict[str, PartitionSpec], ...]:
        """The shardings of the differentiable inputs, of the other inputs, and of the results."""
        trees = self.operands, self.fixed, self.cotangents
        return tuple({name: self.spec(name, x.shape) for name, x in tree.items()} for tree in trees)

    def _emulated(self, local: Local, operands: Arrays, fixed: Arrays) -> Arrays:
        def split(name: str, x: jax.Array) -> jax.Array:
            axis = self.axis_of_tokens(name, x.shape)
            return x if axis is None else x.reshape(*x.shape[:axis], self.placement.ring, -1, *x.shape[axis + 1 :])

        results = self.cotangents
        trees = operands, fixed, results
        *in_axes, axes = ({name: self.axis_of_tokens(name, x.shape) for name, x in tree.items()} for tree in trees)
        shards = [{name: split(name, x) for name, x in tree.items()} for tree in (operands, fixed)]
        out_axes = {name: axis or 0 for name, axis in axes.items()}
        found = jax.vmap(local, tuple(in_axes), out_axes, axis_name=RING)(*shards)
        return {n: x[0] if axes[n] is None else x.reshape(results[n].shape) for n, x in found.items()}

    def changed(self, **arrays: Any) -> "Placed":
        """The same placed case with these arrays, or this `seed`, in its problem; cotangents stay."""
        problem = dataclasses.replace(self.inputs.problem, **arrays)
        return dataclasses.replace(self, inputs=dataclasses.replace(self.inputs, problem=problem))

    def natural(self, found: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The results, and then the gradients, as NumPy arrays in natural order."""
        ordered = sorted(found, key=OF_GRADIENTS.__contains__)
        return {name: self.laid_out(OF_GRADIENTS.get(name, name), found[name], inverse=True) for name in ordered}


def place(case: Case, placement: Placement, backend: str) -> Placed:
    """The case on the placement, with head sizes that the backend takes (`Case.with_heads_for`)."""
    case = case.with_heads_for(backend)
    return Placed(case, placement.here(), backend, case.inputs)


def with_gradients(everywhere: Local) -> Callable[[Arrays, Arrays, Arrays], Arrays]:
    """Turns `everywhere` into one function that returns its results and the gradients of all operands."""

    def both(operands: Arrays, fixed: Arrays, cotangents: Arrays) -> Arrays:
        results, pull = jax.vjp(lambda x: everywhere(x, fixed), operands)
        return results | {OPERANDS[name]: x for name, x in pull(cotangents)[0].items()}

    return both


def run(placed: Placed, gradients: bool = True, local: Local | None = None) -> dict[str, np.ndarray]:
    """Compiles and runs the case on its ranks; returns results and gradients by name, in natural order.

    `local` replaces the call of one rank.
    """
    everywhere = placed.everywhere(local)
    if not gradients:
        return placed.natural(jax.jit(everywhere)(placed.operands, placed.fixed))
    return placed.natural(jax.jit(with_gradients(everywhere))(placed.operands, placed.fixed, placed.cotangents))


def static_options(case: Case) -> dict[str, Any]:
    """The case's keyword arguments of `ring_attention` that are not arrays, without those at their defaults."""
    sizes = case.block_size and {"q_blocksize": case.block_size, "kv_blocksize": case.block_size}
    given = {
        "causal": case.causal, "sliding_window": case.window, "chunk_size": case.chunk,
        "logits_soft_cap": case.soft_cap, "softmax_scale": case.scale, "dropout_prob": case.dropout or None,
        "return_lse": case.lse, "return_max_logits": case.max_logits, "fused_backward": case.fused_backward,
        "precision": case.precision,
        "selected_size": case.selected_size if case.selected else None,
        "mask_builder": case.masks_of_heads.build if case.masks_of_heads else None,
        "cfg": RingAttentionConfig(sizes, sizes) if sizes else None,
    }  # fmt: skip
    return {name: x for name, x in given.items() if x is not None and x is not False}
