# SPDX-License-Identifier: Apache-2.0
"""The adapters of haliax, Levanter, Keras, jax-linear-attention, MaxText and EasyDeL, with stand-ins for the libraries.

The stand-ins have the signatures that were released; `test_released_hosts.py` compares those with the wheels.
"""

import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ringattn_adapters import easydel, haliax, jax_linear_attention, keras, levanter, maxtext
from ringattn_core import errors, from_layout, to_layout
from ringattn_testing.agreement import normal

B, T, K, G, H = 2, 32, 2, 2, 8
SIZES = {"batch": B, "position": T, "key_position": T, "kv_head": K, "group": G, "head_size": H}
IDS = jnp.repeat(jnp.arange(2, dtype=jnp.int32), T // 2)[None].repeat(B, 0)
# Masks are NumPy's, which may differ in rank.
ROW, COLUMN = np.arange(T)[:, None], np.arange(T)
CAUSAL, SAME = COLUMN <= ROW, np.asarray(IDS[:, :, None] == IDS[:, None, :])[:, None]
SINKS = jnp.linspace(-1.0, 1.0, K * G)


QUERY, KEY, VALUE = normal(0, B, T, K * G, H), normal(1, B, T, K, H), normal(2, B, T, K, H)


def dense(mask: Any, scale: float | None = None, sinks: Any = None) -> np.ndarray:
    """The reference: scores as one matrix, with the sinks as one more column."""
    products = jnp.einsum("btkgh,bskh->bkgts", QUERY.reshape(B, T, K, G, H), KEY).reshape(B, K * G, T, T)
    scores = np.where(mask, products * (H**-0.5 if scale is None else scale), -np.inf).astype(np.float32)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (B, K * G, T, 1))], -1)
    weights = jax.nn.softmax(scores, -1)[..., :T].reshape(B, K, G, T, T)
    return np.asarray(jnp.einsum("bkgts,bskh->btkgh", weights, VALUE).reshape(B, T, K * G, H))


def mesh(*names: str) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), names, axis_types=(jax.sharding.AxisType.Auto,) * 2)


@dataclass
class Named:
    """A haliax `NamedArray`: an array, and the name of each axis."""

    array: Any
    names: tuple[Any, ...]

    @property
    def axes(self) -> tuple[Any, ...]:
        names = [getattr(name, "name", name) for name in self.names]
        return tuple(SimpleNamespace(name=n, size=size) for n, size in zip(names, self.array.shape, strict=True))


@dataclass
class AttentionMask:
    """Levanter's."""

    is_causal: bool = False
    causal_offset: Any = None
    explicit_mask: Any = None
    segment_ids: Any = None
    sliding_window: int | None = None
    bidirectional_window: int | None = None


@dataclass
class LaterMask(AttentionMask):
    prefix: int | None = None


NAMED = (
    Named(
        QUERY.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4), ("batch", "kv_head", "group", "position", "head_size")
    ),
    Named(KEY.transpose(0, 2, 1, 3), ("batch", "kv_head", "key_position", "head_size")),
    Named(VALUE.transpose(0, 2, 1, 3), ("batch", "kv_head", "key_position", "head_size")),
)
OF_LEVANTER = ("position", "key_position", "head_size", *NAMED)
PAIR = (Named(IDS, ("batch", "position")),) * 2
SCALAR = Named(jnp.int32(3), ())


def flat(out: Any) -> np.ndarray:
    assert [axis.name for axis in out.axes] == [axis.name for axis in NAMED[0].axes]
    return np.asarray(out.array.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H))


