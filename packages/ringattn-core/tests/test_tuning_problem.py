# SPDX-License-Identifier: Apache-2.0
"""Promises of `Problem`: it holds all that can change which configuration is fastest, and nothing else."""

import dataclasses
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.backends import discovery
from ringattn_core.call.validation import validated
from ringattn_core.masks import Causal, Document, Numpy, Predicate, Prefix
from ringattn_core.tuning import Problem, choice
from ringattn_core.tuning.problem import machine, of_call

T, S, N, K, H, HV = 16, 16, 4, 2, 8, 8
Q = jnp.ones((2, T, N, H))
KV = jnp.ones((2, S, K, H))
IDS = jnp.zeros((2, T), jnp.int32)
POSITIONS = jnp.arange(T, dtype=jnp.int32)


def of(ranks: int = 1, q: Any = Q, k: Any = KV, v: Any = None, **options: Any) -> Problem:
    call = validated(q, k, k if v is None else v, **options, ranks=ranks)
    return of_call(discovery.get("xla"), call, ranks)


MATTERS: dict[str, dict[str, Any]] = {
    "length": {"q": jnp.ones((2, T // 2, N, H))},
    "batch": {"q": Q[:1], "k": KV[:1]},
    "heads": {"q": Q[:, :, :2]},
    "key heads": {"k": KV[:, :, :1]},
    "value size": {"v": jnp.ones((2, S, K, 4))},
    "dtype": {"q": Q.astype(jnp.bfloat16), "k": KV.astype(jnp.bfloat16)},
    "ring": {"ranks": 2},
    "layout": {"layout": "zigzag"},
    "causal": {"causal": True},
    "window": {"sliding_window": 3},
    "wider window": {"sliding_window": (4, 3)},
    "chunk": {"chunk_size": 4},
    "soft cap": {"logits_soft_cap": 5.0},
    "dropout": {"dropout_prob": 0.5, "dropout_seed": 1},
    "segments": {"q_segment_ids": IDS},
    "slopes": {"alibi_slopes": jnp.ones(N)},
    "positions": {"q_positions": POSITIONS, "kv_positions": POSITIONS},
    "offset": {"query_offset": 3},
    "positions of rows": {"q_positions": jnp.stack([POSITIONS] * 2), "kv_positions": jnp.stack([POSITIONS] * 2)},
    "bias": {"bias": jnp.zeros((1, 1, T, S))},
    "bias of heads": {"bias": jnp.zeros((1, N, T, S))},
    "dense mask": {"attention_mask": jnp.ones((1, 1, T, S), bool)},
    "mask": {"mask_builder": lambda *_: Prefix(3) | Causal()},
    "other mask": {"mask_builder": lambda *_: Prefix(5) | Causal()},
    "masks of heads": {"mask_builder": lambda q, kv, heads, head, reps: Prefix(3 + head)},
    "precision": {"precision": "highest"},
    "fused backward": {"fused_backward": True},
}


DOES_NOT: list[dict[str, Any]] = [
    {"q": Q + 1},
    {"softmax_scale": 3.0},
    {"softmax_aux": jnp.ones(N)},
    {"return_lse": True},
    {"strategy": "all_gather"},
    {"fwd_params": {"q_blocksize": 4}},
]


class TestWhatItHas:
    def test_each_option_that_can_change_the_time_gives_another_problem(self) -> None:
        problems = [of(), *(of(**options) for options in MATTERS.values())]
        assert len(set(problems)) == len({p.digest for p in problems}) == len(problems)

    @pytest.mark.parametrize("options", DOES_NOT, ids=str)
    def test_options_that_cannot_change_the_time_give_the_same_problem(self, options: dict[str, Any]) -> None:
        assert of(**options) == of()

    def test_a_new_version_or_another_machine_is_another_problem(self) -> None:
        plain = of()
        assert {name for name, _ in plain.versions} == {"jax", "ringattn-core", "ringattn-xla"}
        assert plain.device.startswith("cpu, ")
        assert plain.device.endswith(f"{os.cpu_count()} cores")
        assert machine("NVIDIA H200") == "NVIDIA H200"
        changes: list[dict[str, Any]] = [{"device": "other"}, {"versions": (("jax", "0"),)}, {"backend": "other"}]
        assert len({plain.digest, *(dataclasses.replace(plain, **change).digest for change in changes)}) == 4

    def test_masks_are_told_apart_without_the_addresses_of_objects(self) -> None:
        mask = Opaque(lambda q, k: q >= k)
        documents = of(mask_builder=lambda *_: Document(np.zeros(T, int)))
        assert dict(documents.options)["mask_builder"] == ("Document(q_ids=array(16,), kv_ids=array(16,))",)
        (found,) = dict(of(mask_builder=lambda *_: mask).options)["mask_builder"]
        assert found.startswith("Opaque(held=<")
        assert " at 0x" not in found


def test_a_remembered_choice_keeps_no_array_of_the_call_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGATTN_CACHE_DIR", str(tmp_path))
    mask = Numpy(np.tri(T, dtype=bool))
    problem = of(mask_builder=lambda *_: mask)
    assert {type(x) for x in jax.tree.leaves(problem.call)} == {jax.ShapeDtypeStruct}
    alive = weakref.ref(mask)
    choice.configured(discovery.get("xla"), problem)
    assert any(known == problem for _, known in choice._known)
    del problem, mask
    gc.collect()
    assert alive() is None


@dataclasses.dataclass(frozen=True)
class Opaque(Predicate):
    """A mask whose `repr` contains the address of an object."""

    seen: Any

    def __repr__(self) -> str:
        return f"Opaque(held={self.seen!r})"
