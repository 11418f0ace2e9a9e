# SPDX-License-Identifier: Apache-2.0
"""Every function of core that takes `axis_name` refuses the same mistakes of axes, as the table of errors.md says."""

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ringattn_core
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import (
    decode_attention,
    from_layout,
    halo,
    layout_batch,
    prefill_attention,
    ring_attention,
    ring_loop,
    shift,
    to_layout,
    write_cache,
)
from ringattn_core.errors import InputError, MeshError
from ringattn_testing.rings import mesh_of

B, T, N, H = 2, 16, 2, 4
TOKENS = np.ones((B, T))
PAGE = Path(__file__).parents[3] / "docs" / "errors.md"


def sum_of_firsts(own: Any, theirs: Any, carry: Any) -> Any:
    """A body of `ring_loop`: the sum of the first entries of all shards."""
    first = own.arrays["own"] * 0 + theirs.arrays["theirs"][:, :1]
    return first if carry is None else carry + first


# Each function, of tokens that the ring splits and of tokens that all its ranks share.
ORDER: dict[str, Any] = {"layout": "zigzag", "ring_size": 4}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ring_attention": lambda x, _, **ring: ring_attention(x, x, x, **ring),
    "decode_attention": lambda x, few, **ring: decode_attention(few, x, x, 8, **ring),
    "prefill_attention": lambda x, _, **ring: prefill_attention(x, x, x, 8, **ring),
    "shift": lambda x, _, **ring: shift(x, 1, **ring),
    "halo": lambda x, _, **ring: halo(x, 1, **ring),
    "ring_loop": lambda x, _, **ring: ring_loop(sum_of_firsts, {"own": x}, {"theirs": x}, **ring),
    "write_cache": lambda x, few, **ring: write_cache(x, few, jnp.arange(few.shape[1]), **ring),
    "to_layout": lambda x, _, **ring: to_layout(x, **{**ORDER, **ring}),
    "from_layout": lambda x, _, **ring: from_layout(x, **{**ORDER, **ring}),
    "layout_batch": lambda x, _, **ring: layout_batch({"tokens": TOKENS}, **{"layout": "zigzag", **ring}),
}
SPLIT, WHOLE = P(None, "sp"), P()
X, FEW = jnp.ones((B, T, N, H)), jnp.ones((B, 4, N, H))
HAS = {name: inspect.signature(getattr(ringattn_core, name)).parameters for name in FUNCTIONS}


