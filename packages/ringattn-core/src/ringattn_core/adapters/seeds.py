# SPDX-License-Identifier: Apache-2.0
"""Which dropout seed a random key of JAX gives: equal keys drop the same entries, split keys unrelated ones."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from ..errors import InputError


def seed(argument: str, key: Any, rate: float) -> UInt32[Array, ""]:
    """32 random bits of the key, typed or raw; every rank of a ring must pass the same key."""
    if key is None:
        raise InputError(argument, f"is missing with a dropout of {rate}", "Pass a jax.random.key, a new one each step")
    return jax.random.bits(key, (), jnp.uint32)
