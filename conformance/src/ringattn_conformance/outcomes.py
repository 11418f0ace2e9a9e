# SPDX-License-Identifier: Apache-2.0
"""What a backend owes a call: the right answer where it declares every feature needed, a refusal elsewhere."""

import contextlib
from collections.abc import Iterable, Iterator

import pytest
from ringattn_core.backends import discovery
from ringattn_core.contract.features import Feature
from ringattn_core.errors import UnsupportedFeatureError

from . import notes


def supports(backend: str, *features: Feature) -> bool:
    """Whether a backend declares all of them as supported."""
    return not lacking(backend, features)


def lacking(backend: str, features: Iterable[Feature]) -> list[Feature]:
    descriptor = discovery.get(backend).descriptor()
    return [feature for feature in features if not descriptor.supports(feature)]


@contextlib.contextmanager
def owed(backend: str, features: Iterable[Feature]) -> Iterator[bool]:
    """Runs its body, which makes the call. Yields whether the answer is owed; where it is not, the call must raise.

    The refusal names the backend and one of the features.
    """
    features = frozenset(features)
    missing = lacking(backend, features)
    if not missing:
        notes.needs(features)
        yield True
        return
    notes.refuses(missing)
    with pytest.raises(UnsupportedFeatureError) as refusal:
        yield False
    assert refusal.value.backend == backend
    assert any(feature.name in refusal.value.feature for feature in missing), str(refusal.value)