def mesh(kind: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    return mesh_of(kind, **sizes or {"data": 2, "sp": 4})


class Absent(Exception):
    """The function has no such argument, or no such form."""


def local(name: str, specs: tuple[P, P] = (SPLIT, WHOLE), check_vma: bool = True, **ring: Any) -> None:
    """A call in the caller's own `shard_map`, with these specs of the tokens and of what all ranks share."""
    if name == "layout_batch":
        raise Absent
    more = (
        {"head_axis_name": (), "batch_axis_name": ()} if "head_axis_name" in HAS[name] and "axis_name" in ring else {}
    )
    function = jax.shard_map(
        lambda x, few: jax.tree.leaves(FUNCTIONS[name](x, few, **ring, **more))[0],
        mesh=mesh(sp=4), in_specs=specs, out_specs=P("sp"), check_vma=check_vma,
    )  # fmt: skip
    jax.eval_shape(function, X, FEW)


def shared(name: str, check_vma: bool) -> None:
    if name not in ("decode_attention", "write_cache"):
        raise Absent
    local(name, (SPLIT, SPLIT), check_vma, axis_name="sp")


def over(name: str, of: Mesh | None, around: Mesh | None = None, **ring: Any) -> None:
    """A call on global arrays."""
    if name == "layout_batch" and of is None:
        raise Absent
    with contextlib.nullcontext() if around is None else jax.set_mesh(around):
        jax.eval_shape(lambda x, few: FUNCTIONS[name](x, few, mesh=of, **ring), X, FEW)


def twice(name: str) -> None:
    if "batch_axis_name" not in HAS[name]:
        raise Absent
    if name == "layout_batch":
        layout_batch({"tokens": TOKENS}, "zigzag", mesh(), axis_name="sp", batch_axis_name="sp")
    over(name, mesh(), axis_name="sp", batch_axis_name="sp")


def on_explicit(call: Callable[..., Any]) -> None:
    """`call` of arrays that explicit mesh axes split, rows and tokens, under their mesh."""
    of = mesh(AxisType.Explicit)
    with jax.set_mesh(of):
        arrays = (jax.device_put(x, NamedSharding(of, spec)) for x, spec in ((X, P("data", "sp")), (FEW, P("data"))))
        jax.eval_shape(call, *arrays)


def unsaid(name: str) -> None:
    if name == "layout_batch":
        raise Absent
    on_explicit(FUNCTIONS[name])


def half_manual(name: str) -> None:
    """A call in a `shard_map` over the ring alone, of arrays whose rows explicit mesh axes split."""
    if name in ("layout_batch", "to_layout", "from_layout"):
        raise Absent
    on_explicit(
        jax.shard_map(
            lambda x, few: jax.tree.leaves(FUNCTIONS[name](x, few, axis_name="sp"))[0],
            in_specs=(SPLIT, WHOLE), out_specs=SPLIT, axis_names={"sp"},
        )
    )  # fmt: skip


def misplaced(name: str) -> None:
    if name in ("layout_batch", "to_layout", "from_layout"):
        raise Absent
    over(name, mesh(), axis_name="sp")


# Each mistake, what tries it, and what happens to a function that does not refuse it.
MISTAKES: dict[str, tuple[Callable[[str], None], str]] = {
    "your own `shard_map`, without `axis_name`": (local, "silent"),
    "the same under `check_vma=False`": (lambda name: local(name, check_vma=False), "silent"),
    "tokens replicated over the ring": (lambda name: local(name, (WHOLE, WHOLE), axis_name="sp"), "silent"),
    "tokens replicated, under `check_vma=False`": (
        lambda name: local(name, (WHOLE, WHOLE), False, axis_name="sp"),
        "checked",
    ),
    "queries or entries for all ranks, split over the ring": (lambda name: shared(name, True), "silent"),
    "these split, under `check_vma=False`": (lambda name: shared(name, False), "checked"),
    "`mesh=` in your own `shard_map`": (lambda name: local(name, axis_name="sp", mesh=mesh(sp=4)), "silent"),
    "a `shard_map` over the ring only, explicit axes beside it": (half_manual, "right"),
    "an axis that the mesh does not have": (lambda name: over(name, mesh(), axis_name="seq"), "silent"),
    "an axis, and no mesh": (lambda name: over(name, None, axis_name="sp"), "silent"),
    "another mesh than that of `jax.set_mesh`": (lambda name: over(name, mesh(), mesh(x=8), axis_name="sp"), "silent"),
    "one axis for tokens and for rows": (twice, "silent"),
    "explicit axes split tokens, without `axis_name`": (unsaid, "right"),
    "an unknown `layout`": (lambda name: over(name, mesh(), axis_name="sp", layout="zigzg"), "silent"),
    "tokens in another order than `layout` says": (misplaced, "checked"),
}
COLUMNS = (
    ("ring_attention", "prefill_attention"),
    ("decode_attention",),
    ("shift", "halo", "ring_loop"),
    ("write_cache",),
    ("to_layout", "from_layout"),
    ("layout_batch",),
)


def outcome(mistake: str, name: str) -> str:
    """What happens: an error, or what `MISTAKES` says; a dash if the function has no such form or argument."""
    attempt, otherwise = MISTAKES[mistake]
    try:
        attempt(name)
    except (InputError, MeshError):
        return "raises"
    except Absent:
        return "-"
    return "silent" if otherwise == "checked" and not name.endswith("_attention") else otherwise


def row(mistake: str) -> str:
    cells = [{outcome(mistake, name) for name in names} for names in COLUMNS]
    assert all(len(cell) == 1 for cell in cells), f"{mistake}: functions of one column differ: {cells}"
    return f"| {' | '.join([mistake, *(cell.pop() for cell in cells)])} |"


def test_every_function_with_an_axis_name_has_a_column() -> None:
    public = {name: getattr(ringattn_core, name) for name in ringattn_core.__all__ if name != "ring_mesh"}
    taking = {
        name for name, x in public.items() if inspect.isfunction(x) and "axis_name" in inspect.signature(x).parameters
    }
    assert taking == FUNCTIONS.keys() == {name for names in COLUMNS for name in names}
    head = f"| | {' | '.join(', '.join(f'`{name}`' for name in names) for names in COLUMNS)} |"
    assert head in PAGE.read_text().splitlines(), f"the table of {PAGE.name} needs this head:\n{head}"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_happens_to_a_mistake_is_what_the_document_says(mistake: str) -> None:
    assert (found := row(mistake)) in PAGE.read_text().splitlines(), (
        f"the table of {PAGE.name} needs this row:\n{found}"
    )
