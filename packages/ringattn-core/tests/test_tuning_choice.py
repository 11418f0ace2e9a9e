# SPDX-License-Identifier: Apache-2.0
"""Promises of the choice: kernels run with the call's parameters, else an overlay's, else tuned ones, else defaults."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ringattn_core import ring_attention
from ringattn_core.backends import discovery
from ringattn_core.call.validation import validated
from ringattn_core.config import BwdParams, FwdParams, RingAttentionConfig
from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature
from ringattn_core.errors import InputError, ToolsNotFoundError, TuningError
from ringattn_core.ring import engine
from ringattn_core.tuning import choice, forget, overlay
from ringattn_core.tuning.problem import of_call
from ringattn_testing.rings import warnings
from ringattn_testing.traced_calls import forget_traced_calls
from ringattn_tools import policy, search, tuned_files

KERNEL = """
from ringattn_core.config import BwdParams, FwdParams, RingAttentionConfig
from ringattn_core.contract.features import Feature
from ringattn_core.contract.backend import Backend
from ringattn_xla.block import KERNEL as XLA

class Recording:
    "The kernel of `xla`, which says with which rules it was traced; what it would choose is 4 and 5."

    def __init__(self):
        self.rules = []

    def forward(self, block, partial):
        self.rules.append(block.rule)
        return XLA.forward(block, partial)

    def backward(self, block, *arrays):
        self.rules.append(block.rule)
        return XLA.backward(block, *arrays)

    def default_config(self, problem):
        return RingAttentionConfig(FwdParams(4), BwdParams(5))

    def candidate_configs(self, problem):
        return [RingAttentionConfig(FwdParams(size), BwdParams(size)) for size in (2, 8)]

