# SPDX-License-Identifier: Apache-2.0
"""Which attentions are compared with ours on each platform, and which workloads each can compute."""

import dataclasses
import functools
import importlib.util
import math
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

import flash_attention_3
import jax
import jax.numpy as jnp
import numpy as np
from gpu_ring import gathered
from interleaved import Attention, ours
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import Mesh, PartitionSpec
from ringattn_core import decode_attention
from workloads import BOTH, PARTS, Workload

OURS: Final = "ours"
HERE: Final = "tokamax in ringattn"
LAYOUT: Final = "zigzag"
"""The order of tokens on a ring of more than one device."""
BACKENDS: Final = {"cpu": "xla", "gpu": "triton", "tpu": "tpu"}
TILE: Final = 1024
_TILES: Final[dict[str, Any]] = {
    **dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv"), TILE),
    **dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), 512),
}
"""The tiles of the TPU rivals: 1024 queries and keys, of which 512 keys are computed at a time."""
Attend = Callable[..., Any]
"""A function of query, key and value `[N, T, H]`; the queries are already scaled."""


@dataclasses.dataclass(frozen=True)
class Rival:
    """An attention: how to make it for a workload, and why it cannot compute one."""

    make: Callable[[Workload, Mesh | None], Attention]
    """The attention as a function of the workload's arrays. `Mesh` is the ring; `None` is one device."""
    why_not: Callable[[Workload], str | None] = lambda workload: None
    """Why it cannot compute a workload, or `None` where it can."""
    alone: bool = True
    """Whether it runs on one device."""
    rings: bool = False
    """Whether it runs on several devices. Workloads of rings have no other rivals."""
    parts: tuple[str, ...] = PARTS
    module: str | None = None
    """The module without which it is not installed."""
    jax: bool = True
    """Whether JAX can trace the attention. If not, it takes JAX arrays and returns `Tensors`."""

    def takes_part(self, workload: Workload, part: str, ring: int) -> bool:
        here = self.alone if ring == 1 else self.rings
        return here and part in self.parts and (self.rings or workload.rings == (1,))

    def missing(self) -> str | None:
        """A sentence if the rival is not installed."""
        absent = self.module is not None and importlib.util.find_spec(self.module) is None
        return f"not installed (no module {self.module})" if absent else None


def _ours(fused: bool, workload: Workload, mesh: Mesh | None) -> Attention:
    options: dict[str, Any] = {"backend": BACKENDS[jax.default_backend()]}
    if workload.decode:
        return functools.partial(_decode, workload, options)
    options |= {"fused_backward": True} if fused else {}
    options |= {} if mesh is None else {"mesh": mesh, "axis_name": "sp", "layout": LAYOUT}
    # The mask is made while the program is traced, so that XLA does not see the ids.
    return lambda *arrays: ours(**options, **workload.options())(*arrays)


def _decode(workload: Workload, options: Mapping[str, Any], query: Any, key: Any, value: Any) -> jax.Array:
    return decode_attention(query, key, value, workload.shape.tokens, **options)


def dense_mask(workload: Workload) -> jax.Array | None:
    """The mask as booleans `[1, 1, T, T]`, without causality and windows; `None` without documents."""
    ids = workload.ids()
    return None if ids is None else (ids[:, :, None] == ids[:, None, :])[:, None]


def _jax_nn(implementation: Any, workload: Workload, mesh: Mesh | None) -> Attention:
    # JAX gives a window to cuDNN, which obeys it only under a causal mask.
    nothing_later = workload.causal or (workload.window is not None and workload.window[1] == 0)
    return functools.partial(
        jax.nn.dot_product_attention,
        mask=dense_mask(workload),
        is_causal=nothing_later and not workload.decode,
        local_window_size=workload.window,
        implementation=implementation,
    )


def _no_sinks(workload: Workload) -> str | None:
    return "it takes no sinks" if workload.sinks else None


def _cudnn(workload: Workload) -> str | None:
    if workload.shape.value_size:
        return "jax.nn takes no values of another head size"
    if workload.documents or workload.shape.tokens % 64:
        return "it takes no documents, and only lengths that are multiples of 64"
    return _no_sinks(workload)


def _flax(workload: Workload, mesh: Mesh | None) -> Attention:
    """Flax has no grouped heads, and masks are dense."""
    from flax import linen

    tokens, groups = workload.shape.tokens, workload.shape.heads // workload.shape.kv_heads

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
        mask = None if workload.decode else dense_mask(workload)
        ahead = jnp.arange(tokens)[:, None] - jnp.arange(tokens)[None]
        if not workload.decode and (workload.causal or workload.window):
            before, after = workload.window or (tokens, tokens)
            near = (ahead <= before) & (ahead >= (0 if workload.causal else -after))
            mask = near if mask is None else mask & near
        return linen.dot_product_attention(query, key, value, mask=mask)

    return attend


def _flash_attention_3(workload: Workload, mesh: Mesh | None) -> Attention:
    return flash_attention_3.attend(workload)


