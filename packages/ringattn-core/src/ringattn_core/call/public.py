# SPDX-License-Identifier: Apache-2.0
"""The public names of `ringattn_core`, which imports this module when one of them is first used."""

from .. import errors as errors
from .. import masks as masks
from ..backends.selection import use_backend as use_backend
from ..config import BwdParams as BwdParams
from ..config import FwdParams as FwdParams
from ..config import RingAttentionConfig as RingAttentionConfig
from ..contract.backend import Backend as Backend
from ..contract.features import Feature as Feature
from ..contract.features import Support as Support
from ..contract.from_flash import from_flash as from_flash
from ..contract.merge import merge as merge
from ..contract.merge import merging as merging
from ..contract.protocol import Block as Block
from ..contract.protocol import BlockKernel as BlockKernel
from ..contract.protocol import Gradients as Gradients
from ..contract.protocol import Partial as Partial
from ..contract.protocol import RingKernel as RingKernel
from ..contract.rule import Rule as Rule
from ..contract.visibility import visible as visible
from ..masks.info import MaskInfo as MaskInfo
from ..placement.mesh import ring_mesh as ring_mesh
from ..placement.reorder import from_layout as from_layout
from ..placement.reorder import to_layout as to_layout
from ..ring.remat import remat_policy as remat_policy
from .attention import ring_attention as ring_attention
from .decode import decode_attention as decode_attention
from .dispatch import per_shard as per_shard
from .prefill import prefill_attention as prefill_attention
