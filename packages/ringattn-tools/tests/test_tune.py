# SPDX-License-Identifier: Apache-2.0
"""Promises of `ringattn tune` and `ringattn cache`: a call runs with the configuration that they stored for it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import ring_attention
from ringattn_core.config import BwdParams, FwdParams, RingAttentionConfig
from ringattn_core.errors import RingAttnError
from ringattn_core.masks import Causal, Prefix
from ringattn_core.tuning import choice
from ringattn_tools import search, stored
from ringattn_tools.main import parsed
from ringattn_tools.search import Outcome, Timed

FASTEST = RingAttentionConfig(FwdParams(64), BwdParams())
OUTCOME = Outcome(
    FASTEST,
    (
        Timed("forward", FwdParams(), 0.002, 15),
        Timed("forward", FwdParams(32), None, 0, "ValueError: no such tile"),
        Timed("forward", FwdParams(64), 0.001, 15),
        Timed("forward", FwdParams(128, extra={"deep": 3}), 0.004, 1),
    ),
    (Timed("backward", BwdParams(), 0.003, 15),),
)


@pytest.fixture(autouse=True)
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Replaces tuning by a function that returns `OUTCOME`; gives the list of problems that it was called with."""
    problems = []

    def fastest(registration: Any, problem: Any, *_: Any) -> Outcome:
        problems.append(problem)
        return OUTCOME

    monkeypatch.setenv("RINGATTN_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(search, "fastest", fastest)
    yield problems
    choice.forget()


def ringattn(*arguments: str) -> int:
    given = parsed(arguments)
    return given.run(given)


def kept() -> list[Any]:
    return [entry.problem for entry in stored.entries()]


class TestTune:
    def test_says_where_the_result_is_stored(self, capsys: Any) -> None:
        ringattn("tune", "--query", "1,64,2,16", "--backend", "xla")
        (entry,) = stored.entries()
        assert capsys.readouterr().out.splitlines()[-1] == f"stored in {entry.path}"
        assert entry.config == FASTEST
        assert [trial["failure"] for trial in entry.trials][:2] == [None, "ValueError: no such tile"]

    def test_stores_nothing_on_a_dry_run(self, capsys: Any) -> None:
        assert ringattn("tune", "--query", "1,64,2,16", "--backend", "xla", "--dry-run") == 0
        assert kept() == []
        assert capsys.readouterr().out.splitlines()[-1] == "not stored"

    @pytest.mark.parametrize(
        ("arguments", "options"),
        [
            (["--dtype", "float32", "--causal", "--window", "5"], {"causal": True, "sliding_window": 5}),
            (["--dtype", "f32", "--window", "5,2", "--chunk", "8"], {"sliding_window": (5, 2), "chunk_size": 8}),
            (["--dtype", "f32", "--layout", "zigzag", "--ring", "2"], {"layout": "zigzag"}),
            (["--dtype", "f32", "--ring", "4", "--soft-cap"], {"logits_soft_cap": 3.0}),
            (["--dtype", "f32", "--alibi", "--precision", "high"], {"alibi_slopes": jnp.ones(2), "precision": "high"}),
            (["--dtype", "f32", "--dropout"], {"dropout_prob": 0.5, "dropout_seed": 3}),
            (["--dtype", "f32", "--documents", "9,9"], {"q_segment_ids": jnp.zeros((1, 64), jnp.int32)}),
            (["--dtype", "f32", "--prefix", "3", "--ring", "2"], {"mask_builder": lambda *_: Prefix(3) | Causal()}),
            (["--dtype", "f32", "--ring", "2", "--strategy", "all_gather"], {"strategy": "all_gather"}),
            (["--dtype", "f32", "--ring", "2", "--strategy", "ulysses"], {"strategy": "ulysses"}),
        ],
        ids=lambda x: " ".join(x) if isinstance(x, list) else "",
    )
    def test_tunes_the_problem_that_the_call_then_has(
        self, arguments: list[str], options: dict[str, Any], tuned: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ringattn("tune", "--query", "1,64,2,16", "--backend", "xla", *arguments)
        monkeypatch.setenv("RINGATTN_AUTOTUNE", "on")
        ring = int(arguments[arguments.index("--ring") + 1]) if "--ring" in arguments else 1
        x = jnp.ones((1, 64, 2, 16))
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:ring]), ("sp",))
        over = {"mesh": mesh, "axis_name": "sp"} if ring > 1 else {}
        jax.eval_shape(lambda: ring_attention(x, x, x, backend="xla", **options, **over))
        assert len(tuned) == 1

    def test_keys_values_and_their_heads_may_differ(self, tuned: list[Any]) -> None:
        ringattn("tune", "--query", "2,64,4,16", "--kv", "32,2,8", "--ring", "2", "--backend", "xla")
        (problem,) = tuned
        assert (problem.batch, problem.q_length, problem.kv_length) == (2, 32, 16)
        assert (problem.heads, problem.kv_heads, problem.head_dim, problem.value_dim) == (4, 2, 16, 8)

    def test_refuses_what_the_call_would_refuse(self, tuned: list[Any]) -> None:
        with pytest.raises(RingAttnError, match="chunk_size"):
            ringattn("tune", "--query", "1,64,2,16", "--chunk", "0")
        assert tuned == []


class TestCache:
    def test_is_listed_as_json(self, capsys: Any) -> None:
        ringattn("tune", "--query", "1,64,2,16", "--backend", "xla")
        capsys.readouterr()
        assert ringattn("cache", "--json") == 0
        (told,) = json.loads(capsys.readouterr().out)
        assert told["config"] == FASTEST.to_dict() and len(told["trials"]) == len(OUTCOME.trials)

    def test_lists_what_can_be_read_and_clears_everything(self, capsys: Any, tmp_path: Path) -> None:
        for length in (64, 32):
            ringattn("tune", "--query", f"1,{length},2,16", "--backend", "xla")
        root = tmp_path / "kept" / "tuning"
        (root / "broken.json").write_text("not JSON")
        (root / "of_a_killed_write.new").write_text('{"format"')
        assert [problem["q_length"] for problem in kept()] == [64, 32]
        capsys.readouterr()
        for count in (4, 0):
            assert ringattn("cache", "--clear") == 0
            assert capsys.readouterr().out == f"removed {count} from {root}\n"
        assert kept() == []
