# SPDX-License-Identifier: Apache-2.0
"""Promises of the cost model: its sums are those of the analysis, faster links cost no time, and "auto" is allowed."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from ringattn_core import per_shard, ring_attention
from ringattn_core.backends import discovery
from ringattn_core.cli import analysis
from ringattn_core.cli.abstract_call import AbstractCall
from ringattn_core.cli.main import parsed
from ringattn_core.cli.memory import TOGETHER
from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature
from ringattn_core.contract.rule import Rule
from ringattn_core.ring import hops
from ringattn_core.strategies import choose, cost, devices
from ringattn_core.strategies.cost import Step
from ringattn_core.strategies.work import Work, visible_pairs
from separate_sends import SEPARATE, SeparateSends
from traced_calls import forget_traced_calls

H200 = devices.DEVICES["h200"]


def work(
    ranks: int = 4, length: int = 4096, heads: int = 16, kv_heads: int = 8, joint: bool = True, **rule: Any
) -> Work:
    layout = rule.pop("layout", "zigzag")
    made = Rule(1.0, **{"causal": True, **rule})
    plan = hops.plan(made, layout, ranks, length, length)
    pairs = visible_pairs(made, layout, ranks, length, length)
    return Work(1, length, length, heads, kv_heads, 128, 128, 2, pairs, plan)


def analysed(words: str, backend: str = "xla") -> analysis.CallAnalysis:
    call = AbstractCall.of(parsed(f"explain {words}".split()))
    return analysis.analyse(call, "cpu", backend)


CALLS = {
    "causal": "--query 1,16384,16,64 --kv 16384,4 --ring 4 --causal",
    "zigzag": "--query 1,16384,16,64 --kv 16384,4 --ring 8 --causal --layout zigzag",
    "window": "--query 2,16384,16,64 --ring 8 --causal --window 3000,0",
    "documents, float32": "--query 1,16384,8,64 --ring 4 --documents 9000,3000 --dtype f32",
    "two levels": "--query 1,16384,16,64 --kv 16384,4 --ring 8 --inner 2 --causal --layout zigzag",
}


@pytest.mark.parametrize("name", CALLS)
def test_bytes_pairs_and_memory_are_those_of_the_analysis(name: str) -> None:
    found = analysed(CALLS[name])
    reckoned = found.for_plans
    ring = cost.ring(reckoned, H200)
    for phase in ("forward", "backward"):
        listed = sum(row["times"] * row["bytes"] for row in found.sent if row["pass"] == phase)
        assert sum(step.sent for step in getattr(ring, phase)) == listed
    np.testing.assert_allclose(reckoned.of_hops, found.work * np.prod(found.tile))
    held = {(row["pass"], row["arrays"]): row["bytes"] for row in found.memory}
    call = sum(count for (phase, _), count in held.items() if phase == "call")
    assert ring.memory == call + max(held["forward", TOGETHER], held["backward", TOGETHER])


def test_sums_are_float32_and_keys_and_messages_are_held_twice() -> None:
    made = work(4, heads=8, kv_heads=2)
    rows = made.q_length * 8
    queries, keys = rows * 128, made.kv_length * 2 * 256
    assert cost.engine_arrays(made) == {
        "forward": {
            "K,V in use, and K,V arriving": 2 * 2 * keys,
            "partial output and lse, float32": 4 * (queries + rows),
        },
        "backward": {
            "messages being sent and received": 2 * (2 + 4) * keys,
            "dk, dv of the hop, float32": 4 * keys,
            "dk, dv of half of the own heads": 0,
            "dq, float32": 4 * queries,
            "output, lse, delta kept": 2 * queries + 8 * rows,
        },
    }


def test_separate_sends_begin_behind_half_of_the_own_heads() -> None:
    with discovery.registered(SEPARATE, SeparateSends()):
        found = analysed(CALLS["causal"], "separate")
    ring = cost.ring(found.for_plans, H200)
    first, *_, last = ring.backward
    assert first.name == "half of own keys" and first.computes == last.computes > 0
    listed = sum(row["times"] * row["bytes"] for row in found.sent if row["pass"] == "backward")
    assert sum(step.sent for step in ring.backward) == listed
    assert cost.ring(analysed(CALLS["causal"]).for_plans, H200).backward[0].hides is False


def test_two_levels_hide_behind_a_round_what_a_flat_ring_waits_for_at_every_hop() -> None:
    flat, levels = (choose.reckoned(work(32), H200, inner)[0] for inner in (None, 8))
    assert flat.sent == levels.sent and flat.memory < levels.memory
    assert all(step.hides is False for step in flat.steps if step.sent)
    between = [step for step in levels.steps if step.name.startswith("round")]
    assert [step.name for step in between] == [f"round {n}" for n in (0, 1, 2, 0, 1, 2, 3)]
    assert all(step.hides for step in between)
    hops_of_round = [step.seconds for step in levels.forward if step.name in {f"hop {n}" for n in range(8)}]
    assert between[0].beside == pytest.approx(sum(hops_of_round))
    late = dataclasses.replace(between[0], sends=between[0].beside + 1.0)
    assert late.hides is False and late.seconds == 1.0
    assert levels.waits < flat.waits / 4


@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_bounds_alone_count_nearly_the_pairs_of_the_tiles(ranks: int, layout: str) -> None:
    options = {"causal": True, "sliding_window": (5000, 0)}
    exact = np.zeros((ranks, ranks))
    length = 8192 // ranks
    order = hops.order(layout, ranks, 8192).reshape(ranks, length)
    for i, j in itertools.product(range(ranks), repeat=2):
        distance = order[i][:, None] - order[j][None]
        exact[i, j] = ((distance >= 0) & (distance <= 5000)).sum()
    counted = visible_pairs(Rule(1.0, **options), layout, ranks, length, length)
    assert counted.sum() == pytest.approx(exact.sum(), rel=0.02)
    assert np.abs(counted - exact).max() <= 0.05 * length**2


def test_a_send_hides_exactly_when_it_takes_no_longer_than_its_kernel() -> None:
    assert Step("a", 2.0, 8, 2.0).hides is True
    assert Step("a", 2.0, 8, 2.0).seconds == 2.0
    assert Step("a", 2.0, 8, 2.5).hides is False
    assert Step("a", 2.0, 8, 2.5).waits == 0.5
    assert Step("a", 2.0).hides is None
    apart = Step("a", 2.0, 8, 1.0, overlaps=False)
    assert (apart.hides, apart.seconds) == (False, 3.0)
    for step in cost.ring(work(length=512), H200).steps:
        assert step.hides in (None, step.sends <= step.computes)


@pytest.mark.parametrize("ranks", [1, 4, 32])
def test_faster_links_and_kernels_and_fewer_tokens_never_cost_time(ranks: int) -> None:
    def seconds(device: devices.Device, length: int = 2048) -> list[float]:
        return [plan.seconds for plan in choose.reckoned(work(ranks, length, heads=32, kv_heads=32), device)]

    link = H200.link(ranks)
    changes = {
        "bandwidth": H200.linked_by(dataclasses.replace(link, bandwidth=2 * link.bandwidth)),
        "latency": H200.linked_by(dataclasses.replace(link, latency=link.latency / 2)),
        "launch": dataclasses.replace(H200.linked_by(link), launch=0.0),
        "rate": dataclasses.replace(H200.linked_by(link), rates={128: (1e15, 1e15)}),
    }
    base = seconds(H200)
    for name, device in changes.items():
        better = seconds(device)
        assert all(a <= b for a, b in zip(better, base, strict=True)), name
        if name == "rate" or ranks > 1:
            assert better[-1] < base[-1], name
    assert all(a < b for a, b in zip(seconds(H200, 1024), base, strict=True))


def test_every_plan_computes_the_same_pairs() -> None:
    whole = work(8, heads=16, kv_heads=8, window=(9000, 0))
    folded = whole.over_heads(4)
    assert folded.ranks == 2 and folded.plan.offsets == (0, 1)
    assert folded.pairs.sum() == whole.pairs.sum()
    assert (folded.heads, folded.kv_heads, folded.q_length) == (4, 2, 4 * 4096)
    assert whole.over_heads(8).kv_heads == 1
    assert work(8, heads=12, kv_heads=3).over_heads(2).kv_heads == 3, "each of 3 heads twice, on 2 ranks"
    assert folded.pairs.sum() * folded.operations[0] * 4 == whole.pairs.sum() * whole.operations[0]


def test_no_plan_sends_anything_on_one_device() -> None:
    (only,) = choose.reckoned(work(1), H200)
    assert only.sent == 0 and only.waits == 0.0


def test_auto_takes_the_fastest_plans_that_the_call_allows_for_one_pass_and_for_both() -> None:
    for ranks, length, heads, kv_heads in itertools.product((2, 4, 6, 32), (256, 8192), (8, 12), (2, 4)):
        plans = choose.reckoned(work(ranks, length, heads, kv_heads), H200)
        forward, both = choose.fastest(plans, may_differ=True)
        assert forward.refusal is None and both.refusal is None
        allowed = [plan for plan in plans if plan.refusal is None]
        assert cost.total(forward.forward) == min(cost.total(plan.forward) for plan in allowed)
        assert both.seconds == min(plan.seconds for plan in allowed)
        assert choose.fastest(plans, may_differ=False) == (both, both)
        assert bool(choose.by_name(plans, "ulysses").refusal) == bool(heads % ranks)


def test_auto_changes_with_heads_backend_and_memory() -> None:
    def auto(ranks: int = 4, length: int = 1024, heads: int = 8, barred: Any = (), **device: Any) -> Any:
        plans = choose.reckoned(
            work(ranks, length, heads, heads), dataclasses.replace(H200, **device), None, dict.fromkeys(barred, "no")
        )
        forward, both = choose.fastest(plans, may_differ=True)
        return both.strategy if forward is both else (forward.strategy, both.strategy)

    assert auto() == "all_gather"
    assert auto(length=4096) == ("all_gather", "ulysses")
    assert auto(length=32768) == ("ring", "ulysses")
    assert auto(length=8192, heads=7) == "ring"
    assert auto(64, 64, heads=7) == "all_gather", "short shards over a network: 63 sends wait longer than one gather"
    assert auto(length=4096, barred=["ulysses", "all_gather"]) == "ring"
    needs = {plan.strategy: plan.memory for plan in choose.reckoned(work(64, 64, 7, 7), H200)}
    assert auto(64, 64, heads=7, memory=needs["all_gather"] - 1) == "ring"
    assert auto(64, 64, heads=7, memory=1) == "ring", "where none fits, the least memory"
    assert auto(length=4096, memory=1) == "ulysses"
    assert auto(length=4096, memory=1, barred=["ulysses"]) == "ring", "no plan that the backend cannot run"


def test_refusals_are_sentences_with_their_numbers() -> None:
    def refusal(asked: Work, inner: int) -> str | None:
        return cost.ulysses(asked, H200, inner).refusal

    assert refusal(work(4, heads=6, kv_heads=6), 4) == "6 query heads do not divide by 4 ranks"
    assert refusal(work(8, heads=16, kv_heads=2), 8) is None


def test_groups_exchange_heads_over_the_near_link() -> None:
    whole = work(32, heads=32, kv_heads=8)
    eight = cost.ulysses(whole, H200, 8)
    assert len([step for step in eight.forward if step.name.startswith("hop")]) == 4
    assert eight.forward[0].sends < cost.ulysses(whole, H200, 32).forward[0].sends
    far = dataclasses.replace(H200, near=H200.far)
    assert cost.ulysses(whole, far, 8).seconds > eight.seconds


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"), ("cpu", "cpu"), ("AMD Instinct MI300X", None),
    ],
)  # fmt: skip
def test_devices_are_found_by_the_kind_that_jax_gives(kind: str, name: str | None) -> None:
    found = devices.of_kind(kind)
    assert (found.name if found else None) == name


def test_a_head_size_has_the_rate_of_the_next_larger_kernel() -> None:
    assert H200.rate(2, 80) == H200.rates[96]
    assert H200.rate(2, 512) == H200.rates[256]
    assert H200.rate(4, 64) == H200.float32


def strategy_of(
    device: devices.Device | None, monkeypatch: pytest.MonkeyPatch, differentiated: bool = False, **options: Any
) -> str:
    """What strategy="auto" stands for in a call on a ring of 4, as its compiled program tells."""
    monkeypatch.setattr(choose, "of_kind", lambda _: device)
    forget_traced_calls()
    mesh = Mesh(np.array(jax.devices()[:4]), ("sp",))
    x = jax.ShapeDtypeStruct((1, options.pop("tokens", 64), options.pop("heads", 4), 8), jnp.float32)
    attend = functools.partial(
        ring_attention, mesh=mesh, axis_name="sp", strategy="auto", backend="xla", **{"causal": True, **options}
    )
    of_inputs = jax.grad(lambda *x: jnp.sum(attend(*x)), (0, 1, 2)) if differentiated else attend
    text = jax.jit(of_inputs).lower(x, x, x).as_text()
    found = {
        "ring": "collective_permute", "all_gather": "stablehlo.all_gather", "ulysses": "stablehlo.all_to_all",
    }  # fmt: skip
    (name,) = [name for name, operation in found.items() if operation in text]
    return name


def test_the_call_runs_the_strategy_that_auto_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = dataclasses.replace(H200, launch=0.0, float32=(1e6, 1e6))
    few_messages = H200.linked_by(devices.Link("far", bandwidth=1e15, latency=1.0))
    few_bytes = H200.linked_by(devices.Link("narrow", bandwidth=1e3, latency=0.0))
    hidden = slow.linked_by(devices.Link("quick", bandwidth=1e8, latency=1e-4))
    assert strategy_of(few_messages, monkeypatch) == "all_gather"
    assert strategy_of(few_bytes, monkeypatch) == "ulysses"
    assert strategy_of(hidden, monkeypatch, heads=3) == "ring"
    assert strategy_of(None, monkeypatch) == "ring", "a device without constants"


SLOW_TO_COPY = dataclasses.replace(H200, launch=0.0, float32=(1e6, 1e6), copy=5e8).linked_by(
    devices.Link("even", bandwidth=1e8, latency=0.0)
)
"""A device on which the forward sends of a ring hide, and copies of its partial results and gradients take long."""


def test_what_auto_stands_for_depends_on_gradients_but_not_with_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    found = functools.partial(strategy_of, SLOW_TO_COPY, monkeypatch, causal=False)
    assert (found(), found(differentiated=True)) == ("ring", "ulysses")
    bias = jnp.zeros((1, 4, 64, 64))
    assert (found(bias=bias), found(differentiated=True, bias=bias)) == ("ulysses", "ulysses")


def test_where_a_vmap_plays_the_ranks_auto_stands_for_one_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this device a `shard_map` would make "auto" the ring, and Ulysses where the call is differentiated."""
    monkeypatch.setattr(choose, "of_kind", lambda _: SLOW_TO_COPY)
    forget_traced_calls()
    x = jnp.ones((4, 1, 16, 4, 8))
    attend = functools.partial(per_shard("xla"), axis_name="sp", strategy="auto")

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(lambda x: attend(x, x, x), axis_name="sp")(x))

    assert jax.grad(loss)(x).shape == x.shape


def test_auto_leaves_a_backend_that_drives_its_own_ring_alone() -> None:
    own = Backend("own", 1, ("cpu",), frozenset(Feature), ring="nowhere:RING")
    with discovery.registered(own, lambda query, **options: query):
        x = jnp.ones((1, 8, 2, 4))
        assert ring_attention(x, x, x, backend="own", strategy="auto").shape == x.shape
        registration = discovery.get("own")
        assert set(choose.refused_by(registration, True, "zigzag", False)) == {"all_gather", "ulysses"}


def test_what_a_kernel_lacks_bars_a_strategy() -> None:
    features = frozenset(Feature)
    del features[Feature.CROSS_LENGTHS]

    class StaticMasks(SeparateSends):
        static_masks = True

    with discovery.registered(Backend("static", 1, ("cpu",), features, kernel="nowhere:K"), StaticMasks()):
        registration = discovery.get("static")
        assert set(choose.refused_by(registration, True, "zigzag", True)) == {"all_gather"}
        assert set(choose.refused_by(registration, True, "striped", True)) == {"all_gather", "ulysses"}
        assert "as many keys as queries" in choose.refused_by(registration, False, "striped", True)["all_gather"]
    assert choose.refused_by(discovery.get("xla"), True, "striped", True) == {}
