# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels in Triton's cache on disk (`TRITON_CACHE_DIR`): a process loads what an earlier one compiled."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime.cache import get_cache_key, get_cache_manager

_FILE: Final = "kernel.json"


class Compiled(NamedTuple):
    """A compiled kernel, and what its launch needs.

    `code` is PTX for NVIDIA GPUs, and a code object for AMD GPUs. `shared` and `scratch` are how many bytes of shared
    and of global memory each program needs.
    """

    name: str
    code: Any
    warps: int
    shared: int
    scratch: int


def kept(source: Any, backend: Any, options: Any, compile_it: Callable[[], Compiled]) -> Compiled:
    """The compiled kernel: read from the disk, or else compiled by `compile_it` and written to the disk.

    If the disk cannot be used, every process compiles. The key has two parts. Triton's covers the kernel, its
    constants, the options and Triton itself. A digest of this package's sources covers the Python functions that
    kernels call while they are compiled.
    """
    parts = get_cache_key(source, backend, options, get_cache_invalidating_env_vars()), _sources()
    key = hashlib.sha256("".join(parts).encode()).hexdigest()
    with contextlib.suppress(OSError, ValueError, TypeError):
        path = None if knobs.compilation.always_compile else get_cache_manager(key).get_file(_FILE)
        if path is not None:
            found = Compiled(**json.loads(Path(path).read_text()))
            return found if backend.binary_ext == "cubin" else found._replace(code=bytes.fromhex(found.code))
    made = compile_it()
    with contextlib.suppress(OSError):
        code = made.code.hex() if isinstance(made.code, bytes) else made.code
        get_cache_manager(key).put(json.dumps(made._replace(code=code)._asdict()), _FILE, binary=False)
    return made


@functools.cache
def _sources() -> str:
    """A digest of this package's source files."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
