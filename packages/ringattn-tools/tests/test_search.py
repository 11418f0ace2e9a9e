# SPDX-License-Identifier: Apache-2.0
"""Promises of tuning: it finds the fastest candidate, keeps the default on a tie, and skips candidates that fail."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import ring_attention
from ringattn_core.backends import discovery
from ringattn_core.call.validation import validated
from ringattn_core.config import BwdParams, FwdParams, RingAttentionConfig
from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature
from ringattn_core.contract.merge import empty
from ringattn_core.contract.protocol import Gradients, Partial
from ringattn_core.errors import TuningError
from ringattn_core.tuning import Problem, choice
from ringattn_core.tuning.problem import machine
from ringattn_tools import search
from ringattn_xla.block import KERNEL as XLA

SIZES = (8, 16, 32, 64)
DEFAULT = RingAttentionConfig(FwdParams(8), BwdParams(8))


def problem(**changes: Any) -> Problem:
    q, kv = (jnp.ones((1, changes.get(name, 4), 1, 2)) for name in ("q_length", "kv_length"))
    call = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), validated(q, kv, kv))
    fields: dict[str, Any] = {
        "backend": "mine", "batch": 1, "q_length": 4, "kv_length": 4, "heads": 1, "kv_heads": 1, "head_dim": 2,
        "value_dim": 2, "dtype": "float32", "platform": "cpu", "device": machine("cpu"), "versions": (), "call": call,
    }  # fmt: skip
    return Problem(**{**fields, **changes})


class Kernel:
    """A kernel that computes nothing. `failing` maps (part, block size) to the exception that its trace raises."""

    def __init__(self, failing: Mapping[tuple[str, int | None], Exception] | None = None):
        self.failing = dict(failing or {})
        self.traced: list[tuple[str, FwdParams | BwdParams]] = []

    def forward(self, block: Any, partial: Partial | None) -> Partial:
        self._trace("forward", block.rule.fwd_params)
        partial = empty(block) if partial is None else partial
        return Partial(partial.out + block.q.sum(), partial.lse + 1)

    def backward(self, block: Any, dout: Any, lse: Any, delta: Any, dq: Any) -> Gradients:
        self._trace("backward", block.rule.bwd_params)
        return Gradients(
            jnp.ones(block.q.shape) if dq is None else dq + 1, jnp.zeros(block.k.shape), jnp.zeros(block.v.shape)
        )

    def candidate_configs(self, problem: Problem) -> list[RingAttentionConfig]:
        return [RingAttentionConfig(FwdParams(size), BwdParams(size)) for size in SIZES]

    def _trace(self, part: str, params: FwdParams | BwdParams) -> None:
        self.traced.append((part, params))
        if (part, params.q_blocksize) in self.failing:
            raise self.failing[part, params.q_blocksize]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the clock: says for each block size how long a candidate runs, or the time of each of its rounds."""

    def use(forward: Mapping[int, Any], backward: Mapping[int, Any] | None = None) -> None:
        def seconds(run: Any, calls: int) -> float:
            jax.block_until_ready(run())
            blocks = next(cell.cell_contents for cell in run.__closure__ if isinstance(cell.cell_contents, list))
            rule, is_forward = blocks[0].rule, "partial" in run.__code__.co_varnames
            takes = forward if is_forward or backward is None else backward
            taken = takes[(rule.fwd_params if is_forward else rule.bwd_params).q_blocksize or 0]
            return next(taken) if isinstance(taken, Iterator) else taken

        monkeypatch.setattr(search, "_seconds", seconds)

    return use


@pytest.fixture
def mine() -> Iterator[Callable[..., discovery.Registration]]:
    with pytest.MonkeyPatch.context() as patch:

        def register(kernel: Any, features: frozenset[Feature] = frozenset(Feature)) -> discovery.Registration:
            backend = Backend("mine", 1, ("cpu",), features, kernel="gone:KERNEL")
            registration = discovery.Registration("mine", backend, "ringattn-mine", "1", None, kernel)
            patch.setitem(discovery._in_process, "mine", registration)
            return registration

        yield register


class TestTheFastestIsChosen:
    def test_of_forward_and_backward_separately(self, mine: Any, times: Any) -> None:
        times({8: 4.0, 16: 3.0, 32: 1.0, 64: 2.0}, {8: 4.0, 16: 1.0, 32: 3.0, 64: 2.0})
        outcome = search.fastest(mine(Kernel()), problem(), DEFAULT)
        assert outcome.config == RingAttentionConfig(FwdParams(32), BwdParams(16))

    def test_of_forward_alone_if_the_kernel_has_no_gradients(self, mine: Any, times: Any) -> None:
        times({8: 4.0, 16: 3.0, 32: 1.0, 64: 2.0})
        kernel = Kernel()
        outcome = search.fastest(mine(kernel, frozenset({Feature.FLOAT32})), problem(), DEFAULT)
        assert outcome.config == RingAttentionConfig(FwdParams(32), DEFAULT.bwd_params) and not outcome.backward
        assert {part for part, _ in kernel.traced} == {"forward"}

    @pytest.mark.parametrize(("gain", "chosen"), [(0.9 * search.TIE, 8), (2 * search.TIE, 32)])
    def test_a_tie_keeps_the_default(self, gain: float, chosen: int, mine: Any, times: Any) -> None:
        times({8: 1.0, 16: 1.2, 32: 1.0 / (1 + gain), 64: 1.2})
        outcome = search.fastest(mine(Kernel()), problem(), DEFAULT)
        assert outcome.config == RingAttentionConfig(FwdParams(chosen), BwdParams(chosen))

    def test_a_slow_minute_that_hits_one_candidate_does_not_decide(self, mine: Any, times: Any) -> None:
        # The fastest candidate is slow in a third of its rounds, by far more than its lead.
        times({8: 1.0, 16: 0.95, 32: itertools.cycle([0.8, 40.0, 0.8]), 64: 0.95})
        outcome = search.fastest(mine(Kernel()), problem(), DEFAULT)
        assert outcome.config == RingAttentionConfig(FwdParams(32), BwdParams(32))

    def test_a_slow_candidate_leaves_early_and_the_default_stays(self, mine: Any, times: Any) -> None:
        times({8: 5.0, 16: 1.0, 32: 1.04, 64: 3.0})
        outcome = search.fastest(mine(Kernel()), problem(), DEFAULT)
        rounds = {timed.params.q_blocksize: timed.rounds for timed in outcome.forward}
        assert rounds == {8: search.ROUNDS, 16: search.ROUNDS, 32: search.ROUNDS, 64: 1}


