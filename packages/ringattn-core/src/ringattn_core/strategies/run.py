# SPDX-License-Identifier: Apache-2.0
"""Chooses the strategy of a rank's call, by name or for "auto" by a rule, and runs it."""

from typing import Any

import jax

from ..backends.discovery import Registration
from ..contract.call import Call
from ..contract.features import Feature
from ..contract.protocol import BlockKernel
from ..contract.static_masks import wants_key_indices, wants_static_masks
from ..contract.varying import align
from ..errors import InputError
from ..placement import axes
from ..placement.layout import Shards
from ..ring import engine
from ..ring.plan import rows_seen
from ..tuning.choice import with_parameters
from . import STRATEGIES, balance, ulysses


def strategy_of(registration: Registration | None, call: Call, sizes: tuple[int, int] | None = None) -> str:
    """The strategy that runs a rank's call: "ring", "all_gather" or "ulysses". `registration=None` allows all of them.

    `sizes` are the numbers of ranks of the ring and of its last mesh axis, by default those of the surrounding mesh.
    Only shapes and static options decide, so all ranks decide alike. On one rank every strategy becomes "ring".

    Raises `InputError` if the call names a strategy that cannot run the call, or that its backend cannot run.
    """
    axis = call.placement.roles.sequence
    ranks, inner = sizes or (axes.size(axis), axes.size(axis[-1:]))
    if ranks == 1 or call.placement.strategy == "ring":
        return "ring"
    why_not = refusals(registration, call, ranks, inner)
    if call.placement.strategy == "auto":
        return "ulysses" if "ulysses" not in why_not and _suits_ulysses(call, ranks, inner) else "ring"
    if call.placement.strategy in why_not:
        fact = f"{call.placement.strategy!r} cannot run this call: {why_not[call.placement.strategy]}"
        raise InputError("strategy", fact, "Pass 'ring', or 'auto' for what can run it")
    return call.placement.strategy


def _suits_ulysses(call: Call, ranks: int, inner: int) -> bool:
    """Whether "auto" chooses "ulysses": if the ring would leave out no keys, and the key heads divide evenly.

    The ranks of the last mesh axis exchange the heads, so they must divide the number of key heads. Not with `expand`,
    because "ulysses" exchanges the keys and values themselves.
    """
    if call.expand is not None or inner == 1 or call.key.shape[2] % inner:
        return False
    rows = rows_seen(call.reach_of_hops, Shards(call.placement.layout, ranks), (call.query.shape[1], call.key.shape[1]))
    return len(rows) == ranks and {*rows.values()} == {rows[0]}


def refusals(registration: Registration | None, call: Call, ranks: int, inner: int) -> dict[str, str]:
    """The strategies that cannot run the call, each with the reason: the call's heads, or what the backend lacks."""
    why_not: dict[str, str] = {}
    if registration is not None and registration.descriptor().kernel is None:
        own = f"backend {registration.name!r} drives its own ring"
        return {name: own for name in STRATEGIES if name not in ("ring", "auto")}
    if registration is not None and call.reach.causal and _has_static_masks_only(registration.implementation()):
        # In a striped ring of groups a shard has runs of consecutive tokens, for which there is no static mask.
        striped_groups = inner < ranks and call.placement.layout == "striped"
        lacking = ("all_gather", "ulysses") if striped_groups else ("all_gather",)
        why_not |= dict.fromkeys(lacking, f"the kernel of backend {registration.name!r} does not have the masks")
    if registration is not None and not registration.descriptor().supports(Feature.CROSS_LENGTHS):
        why_not["all_gather"] = f"backend {registration.name!r} needs as many keys as queries"
    heads = call.query.shape[2]
    return why_not | ({"ulysses": f"{heads} query heads do not divide by {inner} ranks"} if heads % inner else {})


def _has_static_masks_only(kernel: BlockKernel) -> bool:
    return wants_static_masks(kernel) and not wants_key_indices(kernel)


def run(registration: Registration, call: Call) -> Any:
    """A rank's output, or a tuple if `call.results` has more. Its strategy is one that `strategy_of` returns."""
    exchanged = with_parameters(registration, for_engine(call))
    # After "ulysses" in the striped layout, a run of consecutive tokens has one token of each rank of the last axis.
    by_heads = call.placement.strategy == "ulysses"
    stripe = axes.size(call.placement.roles.sequence[-1:]) if by_heads else 1
    kernel = registration.implementation()
    partial = engine.run(kernel, exchanged, stripe)
    assert partial.out is not None
    out, lse, largest = partial.out, partial.lse, partial.max_logits
    out, lse = balance.unfolded(exchanged, out, lse) if call.placement.balance else (out, lse)
    out, lse = ulysses.by_tokens(call, out, lse) if by_heads else (out, lse)
    results = {"out": out, "lse": lse}
    if largest is not None:  # it has no gradient, and neither has a maximum over ranks
        of_heads = jax.lax.stop_gradient(largest).max((0, 2))
        results["max_logits"] = _over_ranks(call, ulysses.of_all_heads(call, of_heads) if by_heads else of_heads)
    asked = tuple(results[name] for name in call.results)
    return asked if len(asked) > 1 else out


def _over_ranks(call: Call, max_logits: jax.Array) -> jax.Array:
    """The maximum of `max_logits` over the ranks of the ring and of the batch.

    A call need not name axes of size 1. But JAX may track that `max_logits` varies over them, and only a maximum over
    them tells it otherwise.
    """
    named = (*call.placement.roles.sequence, *call.placement.roles.batch)
    alone = {name for name in axes.varying(max_logits) if axes.size((name,)) == 1}
    over = (*named, *sorted(alone - {*named}))
    own = align(max_logits, axes.tracked() & {*over})
    return jax.lax.pmax(own, over) if over else own


def for_engine(call: Call) -> Call:
    """The call that the engine runs: ranks have exchanged heads for tokens ("ulysses") and half shards (`balance`)."""
    call = ulysses.by_heads(call.expanded()) if call.placement.strategy == "ulysses" else call
    return balance.folded(call) if call.placement.balance else call
