# SPDX-License-Identifier: Apache-2.0
"""What `ringattn_core` offers by name; `ringattn_core` itself loads this at the first use of any name."""

from . import errors as errors
from . import masks as masks
from .attention import ring_attention as ring_attention
from .config import BwdParams as BwdParams
from .config import FwdParams as FwdParams
from .config import RingAttentionConfig as RingAttentionConfig
from .dispatch import per_shard as per_shard
from .features import Feature as Feature
from .features import Support as Support
from .layout import from_layout as from_layout
from .layout import to_layout as to_layout
from .mask_info import MaskInfo as MaskInfo
from .merge import merging as merging
from .mesh import ring_mesh as ring_mesh
from .protocol import Backend as Backend
from .protocol import Block as Block
from .protocol import BlockKernel as BlockKernel
from .protocol import Gradients as Gradients
from .protocol import Partial as Partial
from .protocol import RingKernel as RingKernel
from .rule import Rule as Rule
from .selection import use_backend as use_backend
from .visibility import visible as visible
