# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false
"""Which probabilities of a tile dropout keeps, on Hopper. The random numbers are computed before the scores.

Entries `(i, j)`, `(i, j + 8)`, `(i + 8, j)`, `(i + 8, j + 8)` share the two words of one Philox call, a draw. One
thread holds all four entries in the result of a product. The first word is for query `i`, the second for `i + 8`; the
low half of each is for key `j`, the high half for `j + 8`. Entries share a draw only if the indices of the tile's
queries and keys are consecutive and begin at multiples of 16. In a striped shard they are not, which is known only at
run time, so both cases are compiled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.dropout import half_of
from ..kernels.tokens import unsigned
from .schedules import CONSUMER_ROWS


@gluon.constexpr_function
def of_draws(KV_TILE):
    """The layout of the draws of a tile: each thread has the draws of the scores that it holds."""
    columns = [1 << bit for bit in range(3, KV_TILE.bit_length() - 2)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *([0, column] for column in columns)],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[CONSUMER_ROWS.value // 2, KV_TILE // 2],
    )


@gluon.jit
def own_draws(P, batch, i, j, key, F: gl.constexpr):
    """The two words of a draw whose entries cannot share it: each of the four draws its half for itself."""
    first = _own_draw(P, batch, i, j, key, F) | (_own_draw(P, batch, i, j + 8, key, F) << 16)
    second = _own_draw(P, batch, i + 8, j, key, F) | (_own_draw(P, batch, i + 8, j + 8, key, F) << 16)
    return first, second


@gluon.jit
def _own_draw(P, batch, query, key_number, key, F: gl.constexpr):
    """The 16 bits of each pair of these queries and keys, which are broadcast against each other."""
    i = gl.load(P.q_index + (batch * F.q_index_batch + gl.minimum(query, F.q_length - 1)))
    j = gl.load(P.kv_index + (batch * F.kv_index_batch + gl.minimum(key_number, F.kv_length - 1)))
    return half_of(unsigned(i), unsigned(j), key, F)


@gluon.jit
def kept(first, second, F: gl.constexpr, COLUMNS: gl.constexpr, SCORES: gl.constexpr, BY_KEYS: gl.constexpr = False):
    """Whether dropout keeps each entry of a tile of scores. `first` and `second` are the two words of each draw.

    `BY_KEYS`: the rows of the tile are keys.
    """
    # A half is compared as the upper half of a word. The bits below change nothing: LEAST has zeros there.
    LEAST: gl.constexpr = F.threshold << 16
    in_first = gl.join((first << 16) >= LEAST, first >= LEAST)
    in_second = gl.join((second << 16) >= LEAST, second >= LEAST)
    four = gl.reshape(gl.join(in_first, in_second), [CONSUMER_ROWS // 16, 8, COLUMNS // 16, 8, 2, 2])
    # The halves of a word are for keys 8 apart, the words for queries 8 apart.
    ROWS: gl.constexpr = 4 if BY_KEYS else 5
    whole = gl.reshape(gl.permute(four, (0, ROWS, 1, 2, 9 - ROWS, 3)), [CONSUMER_ROWS, COLUMNS])
    return gl.convert_layout(whole, SCORES)
