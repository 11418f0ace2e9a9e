# SPDX-License-Identifier: Apache-2.0
"""Setup of all tests of the tools: eight CPU devices, strict promotion, and made-up distributions of backends."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import jax
import pytest
from ringattn_core.backends import discovery

jax.config.update("jax_numpy_dtype_promotion", "strict")
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
    def false(): return False
    def unsound(): return "no such device in the house"
"""


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a made-up distribution with a backend, in a group without real backends.

    Keywords are fields of its descriptor. `source` replaces the module of its entry point.
    """
    monkeypatch.setattr(discovery, "GROUP", "ringattn.backends.of.a.test")
    before = set(sys.modules)

    def add(name: str, source: str = PLUGIN, **fields: object) -> None:
        given = {"api": 1, "platforms": ("cpu",), "door": "kernel", "kernel": "KERNEL", "priority": 0, "probe": None}
        site = tmp_path / name
        info = site / f"made_{name}-2.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: made-{name}\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text(f"[{discovery.GROUP}]\n{name} = {name}_plugin:BACKEND\n")
        (site / f"{name}_plugin.py").write_text(textwrap.dedent(source.format(name=name, **{**given, **fields})))
        (site / f"{name}_block.py").write_text(textwrap.dedent(BLOCK))
        monkeypatch.syspath_prepend(site)
        discovery.clear()

    discovery.clear()
    yield add
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    discovery.clear()


@pytest.fixture(autouse=True)
def _no_backend_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in [name for name in os.environ if name.startswith("RINGATTN_")]:
        monkeypatch.delenv(variable)
    discovery.clear()
    yield
    discovery.clear()
