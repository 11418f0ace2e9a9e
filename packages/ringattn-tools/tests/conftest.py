# SPDX-License-Identifier: Apache-2.0
"""Setup of the tests of the tools: made-up distributions of backends."""

from collections.abc import Callable

import hypothesis
import pytest

hypothesis.settings.register_profile("promises", derandomize=True, deadline=None, database=None, max_examples=60)
hypothesis.settings.load_profile("promises")

PLUGIN = """
    from ringattn_core.contract.features import Feature
    from ringattn_core.contract.backend import Backend
    FEATURES = frozenset(Feature) - {{Feature.DROPOUT}}
    BACKEND = Backend("{name}", {api}, {platforms}, FEATURES, {door}="{name}_block:{kernel}",
                      priority={priority}, probe={probe!r})
"""
BLOCK = """
    class Kernel:
        def forward(self, block, partial): ...
        def backward(self, block, dout, lse, delta, dq): ...
    KERNEL = Kernel()
    def RING(query, key, value, **options): ...
    def crash(): raise OSError("libfoo.so is missing")
    def unsound(): return "no such device in the house"
"""


@pytest.fixture
def add(install: Callable[..., None]) -> Callable[..., None]:
    """Installs a backend. Keywords are fields of its descriptor; `source` replaces the module of its entry point."""

    def add(name: str, source: str = PLUGIN, **fields: object) -> None:
        given = {"api": 1, "platforms": ("cpu",), "door": "kernel", "kernel": "KERNEL", "priority": 0, "probe": None}
        modules = {f"{name}_plugin": source.format(name=name, **{**given, **fields}), f"{name}_block": BLOCK}
        install(f"made-{name}", {name: f"{name}_plugin:BACKEND"}, modules, "2.5")

    return add


@pytest.fixture(autouse=True)
def _without_settings(without_settings: None) -> None: ...
