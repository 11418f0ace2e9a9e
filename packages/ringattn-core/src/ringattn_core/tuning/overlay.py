# SPDX-License-Identifier: Apache-2.0
"""Sets kernel parameters for the calls in a `with overlay(...)` block that set none themselves."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..config import BwdParams, FwdParams, RingAttentionConfig

OPEN: Final = RingAttentionConfig()
"""The parameters of a call that sets none."""

_context: contextvars.ContextVar[tuple[RingAttentionConfig, ...]] = contextvars.ContextVar(
    "ringattn_overlay", default=()
)


@contextlib.contextmanager
def overlay(cfg: RingAttentionConfig | Mapping[str, Any]) -> Iterator[None]:
    """Sets the forward or backward parameters in `cfg` for the calls in this context that set none.

    The innermost overlay that sets them wins. An overlay that names a backend applies to that backend's calls only.
    Overlays are read when a call is traced: a function that `jax.jit` has already compiled does not change.
    """
    token = _context.set((RingAttentionConfig.of(cfg, "overlay"), *_context.get()))
    try:
        yield
    finally:
        _context.reset(token)


def overlays(backend: str) -> tuple[RingAttentionConfig, ...]:
    """The overlays of this context that apply to calls of `backend`, the innermost first."""
    return tuple(cfg for cfg in _context.get() if cfg.backend_name in (None, backend))


def filled(forward: FwdParams, backward: BwdParams, cfg: RingAttentionConfig) -> tuple[FwdParams, BwdParams]:
    """`forward` and `backward`, or where one of them sets nothing, that of `cfg`."""
    forward = cfg.fwd_params if forward == OPEN.fwd_params else forward
    return forward, cfg.bwd_params if backward == OPEN.bwd_params else backward