def _flash_attention_4(workload: Workload, mesh: Mesh | None) -> Attention:
    """fa4-jax's kernels in CuTe. Documents are sequences of their own length, one after another in all rows."""
    from fa4_jax import flash_attn, flash_attn_varlen  # pyright: ignore[reportMissingImports]

    mask = {"causal": workload.causal, "window_size": workload.window}

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if not workload.documents:
            return flash_attn(query, key, value, **mask)
        ends = np.cumsum(np.tile(workload.documents, workload.shape.batch))
        bounds = jax.lax.optimization_barrier(jnp.asarray([0, *ends], jnp.int32))
        out = flash_attn_varlen(*(x.reshape(-1, *x.shape[2:]) for x in (query, key, value)), bounds, bounds, **mask)
        return out.reshape(query.shape[:3] + value.shape[3:])

    return attend


def _why_no_flash_attention_4(workload: Workload) -> str | None:
    if workload.shape.dtype == "float32":
        return "it takes half precision"
    return _no_sinks(workload)


def _linear_attention(workload: Workload, mesh: Mesh | None) -> Attention:
    """jax-linear-attention's kernels in Mosaic, with the faster of its backward passes, whose bits do not repeat."""
    from jla.ops.mosaic_gpu.attention import flash_attention  # pyright: ignore[reportMissingImports]

    backward = "ranged" if workload.shape.value_size else "fused"
    window = workload.window and workload.window[0] + 1

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
        return flash_attention(
            query, key, value, sinks=sinks, segment_ids=workload.ids(), sliding_window=window, backward=backward
        )

    return attend


def _why_no_linear_attention(workload: Workload) -> str | None:
    shape = workload.shape
    before_only = workload.window is not None and not workload.window[1]
    if workload.decode or not (workload.causal or before_only) or shape.dtype == "float32":
        return "it takes causal masks and half precision"
    if (shape.head_size, shape.values) not in ((64, 64), (128, 128), (192, 128)):
        return "it takes heads of 64 and 128, and of 192 with values of 128"
    return None


_PROFILER: Final = ("xprof", "xprof.cli", "xprof.cli.tools", "xprof.cli.tools.get_kernel_stats_tool")
"""A profiler of 100 MB that tokamax imports, and that its attention does not need."""


def _tokamax(workload: Workload, mesh: Mesh | None) -> Attention:
    """tokamax's kernels in Mosaic, with the sizes of its rule: it brings tuned sizes for an H100, and none for an H200.

    `xprof` is replaced by empty modules where it is not installed.
    """
    if importlib.util.find_spec(_PROFILER[0]) is None:
        for name in _PROFILER:
            sys.modules.setdefault(name, types.ModuleType(name))
            sys.modules[name].__spec__ = importlib.util.spec_from_loader(name, None)
    from tokamax import dot_product_attention  # pyright: ignore[reportMissingImports]

    return functools.partial(
        dot_product_attention,
        is_causal=workload.causal,
        local_window_size=workload.window,
        implementation="mosaic",
    )


def _why_no_tokamax(workload: Workload) -> str | None:
    if workload.documents:
        return "its function takes documents only as a dense mask"
    return _no_sinks(workload) or _why_no_half(workload)


def _tokamax_here(workload: Workload, mesh: Mesh | None) -> Attention:
    """The same kernels as a backend of ours, `examples/third-party-tokamax`."""
    return lambda *arrays: ours(backend="example-tokamax", **workload.options())(*arrays)


def _why_no_half(workload: Workload) -> str | None:
    shape = workload.shape
    if shape.dtype == "float32":
        return "it takes half precision"
    return "it takes heads of at most 128" if max(shape.head_size, shape.values) > 128 else None


def _torch(workload: Workload, mesh: Mesh | None) -> Callable[..., Any]:
    """PyTorch's own choice of kernel, on tensors that share the arrays' memory."""
    import torch  # pyright: ignore[reportMissingImports]

    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=workload.causal and not workload.decode,
        enable_gqa=workload.shape.heads != workload.shape.kv_heads,
    )

    def run(*arrays: jax.Array) -> Any:
        q, k, v, *dout = (torch.from_dlpack(x).transpose(1, 2) for x in arrays)
        for x in (q, k, v):
            x.requires_grad_(bool(dout))
        out = attend(q, k, v)
        found = (out, *torch.autograd.grad(out, (q, k, v), *dout)) if dout else (out,)
        return Tensors(torch, found)

    return run


class Tensors:
    """Tensors of PyTorch, as `jax.block_until_ready` and a comparison need them."""

    def __init__(self, torch: Any, tensors: tuple[Any, ...]) -> None:
        self._torch, self._tensors = torch, tensors

    def block_until_ready(self) -> "Tensors":
        if self._torch.cuda.is_available():
            self._torch.cuda.synchronize()
        return self

    def arrays(self) -> list[jax.Array]:
        """The same as JAX's arrays `[B, T, N, H]`."""
        return [jnp.from_dlpack(x.detach().transpose(1, 2).contiguous()) for x in self._tensors]


def _why_no_torch(workload: Workload) -> str | None:
    if workload.window or workload.documents:
        return "its fused kernels take no windows and no documents"
    return _no_sinks(workload)