KERNEL = Recording()
BACKEND = Backend("mine", 1, ("cpu",), frozenset(Feature), kernel="mine_kernel:KERNEL")
"""
OWN, TUNED, GIVEN, OVER = (
    RingAttentionConfig(FwdParams(forward), BwdParams(backward))
    for forward, backward in ((4, 5), (2, 8), (6, 7), (3, 1))
)
X = jax.random.normal(jax.random.key(0), (1, 8, 2, 4))
MESH = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("sp",))


def searches(monkeypatch: pytest.MonkeyPatch, tune: Any) -> None:
    """Puts `tune` in the place of the search of `ringattn-tools`."""
    monkeypatch.setattr(search, "tune", tune)


@pytest.fixture
def mine(install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernel of an installed backend. Calls tune it, which returns `TUNED`; `tunings` records each problem."""
    monkeypatch.setenv("RINGATTN_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("RINGATTN_AUTOTUNE", "on")
    install("ringattn-mine", {"mine": "mine_kernel:BACKEND"}, {"mine_kernel": KERNEL})
    kernel = discovery.get("mine").implementation()
    kernel.tunings = []

    def tune(problem: Any, registration: Any) -> None:
        kernel.tunings.append(problem)
        tuned_files.store(registration, problem, TUNED, [])

    searches(monkeypatch, tune)
    yield kernel
    forget_traced_calls()


def ran(kernel: Any, **options: Any) -> RingAttentionConfig:
    """The parameters that a new call runs with, forward and backward."""
    forget_traced_calls()
    kernel.rules.clear()
    jax.eval_shape(jax.grad(lambda x: ring_attention(x, x, x, backend="mine", **options).sum()), X)
    (found,) = {RingAttentionConfig(rule.fwd_params, rule.bwd_params) for rule in kernel.rules}
    return found


def traced_over_mesh(kernel: Any) -> set[FwdParams]:
    """The forward parameters for which a call over a mesh is traced; none if it is compiled already."""
    engine._attend.clear_cache()  # else a new trace of the call may contain an old trace of the ring
    kernel.rules.clear()
    ring_attention(X, X, X, backend="mine", mesh=MESH, axis_name="sp")
    return {rule.fwd_params for rule in kernel.rules}


def mixed(forward: RingAttentionConfig, backward: RingAttentionConfig) -> RingAttentionConfig:
    return RingAttentionConfig(forward.fwd_params, backward.bwd_params)


class _WithoutTools:
    """An import hook that hides `ringattn-tools`."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "ringattn_tools":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class TestTheOrder:
    def test_what_the_call_gives_comes_first(self, mine: Any) -> None:
        with overlay(OVER):
            assert ran(mine, cfg=GIVEN) == GIVEN
        assert mine.tunings == []

    @pytest.mark.parametrize("outer", [None, OVER])
    def test_forward_and_backward_are_chosen_separately(self, outer: RingAttentionConfig | None, mine: Any) -> None:
        rest = TUNED if outer is None else outer
        with overlay(outer or RingAttentionConfig()):
            assert ran(mine, cfg={"fwd_params": GIVEN.fwd_params}) == mixed(GIVEN, rest)
            assert ran(mine, cfg={"bwd_params": GIVEN.bwd_params}) == mixed(rest, GIVEN)


class TestAnOverlay:
    def test_the_innermost_that_sets_forward_or_backward_decides_it(self, mine: Any) -> None:
        with overlay(OVER), overlay({"fwd_params": GIVEN.fwd_params}):
            assert ran(mine) == mixed(GIVEN, OVER)

    def test_that_names_a_backend_applies_to_that_backend_only(self, mine: Any) -> None:
        with overlay({**OVER.to_dict(), "backend": "other"}):
            assert (ran(mine), traced_over_mesh(mine)) == (TUNED, {TUNED.fwd_params})
        assert traced_over_mesh(mine) == set()
        with overlay({**OVER.to_dict(), "backend": "mine"}):
            assert ran(mine) == OVER

    def test_reaches_a_compiled_call_over_a_mesh(self, mine: Any) -> None:
        for config in (OWN, OVER, GIVEN):
            with overlay(config):
                assert traced_over_mesh(mine) == {config.fwd_params}

    def test_reaches_a_ring_function(self) -> None:
        seen = []

        def whole(query: Any, key: Any, value: Any, *_: Any, **options: Any) -> Any:
            seen.append((options["fwd_params"], options["bwd_params"]))
            return value

        backend = Backend("whole", 1, ("cpu",), frozenset(Feature), ring="gone:ring")
        with discovery.registered(backend, whole), overlay(OVER):
            ring_attention(X, X, X, backend="whole")
        assert seen == [(OVER.fwd_params, OVER.bwd_params)]


class TestThePolicy:
    def test_on_tunes_once_and_keeps_it_for_every_process(self, mine: Any) -> None:
        assert ran(mine) == ran(mine) == TUNED
        forget()
        assert ran(mine) == TUNED
        assert len(mine.tunings) == 1

    @pytest.mark.parametrize("said", [None, "CACHED ", ""])
    def test_cached_takes_what_was_tuned_before(
        self, said: str | None, mine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran(mine)
        forget()
        monkeypatch.delenv("RINGATTN_AUTOTUNE") if said is None else monkeypatch.setenv("RINGATTN_AUTOTUNE", said)
        assert ran(mine) == TUNED
        assert ran(mine, causal=True) == OWN
        assert len(mine.tunings) == 1

    def test_off_reads_no_cache(self, mine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        ran(mine)
        monkeypatch.setenv("RINGATTN_AUTOTUNE", "off")
        assert ran(mine) == OWN
        with overlay(OVER):
            assert ran(mine) == OVER

    def test_an_unknown_one_is_refused_with_those_that_there_are(
        self, mine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RINGATTN_AUTOTUNE", "always")
        with pytest.raises(InputError, match=r"RINGATTN_AUTOTUNE: got 'always'\. Set it to one of off, cached, on"):
            ran(mine)

    def test_a_tuning_that_fails_is_told_once_and_the_default_runs(
        self, mine: Any, log: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> Any:
            raise TuningError("mine", "no candidate of its forward ran", "Tune a smaller problem")

        searches(monkeypatch, fail)
        assert ran(mine) == ran(mine) == OWN
        assert len(warnings(log)) == 1
        assert warnings(log)[0].endswith("Tune a smaller problem. Its default is used")

    def test_on_without_the_tools_is_one_error_that_says_how_to_get_them(
        self, mine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("ringattn_tools", "ringattn_tools.policy", "ringattn_tools.check"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        finders = [_WithoutTools(), *sys.meta_path]
        monkeypatch.setattr(sys, "meta_path", finders)
        monkeypatch.setenv("RINGATTN_AUTOTUNE", "cached")
        assert ran(mine) == OWN, "nothing is missing where nothing is to be tuned"
        monkeypatch.setenv("RINGATTN_AUTOTUNE", "on")
        with pytest.raises(ToolsNotFoundError, match=r"^RINGATTN_AUTOTUNE=on needs .* pip install \S*ringattn-tools"):
            ran(mine)
        assert ran(mine, cfg=GIVEN) == GIVEN
        monkeypatch.setenv("RINGATTN_CHECK", "1")
        with pytest.raises(ToolsNotFoundError, match=r"^RINGATTN_CHECK=1 needs .* pip install \S*ringattn-tools"):
            ran(mine, cfg=GIVEN)

    @pytest.mark.parametrize("unset", ["RINGATTN_AUTOTUNE", "RINGATTN_CACHE_DIR"])
    def test_several_processes_all_choose_the_same(
        self, unset: str, mine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No process tunes then, and the cache is read only if all processes were given the same directory."""
        ran(mine)
        monkeypatch.delenv(unset)
        monkeypatch.setattr(policy.jax, "process_count", lambda: 2)
        assert ran(mine) == (OWN if unset == "RINGATTN_CACHE_DIR" else TUNED)
        assert ran(mine, causal=True) == OWN
        assert len(mine.tunings) == 1


class TestUnderATrace:
    def test_a_ring_is_one_problem_over_a_mesh_and_inside_shard_map(self, mine: Any) -> None:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "sp"))
        x = jnp.concatenate([X, X])
        options = {"backend": "mine", "axis_name": "sp", "causal": True, "layout": "zigzag", "batch_axis_name": "data"}
        ring_attention(x, x, x, mesh=mesh, **options)
        spec = P("data", "sp")
        inside = jax.shard_map(
            lambda x: ring_attention(x, x, x, **options),
            mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False,
        )  # fmt: skip
        jax.jit(inside)(x)
        (problem,) = mine.tunings
        assert (problem.batch, problem.q_length, problem.ranks, problem.call.placement.layout) == (1, 4, 2, "zigzag")

    def test_a_compiled_call_over_a_mesh_gets_what_is_tuned_later(
        self, mine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RINGATTN_AUTOTUNE", "cached")
        assert traced_over_mesh(mine) == {OWN.fwd_params}
        ((registration, problem),) = choice._known
        choice.store(registration, problem, TUNED)
        assert [traced_over_mesh(mine) for _ in range(2)] == [{TUNED.fwd_params}, set()]


def test_a_backend_without_candidates_runs_with_the_parameters_of_the_call_and_no_cache(
    mine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("default_config", "candidate_configs"):
        monkeypatch.delattr(type(mine), name)
    assert ran(mine) == RingAttentionConfig()
    assert mine.tunings == []
    assert not (tmp_path / "kept").exists()


def test_two_threads_tune_a_problem_once(mine: Any) -> None:
    registration = discovery.get("mine")
    problem = of_call(registration, validated(X, X, X), 1)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: choice.configured(registration, problem), range(8)))
    assert found == [TUNED] * 8
    assert len(mine.tunings) == 1