class TestACandidateThatFails:
    @pytest.mark.parametrize("part", ["forward", "backward"])
    def test_is_recorded_and_passed_over(self, part: str, mine: Any, times: Any) -> None:
        times(dict.fromkeys(SIZES, 1.0) | {16: 0.1, 32: 0.5})
        outcome = search.fastest(mine(Kernel({(part, 16): ValueError("no such tile\nmore")})), problem(), DEFAULT)
        timed = {t.params.q_blocksize: t for t in getattr(outcome, part)}
        assert timed[16].failure == "ValueError: no such tile" and timed[16].seconds is timed[32].failure is None
        chosen = outcome.config.fwd_params if part == "forward" else outcome.config.bwd_params
        assert chosen.q_blocksize == 32

    def test_with_all_others_is_an_error_that_says_why(self, mine: Any) -> None:
        failing = {("backward", size): ValueError(f"never {size}") for size in SIZES}
        with pytest.raises(TuningError, match=r"no candidate of its backward ran .*never 8; .*never 64"):
            search.fastest(mine(Kernel(failing)), problem(), DEFAULT)


class TestWhatCannotBeTuned:
    @pytest.mark.parametrize("elsewhere", [{"device": "NVIDIA H200"}, {"platform": "cuda"}])
    def test_a_problem_of_another_device(self, elsewhere: dict[str, str], mine: Any) -> None:
        with pytest.raises(TuningError, match="this process has no device"):
            search.fastest(mine(Kernel()), problem(**elsewhere), DEFAULT)


class TestWhereItRuns:
    def test_no_trace_of_the_caller_captures_it(self, mine: Any, times: Any) -> None:
        times(dict.fromkeys(SIZES, 1.0))
        registration = mine(Kernel())

        @jax.jit
        def traced(x: jax.Array) -> jax.Array:
            assert search.fastest(registration, problem(), DEFAULT).config == DEFAULT
            return x

        with jax.checking_leaks():
            text = traced.lower(jnp.ones(3)).as_text()
        assert "stablehlo.add" not in text

    def test_an_interrupt_ends_it_before_the_next_step(self, mine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        traced = []

        def trace(_: Any, *what: Any) -> None:
            traced.append(what)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.3)

        monkeypatch.setattr(Kernel, "_trace", trace)
        # A shell starts jobs in the background with this signal ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                search.fastest(mine(Kernel()), problem(q_length=8), DEFAULT)
        finally:
            signal.signal(signal.SIGINT, before)
        assert len(traced) == 1 < len(SIZES)


class SimpleKernel:
    """The kernel of `xla` with two candidates."""

    def __init__(self) -> None:
        self.rules: list[Any] = []

    def forward(self, block: Any, partial: Any) -> Any:
        self.rules.append(block.rule)
        return XLA.forward(block, partial)

    def backward(self, block: Any, *arrays: Any) -> Any:
        return XLA.backward(block, *arrays)

    def candidate_configs(self, problem: Any) -> list[RingAttentionConfig]:
        return [RingAttentionConfig(FwdParams(size)) for size in (2, 4)]


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleKernel]:
    """The kernel of the backend "real", which calls tune, and quickly."""
    monkeypatch.setenv("RINGATTN_AUTOTUNE", "on")
    monkeypatch.setenv("RINGATTN_CACHE_DIR", os.devnull)
    monkeypatch.setattr(search, "ROUNDS", 1)
    monkeypatch.setattr(search, "LEAST_SECONDS", 0.0)
    kernel = SimpleKernel()
    with discovery.registered(Backend("real", 1, ("cpu",), frozenset(Feature), kernel="gone:KERNEL"), kernel):
        yield kernel


X = jax.random.normal(jax.random.key(0), (1, 8, 2, 4))


def test_tuning_for_real_under_jit_gives_the_right_numbers(real: SimpleKernel) -> None:
    with jax.checking_leaks():
        got = jax.jit(lambda x: ring_attention(x, x, x, causal=True, backend="real"))(X)
    assert {rule.fwd_params.q_blocksize for rule in real.rules} == {None, 2, 4}
    np.testing.assert_allclose(got, jax.nn.dot_product_attention(X, X, X, is_causal=True), atol=2e-5)


def test_a_call_that_tunes_leaves_traced_programs_valid(real: SimpleKernel) -> None:
    mesh, before = jax.sharding.Mesh(jax.devices()[:1], ("sp",)), choice.state("real")
    ring_attention(X, X, X, causal=True, backend="real", mesh=mesh, axis_name="sp")
    assert real.rules and choice.state("real") == before
