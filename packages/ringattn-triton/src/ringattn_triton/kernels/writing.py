# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false
"""How what a thread holds is written from where it is, in words of 32 bits or bytes.

Left to itself the compiler has threads pass each other what they hold before they write it, and all of them wait for
that: in a loop the products of one half of the threads then run beside nothing.
"""

import triton
import triton.language as tl


@triton.jit
def written(at, words, F: tl.constexpr):
    """Each word where it belongs, or its lowest byte. Threads that hold the same word all write it."""
    if F.fast and at.dtype.element_ty.primitive_bitwidth == 8:
        tl.inline_asm_elementwise(
            "st.global.b8 [$1], $2; mov.b32 $0, $2;", "=r,l,r", [at, words], dtype=words.dtype, is_pure=False, pack=1
        )
    elif F.fast:
        tl.inline_asm_elementwise(
            "st.global.b32 [$1], $2; mov.b32 $0, $2;", "=r,l,r", [at, words], dtype=words.dtype, is_pure=False, pack=1
        )
    else:
        tl.store(at, words.to(at.dtype.element_ty))