def _gathered(workload: Workload, mesh: Mesh | None) -> Attention:
    assert mesh is not None, "an all-gather takes no part on one device"
    return gathered(mesh, BACKENDS[jax.default_backend()])


def _why_not_gathered(workload: Workload) -> str | None:
    return None if workload.causal else "this benchmark has a causal all-gather only"


def splash(length: int, heads: int) -> Attend:
    """JAX's splash kernels, causal, with one backward kernel."""
    sizes = splash_attention.BlockSizes(**_TILES, use_fused_bwd_kernel=True)
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((length, length)) for _ in range(heads)])
    return splash_attention.make_splash_mha_single_device(mask, block_sizes=sizes)


def tokamax_ring(mesh: Mesh, length: int) -> Attend:
    """tokamax's ring over `sp`, without a mask: it takes other masks only as dense arrays of the whole sequence.

    Its modules are private, because its ring has no public name. With `use_base2_exp` its results are wrong.
    """
    place = "tokamax._src.ops.experimental.tpu.splash_attention"
    ring, kernels, masks = (
        importlib.import_module(f"{place}.{name}")
        for name in ("ring_attention_kernel", "splash_attention_kernel", "splash_attention_mask")
    )
    kernel = ring.make_ring_attention(
        masks.FullMask((length, length)),
        is_mqa=False,
        ring_axis="sp",
        config=kernels.SplashConfig(**_TILES, use_base2_exp=False),
        q_seq_shards=mesh.size,
        kv_seq_shards=mesh.size,
    )
    tokens = PartitionSpec(None, "sp")
    local = jax.shard_map(
        lambda kernel, q, k, v: kernel(q, k, v),
        mesh=mesh,
        in_specs=(kernel.manual_sharding_spec(), tokens, tokens, tokens),
        out_specs=tokens,
        check_vma=False,
    )
    return functools.partial(local, kernel)


def of_tokens(attend: Attend) -> Attend:
    """The same attention for `ringattn`'s arrays, `[1, T, N, H]` and not scaled."""

    def turned(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        query = query * (1 / math.sqrt(query.shape[-1]))
        q, k, v = (jnp.swapaxes(x[0], 0, 1) for x in (query.astype(key.dtype), key, value))
        return jnp.swapaxes(attend(q, k, v), 0, 1)[None]

    return turned


def _splash(workload: Workload, mesh: Mesh | None) -> Attention:
    return of_tokens(splash(workload.shape.tokens, workload.shape.heads))


def _why_no_splash(workload: Workload) -> str | None:
    shape = workload.shape
    plain = workload.causal and not workload.documents and not workload.window and shape.batch == 1
    if workload.decode or not plain or shape.heads != shape.kv_heads or shape.tokens % TILE:
        return "this benchmark calls it causal, on one sequence, with equal heads"
    return _no_sinks(workload)


def _tokamax_ring(workload: Workload, mesh: Mesh | None) -> Attention:
    assert mesh is not None, "a ring takes no part on one device"
    return of_tokens(tokamax_ring(mesh, workload.shape.tokens))


def _why_no_tokamax_ring(workload: Workload) -> str | None:
    if workload.causal or workload.window or workload.sinks:
        return "its ring takes other masks than none only as dense arrays"
    return None


_OURS: Final = Rival(functools.partial(_ours, False), rings=True)
_GATHER: Final = Rival(_gathered, _why_not_gathered, alone=False, rings=True)
_JAX_NN: Final = Rival(functools.partial(_jax_nn, None), _no_sinks)
_FLAX: Final = Rival(_flax, _no_sinks, module="flax")
_UNORDERED: Final = Rival(functools.partial(_ours, True), rings=True, parts=("forward+backward",))
RIVALS: Final[dict[str, dict[str, Rival]]] = {
    "cpu": {OURS: _OURS, "jax.nn": _JAX_NN, "flax": _FLAX, "all-gather": _GATHER},
    "gpu": {
        OURS: _OURS,
        "ours, unordered": _UNORDERED,
        "FlashAttention-3": Rival(_flash_attention_3, flash_attention_3.why_not),
        "FlashAttention-4": Rival(_flash_attention_4, _why_no_flash_attention_4, parts=BOTH, module="fa4_jax"),
        "tokamax": Rival(_tokamax, _why_no_tokamax, parts=BOTH, module="tokamax"),
        HERE: Rival(_tokamax_here, _why_no_half, parts=BOTH, module="ringattn_example_tokamax"),
        "jax-linear-attention": Rival(_linear_attention, _why_no_linear_attention, module="jla"),
        "cuDNN": Rival(functools.partial(_jax_nn, "cudnn"), _cudnn),
        "PyTorch": Rival(_torch, _why_no_torch, module="torch", jax=False),
    },
    "gpus": {OURS: _OURS, "ours, unordered": _UNORDERED, "all-gather": _GATHER},
    "tpu": {
        OURS: _OURS,
        "splash attention": Rival(_splash, _why_no_splash),
        "tokamax's ring": Rival(_tokamax_ring, _why_no_tokamax_ring, alone=False, rings=True, module="tokamax"),
        "all-gather": _GATHER,
    },
}
"""Of each suite. Ours comes first: what the others compute is compared with its results."""
