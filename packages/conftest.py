# SPDX-License-Identifier: Apache-2.0
"""Setup of the tests of every package: eight CPU devices, strict promotion, and made-up distributions."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import gc
import logging
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from jax._src.lru_cache import LRUCache

# JAX makes millions of small objects while it traces. With the default thresholds, (700, 10, 10), the search for
# garbage takes 7% of the CPU time of these tests; with these, 1.5%.
gc.set_threshold(20_000, 20, 20)

# No module of ours may be imported here: core's conftest installs a hook for the import of some of them.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def keep_whole(self: LRUCache, key: str, value: bytes) -> None:
    """Keeps a compiled program for other processes, as `LRUCache.put` does without a limit of size.

    JAX's own function lets another worker read a file that is half written.
    """
    path = Path(self.path, f"{key}-cache")
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(value)
        Path(file.name).replace(path)


if jax.config.jax_compilation_cache_max_size == -1:  # pyright: ignore[reportAttributeAccessIssue]
    LRUCache.put = keep_whole


@pytest.fixture(autouse=True)
def _drop_programs() -> Iterator[None]:
    """After a test, if this process has become large. What later tests share with earlier ones is compiled again."""
    yield
    from ringattn_conformance import memory  # not before the hook of core's conftest

    memory.drop_programs()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a made-up distribution of modules and entry points, in a group without real backends."""
    from ringattn_core.backends import discovery

    monkeypatch.setattr(discovery, "GROUP", "ringattn.backends.of.a.test")
    before = set(sys.modules)

    def write(distribution: str, entries: dict[str, str], modules: dict[str, str], version: str = "1.0") -> None:
        site = tmp_path / distribution
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[{discovery.GROUP}]\n{lines}")
        for name, source in modules.items():
            (site / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(site)
        discovery.clear()

    discovery.clear()
    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    discovery.clear()


@pytest.fixture
def without_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of ringattn is set, and no backend is remembered."""
    from ringattn_core.backends import discovery

    for variable in [name for name in os.environ if name.startswith("RINGATTN_")]:
        monkeypatch.delenv(variable)
    discovery.clear()
    yield
    discovery.clear()


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """For a test of what XLA says while it compiles: JAX takes no program that an earlier run has kept."""
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Captures the logger "ringattn" at every level."""
    caplog.set_level(logging.DEBUG, logger="ringattn")
    return caplog
