# SPDX-License-Identifier: Apache-2.0
"""The adapters beside the released libraries: signatures, and results of each library that installs on a CPU.

`nox -s hosts` installs the libraries and runs this module; other sessions leave it out (`conftest.py`). A failure of
the first tests says that a library has changed what it passes, and that its adapter must follow.
"""

import ast
import functools
import inspect
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import haliax as hax  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import keras  # pyright: ignore[reportMissingImports]
import levanter.layers.attention as levanter  # pyright: ignore[reportMissingImports]
import numpy as np
import pytest
from jax.sharding import AxisType
from jla.distributed import context_parallel_attention as jla  # pyright: ignore[reportMissingImports]
from ringattn_adapters import easydel, haliax, jax_linear_attention, maxtext
from ringattn_adapters import keras as ours_for_keras
from ringattn_adapters import levanter as ours_for_levanter

RELEASED = {
    "haliax": ("haliax/nn/attention.py", "dot_product_attention", haliax.dot_product_attention),
    "levanter": ("levanter/layers/attention.py", "dot_product_attention", ours_for_levanter.dot_product_attention),
    "keras": ("keras/src/backend/jax/nn.py", "dot_product_attention", ours_for_keras.dot_product_attention),
    "jla": (
        "jla/distributed/context_parallel_attention.py",
        "context_parallel_attention",
        jax_linear_attention.context_parallel_attention,
    ),
    "maxtext": ("maxtext/layers/attention_op.py", "AttentionOp.apply_attention", maxtext.apply_attention),
    "easydel": ("easydel/operations/kernels/ring_attention.py", "RingAttn.forward_native", easydel.forward_native),
}
ADDED = {"haliax": {"QPos"}, "easydel": {"bias", "precision", "normalize_output"}}
"""Parameters of ours alone: what haliax does not say, and what EasyDeL's own function swallows in `**ignore`."""
B, T, K, G, H = 2, 32, 2, 2, 8


@pytest.fixture(autouse=True)
def _promotion_of_the_libraries():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def parsed(path: str, name: str) -> Any:
    """The definition of a class or function in an installed file, which need not be importable here."""
    package, _, rest = path.partition("/")
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed"
    node: Any = ast.parse(Path(spec.submodule_search_locations[0], rest).read_text())
    for part in name.split("."):
        node = next(x for x in node.body if getattr(x, "name", None) == part)
    return node