MASKS = {
    "causal": (AttentionMask(is_causal=True), CAUSAL),
    "offset": (AttentionMask(is_causal=True, causal_offset=SCALAR), COLUMN <= ROW + 3),
    "window": (AttentionMask(is_causal=True, sliding_window=5), CAUSAL & (ROW - COLUMN < 5)),
    "both sides": (AttentionMask(bidirectional_window=4), abs(ROW - COLUMN) <= 4),
    "both windows": (AttentionMask(sliding_window=6, bidirectional_window=4), CAUSAL & (ROW - COLUMN <= 4)),
    "documents": (AttentionMask(is_causal=True, segment_ids=PAIR), CAUSAL & SAME),
    "dense": (AttentionMask(explicit_mask=Named(jnp.asarray(CAUSAL), ("position", "key_position"))), CAUSAL),
    "named": (Named(jnp.asarray(CAUSAL), ("position", "key_position")), CAUSAL),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_levanter_says_what_it_says_there(name: str):
    mask, seen = MASKS[name]
    np.testing.assert_allclose(flat(levanter.dot_product_attention(*OF_LEVANTER, mask)), dense(seen), atol=2e-5)


def test_haliax_and_levanter_run_over_a_mesh():
    sinks = Named(SINKS.reshape(K, G), ("kv_head", "group"))
    with jax.set_mesh(mesh("data", "sp")):
        out = levanter.dot_product_attention(*OF_LEVANTER, MASKS["documents"][0], attn_sink=sinks, axis_name="sp")
        named = haliax.dot_product_attention(
            "key_position", "head_size", *NAMED, MASKS["named"][0], QPos="position", axis_name="sp"
        )
    np.testing.assert_allclose(flat(out), dense(CAUSAL & SAME, sinks=SINKS), atol=2e-5)
    np.testing.assert_allclose(flat(named), dense(CAUSAL), atol=2e-5)


def test_keras_promotes_dtypes_and_runs_over_a_mesh():
    out = keras.dot_product_attention(
        QUERY, KEY, VALUE, mask=jnp.asarray(SAME), scale=0.3, is_causal=True, mesh=mesh("data", "sp"), axis_name="sp"
    )
    np.testing.assert_allclose(out, dense(CAUSAL & SAME, 0.3), atol=2e-5)
    with jax.numpy_dtype_promotion("standard"):
        mixed = keras.dot_product_attention(QUERY, KEY.astype(jnp.bfloat16), VALUE.astype(jnp.bfloat16))
    assert mixed.dtype == jnp.float32


def test_jax_linear_attention_counts_the_query_in_its_window():
    out = jax_linear_attention.context_parallel_attention(
        QUERY, KEY, VALUE, mesh=mesh("dp", "cp"), batch_axis="auto", segment_ids=IDS, sliding_window=5, sinks=SINKS
    )
    np.testing.assert_allclose(out, dense(CAUSAL & SAME & (ROW - COLUMN < 5), sinks=SINKS), atol=2e-5)


def operation(kind: str = "global", balanced: bool = True, **given: Any) -> Any:
    """A MaxText `AttentionOp` on a mesh that splits batch and context."""
    config = {"context_parallel_strategy": "all_gather", "packing": True, "hardware": "gpu", "moba": False}
    order = SimpleNamespace(value="auto")
    fields = {"kv_quant": None, "dropout_rate": 0.0, "attn_logits_soft_cap": None, "flash_axis_names_q": "bhtd"}
    fields |= {"sliding_window_size": 5, "chunk_attn_window_size": 4, "mesh": mesh("data", "context")}
    axes = {"b": "data", "h": None, "t": "context", "d": None}
    config |= {name: given.pop(name) for name in [*given] if name in config}
    return SimpleNamespace(
        **fields | given,
        attention_type=SimpleNamespace(value=kind),
        config=SimpleNamespace(**config, context_parallel_reorder_strategy=order),
        _load_balanced_context_parallel=lambda: balanced,
        _logical_to_mesh_axes=lambda names: P(*(axes[name] for name in names)),
    )


def of_maxtext(op: Any, *arrays: Any, **given: Any) -> Any:
    given = {"model_mode": "train", "segment_positions": None, "lengths": None} | given
    return maxtext.apply_attention(op, *arrays, **given, qk_product_einsum=jnp.einsum, wv_product_einsum=jnp.einsum)


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("global", CAUSAL),
        ("full", COLUMN >= 0),
        ("local_sliding", CAUSAL & (ROW - COLUMN < 5)),
        ("chunk", CAUSAL & (ROW // 4 == COLUMN // 4)),
    ],
)
def test_maxtext_brings_its_order_its_axes_and_its_type_of_attention(kind: str, seen: Any):
    arrays = (to_layout(x, "dual_chunk_swap", 4) for x in (QUERY, KEY, VALUE, IDS))
    out, *rest = of_maxtext(operation(kind), *arrays, sinks=SINKS)
    assert rest == [None, None]
    np.testing.assert_allclose(from_layout(out, "dual_chunk_swap", 4), dense(seen & SAME, 1.0, SINKS), atol=5e-5)


IMAGES = np.zeros((B, T), bool)
for _row, _start, _end in ((0, 3, 11), (0, 18, 20), (0, 21, 32), (1, 0, 13)):
    IMAGES[_row, _start:_end] = True
RUNS = np.cumsum(np.diff(IMAGES, axis=1, prepend=False), 1)
OF_ONE_IMAGE = ((RUNS[:, :, None] == RUNS[:, None]) & IMAGES[:, None])[:, None]


@pytest.mark.parametrize(
    ("kind", "seen"), [("global", CAUSAL), ("full", COLUMN >= 0), ("local_sliding", CAUSAL & (ROW - COLUMN < 5))]
)
@pytest.mark.parametrize("strategy", ["all_gather", "ring"])
def test_tokens_of_an_image_of_maxtext_see_one_another(strategy: str, kind: str, seen: Any):
    layout = {"all_gather": "dual_chunk_swap", "ring": "striped"}[strategy]
    arrays = (to_layout(x, layout, 4) for x in (QUERY, KEY, VALUE, IDS))
    images = to_layout(jnp.asarray(IMAGES), layout, 4)
    op = operation(kind, context_parallel_strategy=strategy)
    out = from_layout(of_maxtext(op, *arrays, bidirectional_mask=images)[0], layout, 4)
    np.testing.assert_allclose(out, dense((seen | OF_ONE_IMAGE) & SAME, 1.0), atol=5e-5)
    op = operation(kind, balanced=False)
    plain = of_maxtext(op, QUERY, KEY, VALUE, None, bidirectional_mask=jnp.asarray(IMAGES))[0]
    np.testing.assert_allclose(plain, dense(seen | OF_ONE_IMAGE, 1.0), atol=5e-5)


def test_maxtext_stripes_packed_rings_on_gpus():
    arrays = (to_layout(x, "striped", 4) for x in (QUERY, KEY, VALUE, IDS))
    out = of_maxtext(operation(context_parallel_strategy="ring"), *arrays)[0]
    np.testing.assert_allclose(from_layout(out, "striped", 4), dense(CAUSAL & SAME, 1.0), atol=5e-5)


def of_easydel(monkeypatch: pytest.MonkeyPatch, **given: Any) -> Any:
    """EasyDeL's `RingAttn` with our function, called with what `FlexibleAttentionModule` passes."""
    module = ModuleType("easydel.operations")
    module.AttentionOutput = SimpleNamespace
    monkeypatch.setitem(sys.modules, "easydel", ModuleType("easydel"))
    monkeypatch.setitem(sys.modules, "easydel.operations", module)
    rules = SimpleNamespace(query=P("dp", "sp", None, None))
    meta = {"mesh": mesh("dp", "sp"), "sequence_axis_name": "sp", "runtime_dtype": jnp.float32}
    self = SimpleNamespace(
        metadata=SimpleNamespace(**meta, get_shardings=lambda **_: rules),
        get_mode=lambda query, BTHD: "train",
        create_stable_sharding=lambda spec, dep, tensor, preserved_indices: spec,
    )
    passed = {"bias": None, "cache_metadata": None, "cache_view": None, "init_bias": None, "deterministic": True}
    passed |= {"dropout_rng": None, "dropout_prob": 0.0, "precision": None, "prevent_cse": True, "optimized": False}
    passed |= {"cum_seqlens_q": None, "cum_seqlens_k": None, "normalize_output": True, "compute_dtype": None}
    passed |= {"mask_value": None, "vmem_limit_bytes": None, "policy": jax.checkpoint_policies.nothing_saveable}
    return easydel.forward_native(self, query=QUERY, key=KEY, value=VALUE, **passed | given)


def mask_info(**given: Any) -> Any:
    names = ("_attention_mask", "_q_segment_ids", "_kv_segment_ids", "_cu_seqlens_q", "q_positions", "kv_positions")
    return SimpleNamespace(**dict.fromkeys(names) | given)


@pytest.mark.parametrize("form", ["ids", "mask"])
def test_easydel_keeps_a_mask_that_ids_cannot_say(form: str, monkeypatch: pytest.MonkeyPatch):
    holes = SAME & ((ROW + COLUMN) % 7 != 1) | (ROW == COLUMN)
    info, seen = {
        "ids": (mask_info(_q_segment_ids=IDS, _kv_segment_ids=IDS), SAME),
        "mask": (mask_info(_attention_mask=jnp.asarray(holes, jnp.int32)), holes),
    }[form]
    out = of_easydel(monkeypatch, mask_info=info, softmax_scale=0.3, softmax_aux=SINKS)
    assert out.attention_weights is None
    np.testing.assert_allclose(out.attention_outputs, dense(CAUSAL & seen, 0.3, SINKS), atol=2e-5)


class TestWhatIsRefused:
    """Every argument without a counterpart is named, before anything runs."""

    @pytest.mark.parametrize(
        "given",
        [
            {"attn_backend": "vanilla"},
            {"use_flash": False},
            {"bias": Named(jnp.zeros((T, T)), ("position", "key_position")), "logits_soft_cap": 2.0},
        ],
        ids=lambda given: next(iter(given)),
    )
    def test_by_levanter(self, given: dict[str, Any]):
        with pytest.raises(errors.InputError, match=rf"^{next(iter(given))}: is set"):
            levanter.dot_product_attention(*OF_LEVANTER, **given)

    def test_by_the_ring_in_the_words_of_levanter(self):
        with pytest.raises(errors.InputError, match=r"^scaling_factor: got 'text'"):
            levanter.dot_product_attention(*OF_LEVANTER, scaling_factor="text")

    def test_a_field_of_a_later_mask_of_levanter(self):
        with pytest.raises(errors.InputError, match=r"^prefix: is set"):
            levanter.dot_product_attention(*OF_LEVANTER, LaterMask(prefix=3))
        with pytest.raises(errors.InputError, match=r"^causal_offset: is set"):
            offset = replace(MASKS["window"][0], causal_offset=SCALAR)
            levanter.dot_product_attention(*OF_LEVANTER, offset)

    def test_axes_of_haliax_without_a_role(self):
        with pytest.raises(errors.InputError, match=r"^query: has the axes .* QPos"):
            haliax.dot_product_attention("key_position", "head_size", *NAMED)
        with pytest.raises(errors.InputError, match=r"^mask: has the axes \['layer'\]"):
            mask = Named(jnp.ones(3, bool), ("layer",))
            haliax.dot_product_attention("key_position", "head_size", *NAMED, mask, QPos="position")

    def test_by_keras_and_jax_linear_attention(self):
        with pytest.raises(errors.InputError, match=r"^flash_attention: is set"):
            keras.dot_product_attention(QUERY, KEY, VALUE, flash_attention=True)
        with pytest.raises(errors.InputError, match=r"^block_q: is set"):
            jax_linear_attention.context_parallel_attention(QUERY, KEY, VALUE, block_q=16)

    @pytest.mark.parametrize("name", ["lengths", "previous_chunk", "bidirectional_mask", "compress_ratio"])
    def test_by_maxtext(self, name: str):
        op = operation("chunk" if name == "bidirectional_mask" else "global")
        with pytest.raises(errors.InputError, match=rf"^{name}: is set"):
            of_maxtext(op, QUERY, KEY, VALUE, IDS, **{name: 3 if name.startswith("c") else IDS})

    @pytest.mark.parametrize("field", ["kv_quant", "dropout_rate", "moba", "model_mode", "attention_type"])
    def test_of_a_layer_of_maxtext(self, field: str):
        given = {"kv_quant": object(), "dropout_rate": 0.1, "moba": True}
        op = operation(**{field: given[field]}) if field in given else operation()
        op = operation("compressed") if field == "attention_type" else op
        mode = {"model_mode": "autoregressive"} if field == "model_mode" else {}
        with pytest.raises(errors.InputError, match=rf"^{field}: is set"):
            of_maxtext(op, QUERY, KEY, VALUE, IDS, **mode)

    @pytest.mark.parametrize("name", ["cache_view", "init_bias", "dropout_prob"])
    def test_by_easydel(self, name: str, monkeypatch: pytest.MonkeyPatch):
        with pytest.raises(errors.InputError, match=rf"^{name}: is set"):
            of_easydel(monkeypatch, **{name: 0.5 if name == "dropout_prob" else IDS})
        with pytest.raises(errors.InputError, match=r"^normalize_output: is set"):
            of_easydel(monkeypatch, normalize_output=False)
