# SPDX-License-Identifier: Apache-2.0
"""Ring attention for JAX: the signature, the ring engine and the discovery of backends."""

from . import errors, masks
from .backends.selection import use_backend
from .call.attention import per_shard, ring_attention
from .call.cache import decode_attention, prefill_attention
from .config import BwdParams, FwdParams, RingAttentionConfig
from .contract.backend import Backend
from .contract.features import Feature
from .contract.from_flash import from_flash
from .contract.merge import merge, merging
from .contract.protocol import Block, BlockKernel, Gradients, Partial
from .contract.rule import Rule
from .contract.signature import RingKernel
from .contract.visibility import visible
from .masks.info import MaskInfo
from .placement.mesh import ring_mesh
from .placement.reorder import from_layout, to_layout
from .placement.tokens import halo, layout_batch, shift, write_cache
from .ring.loop import ring_loop
from .ring.remat import remat_policy

__all__ = [
    "Backend",
    "Block",
    "BlockKernel",
    "BwdParams",
    "Feature",
    "FwdParams",
    "Gradients",
    "MaskInfo",
    "Partial",
    "RingAttentionConfig",
    "RingKernel",
    "Rule",
    "decode_attention",
    "errors",
    "from_flash",
    "from_layout",
    "halo",
    "layout_batch",
    "masks",
    "merge",
    "merging",
    "per_shard",
    "prefill_attention",
    "remat_policy",
    "ring_attention",
    "ring_loop",
    "ring_mesh",
    "shift",
    "to_layout",
    "use_backend",
    "visible",
    "write_cache",
]
