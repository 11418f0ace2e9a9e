# SPDX-License-Identifier: Apache-2.0
"""What schedules may assume of the tiles that a block visits. No result depends on it, only the time.

Ranges of positions are known at run time, so this follows from `Block.reach`, `Block.monotone`, and from which arrays a
block has.
"""

from ringattn_core.contract.protocol import Block


def scattered(block: Block) -> bool:
    """Whether some tiles of a head may visit few tiles of the other side, and others many, as with documents.

    The block has documents if it has segment ids, or if it is causal and the caller gives the first position that each
    query sees. Under a window or chunks, each tile visits about as many tiles as the next. Ranges of a call that is not
    causal may be prefixes or spans of images: these visit about the tiles of a causal mask.
    """
    bounded = block.reach.left is not None or block.reach.chunk is not None
    of_caller = block.first is not None and block.reach.causal and not bounded
    return block.q_segments is not None or of_caller


def causal_alone(block: Block) -> bool:
    """Whether the only mask is a causal one, over positions that do not decrease. Turns then get shorter one by one."""
    others = block.first is not None or block.q_segments is not None or block.bits is not None
    causal = block.last is not None and (block.reach.causal or block.reach.right is not None)
    return causal and block.monotone and not others