def written(arguments: ast.arguments) -> list[tuple[str, bool, Any]]:
    """Each parameter: its name, whether it goes by keyword alone, and its default as written, `None` without one."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults]
    found = [(x.arg, False, default) for x, default in zip(plain, defaults, strict=True)]
    found += [(x.arg, True, default) for x, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [(name, keyword, None if d is None else ast.literal_eval(d)) for name, keyword, d in found]


@pytest.mark.parametrize("library", RELEASED)
def test_the_signature_is_the_released_one(library: str):
    path, name, ours = RELEASED[library]
    theirs = [x for x in written(parsed(path, name).args) if x[0] != "self"]
    mine = [
        (p.name, p.kind is p.KEYWORD_ONLY, None if p.default is p.empty else p.default)
        for p in inspect.signature(ours).parameters.values()
        if p.kind is not p.VAR_KEYWORD and p.name not in {"op", "operation"} | ADDED.get(library, set())
    ]
    assert mine == theirs


def test_the_fields_of_levanters_mask_are_the_translated_ones():
    body = parsed("levanter/layers/attention_mask.py", "AttentionMask").body
    assert tuple(x.target.id for x in body if isinstance(x, ast.AnnAssign)) == ours_for_levanter.TRANSLATED


def test_what_maxtext_and_easydel_have_are_the_names_that_the_adapters_read():
    types = parsed("maxtext/common/common_types.py", "AttentionType").body
    values = {x.value.value for x in types if isinstance(x, ast.Assign)}
    assert values == {*maxtext.TYPES, "compressed", "block_diffusion"}
    orders = parsed("maxtext/common/common_types.py", "ReorderStrategy").body
    assert [x.value.value for x in orders if isinstance(x, ast.Assign)] == ["auto", "dual_chunk_swap", "striped"]
    text = ast.unparse(parsed("maxtext/layers/attention_op.py", "AttentionOp"))
    for field in ("kv_quant", "dropout_rate", "attn_logits_soft_cap", "sliding_window_size", "chunk_attn_window_size"):
        assert f"self.{field} = {field}" in text
    assert "flash_axis_names_q: AxisNames=(BATCH_ATTN, HEAD, LENGTH, D_KV)" in text
    assert "def _load_balanced_context_parallel(self) -> bool" in text and "self.config.moba" in text
    assert "self.forward_native(" in ast.unparse(parsed(RELEASED["easydel"][0], "RingAttn.__call__"))


BATCH, POS, KPOS = hax.Axis("batch", B), hax.Axis("position", T), hax.Axis("key_position", T)
KV, GROUP, SIZE = hax.Axis("kv_head", K), hax.Axis("q_heads_per_group", G), hax.Axis("head_size", H)
QUERY = hax.random.normal(jax.random.key(0), (BATCH, KV, GROUP, POS, SIZE))
KEY, VALUE = (hax.random.normal(jax.random.key(seed), (BATCH, KV, KPOS, SIZE)) for seed in (1, 2))
IDS = hax.named(jnp.repeat(jnp.arange(2), T // 2)[None].repeat(B, 0), (BATCH, POS))
DENSE = hax.random.bernoulli(jax.random.key(3), (BATCH, POS, KPOS), 0.6) | (
    hax.arange(POS).broadcast_axis(KPOS) == hax.arange(KPOS)
)
Mask = levanter.AttentionMask
MASKS = {
    "none": None,
    "window": Mask.causal(sliding_window=5),
    "offset": Mask.causal(offset=hax.named(jnp.array([3, 0]), (BATCH,))),
    "both sides": Mask.bidirectional_sliding_window(4),
    "documents": Mask.causal().with_segment_ids(IDS),
    "dense": Mask.explicit(DENSE) & Mask.causal(),
}
KINDS = {"one device": None, "automatic": AxisType.Auto, "explicit": AxisType.Explicit}
meshes = pytest.mark.parametrize("kind", KINDS)


def agree(ours: Any, theirs: Any, arrays: Any, kind: str = "one device", atol: float = 5e-5) -> None:
    """Compares values and gradients, ours on one device or on a mesh that splits batch and sequence."""

    def both(function: Any) -> Any:
        def loss(arrays: Any) -> Any:
            leaves = jax.tree.leaves(function(*arrays))
            return sum(jnp.sum(jnp.sin(x)) for x in leaves), leaves

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    want = both(theirs)(arrays)
    if KINDS[kind] is None:
        got = both(ours)(arrays)
    else:
        with jax.set_mesh(jax.make_mesh((2, 4), ("data", "sp"), axis_types=(KINDS[kind],) * 2)):
            got = both(functools.partial(ours, axis_name="sp"))(arrays)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=atol)


@pytest.mark.parametrize("name", MASKS)
def test_levanter_gets_what_its_own_attention_computes(name: str):
    def bound(function: Any, **options: Any) -> Any:
        return lambda *x, **ring: function("position", "key_position", "head_size", *x, MASKS[name], **options, **ring)

    theirs = bound(levanter.dot_product_attention, attn_backend=levanter.AttentionBackend.VANILLA)
    kind = {"documents": "automatic", "dense": "explicit"}.get(name, "one device")
    agree(bound(ours_for_levanter.dot_product_attention), theirs, (QUERY, KEY, VALUE), kind)


def test_a_layer_of_levanter_calls_the_ring(monkeypatch: pytest.MonkeyPatch):
    config = levanter.AttentionConfig(hax.Axis("embed", 32), K * G, K, attn_backend=levanter.AttentionBackend.DEFAULT)
    layer = levanter.Attention.init(config, key=jax.random.key(0))
    x = hax.random.normal(jax.random.key(1), (BATCH, POS, config.Embed))
    want = layer(x, MASKS["documents"], key=None)
    calls = []
    ours = functools.partial(ours_for_levanter.dot_product_attention, axis_name="sp")
    monkeypatch.setattr(levanter, "dot_product_attention", lambda *a, **b: (calls.append(1), ours(*a, **b))[1])
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "sp"), axis_types=(AxisType.Auto,) * 2)):
        got = layer(x, MASKS["documents"], key=None)
    assert calls
    np.testing.assert_allclose(got.array, want.array, atol=2e-5)


@meshes
def test_haliax_gets_what_its_own_attention_computes(kind: str):
    theirs = functools.partial(hax.nn.attention.dot_product_attention, "key_position", "head_size")
    ours = functools.partial(haliax.dot_product_attention, "key_position", "head_size", QPos="position")
    agree(functools.partial(ours, mask=DENSE), functools.partial(theirs, mask=DENSE), (QUERY, KEY, VALUE), kind)


@pytest.mark.parametrize("kind", ["one device", "automatic"])
@pytest.mark.parametrize("layer", ["multi-head", "grouped"])
def test_a_layer_of_keras_calls_the_ring(layer: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    made = {
        "multi-head": lambda: keras.layers.MultiHeadAttention(4, 8, seed=0),
        "grouped": lambda: keras.layers.GroupQueryAttention(8, 4, 2, seed=0),
    }[layer]()
    x = np.random.default_rng(0).standard_normal((B, T, 16), np.float32)
    padding = np.arange(T) < np.array([[T], [20]])
    made(x, x)
    weights, calls = [v.value for v in made.trainable_variables], []

    def attend(*arrays: Any, **options: Any) -> Any:
        calls.append(1)
        return ours_for_keras.dot_product_attention(*arrays, **options)

    def apply(ring: bool, weights: Any, **axis: Any) -> Any:
        with monkeypatch.context() as patch:
            if ring:
                patch.setattr(keras.src.backend.nn, "dot_product_attention", functools.partial(attend, **axis))
            options = {"use_causal_mask": True, "attention_mask": padding[:, None] & np.ones((1, T, 1), bool)}
            return made.stateless_call(weights, [], x, x, **options)[0]

    agree(functools.partial(apply, True), functools.partial(apply, False), (weights,), kind)
    assert calls


@meshes
@pytest.mark.parametrize("window", [None, 6])
def test_jax_linear_attention_gets_what_its_own_function_computes(kind: str, window: int | None):
    arrays = tuple(jax.random.normal(jax.random.key(s), (B, T, n, H)) for s, n in enumerate((K * G, K, K)))
    options = {"sliding_window": window, "sinks": jnp.linspace(-1.0, 1.0, K * G), "segment_ids": IDS.array}
    options |= {"batch_axis": "data", "axis": "sp"}
    types = (KINDS[kind] or AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "sp"), axis_types=types)):
        theirs = functools.partial(jla.context_parallel_attention, **options)
        ours = functools.partial(jax_linear_attention.context_parallel_attention, **options)
        agree(ours, theirs, arrays)
