# SPDX-License-Identifier: Apache-2.0
"""How pytest runs the suite: which backends, on how many devices, and what the header says.

Nothing here imports JAX before the suite is asked for.
"""

import os
import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any, Final

import pytest

BACKEND_OPTION: Final = "--ringattn-backend"
FULL_OPTION: Final = "--ringattn-full"
DEVICES: Final = 8
COUNT_FLAG: Final = "--xla_force_host_platform_device_count"
SUITE: Final = "ringattn_conformance"
REPORTED: Final = ("jax", "jaxlib", "numpy", "ringattn-core", "ringattn-conformance")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ringattn", "ring-attention conformance")
    group.addoption(
        BACKEND_OPTION,
        action="append",
        metavar="NAME",
        dest="ringattn_backends",
        help="the backend to certify; repeat for several (default: every installed one that is available here)",
    )
    group.addoption(
        FULL_OPTION,
        action="store_true",
        dest="ringattn_full",
        help="every case on every ring size and layout, not a rotating selection",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Before anybody's conftest.py can import JAX, which reads the flag once."""
    if _concerns(early_config.known_args_namespace, args):
        force_devices()


def pytest_configure(config: pytest.Config) -> None:
    if _concerns(config.option, config.args):
        force_devices()


def force_devices() -> None:
    """Lets the CPU stand for eight devices, unless the user chose a number or JAX is imported already."""
    flags = os.environ.get("XLA_FLAGS", "")
    if COUNT_FLAG not in flags and "jax" not in sys.modules:
        os.environ["XLA_FLAGS"] = f"{flags} {COUNT_FLAG}={DEVICES}".strip()


def _concerns(options: Any, args: Iterable[str]) -> bool:
    """Whether this run is about the suite: other tests of an environment that holds it are left alone."""
    return bool(getattr(options, "ringattn_backends", None)) or any(SUITE in arg for arg in args)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not _concerns(config.option, config.args):
        return []
    versions = {name: _version(name) for name in REPORTED}
    lines = [f"ringattn: python {platform.python_version()}, " + ", ".join(f"{n} {v}" for n, v in versions.items())]
    lines += [f"ringattn backend: {described(name)}" for name in backends(config)]
    variables = [name for name in sorted(os.environ) if name.startswith(("RINGATTN_", "JAX_")) or name == "XLA_FLAGS"]
    return [*lines, "ringattn environment: " + (", ".join(f"{n}={os.environ[n]}" for n in variables) or "nothing set")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Every failure of the suite ends with the line that runs it alone."""
    report = yield
    backend = getattr(item, "callspec", None) and item.callspec.params.get("ringattn_backend")  # pyright: ignore
    if report.failed and backend:
        module = item.getparent(pytest.Module)
        where = module.obj.__name__ if module is not None else ""
        line = f"pytest --pyargs '{where}::{item.name}' {BACKEND_OPTION} {backend}"
        report.sections.append(("run this alone", line))
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = metafunc.fixturenames
    if "ringattn_backend" in names:
        metafunc.parametrize("ringattn_backend", backends(metafunc.config))
    if "ringattn_point" in names:
        from .lattice import points

        found = points(full=bool(metafunc.config.getoption("ringattn_full")))
        metafunc.parametrize("ringattn_point", found, ids=str)


def backends(config: pytest.Config) -> list[str]:
    """The names given, or every installed backend that can run here."""
    from ringattn_core import discovery
    from ringattn_core.errors import RingAttnError

    named = config.getoption("ringattn_backends")
    if named:
        for name in named:
            try:
                reason = discovery.get(name).why_unavailable()
            except RingAttnError as error:
                raise pytest.UsageError(f"{BACKEND_OPTION} {name}: {error}") from error
            if reason is not None:
                raise pytest.UsageError(f"{BACKEND_OPTION} {name}: {reason}")
        return list(dict.fromkeys(named))
    reasons = {name: found.why_unavailable() for name, found in discovery.registrations().items()}
    available = [name for name, reason in reasons.items() if reason is None]
    if not available:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "none is installed"
        raise pytest.UsageError(f"no ring-attention backend can run here ({why}). Add one: pip install ringattn-xla")
    return available


def described(name: str) -> str:
    """A backend by name, distribution and version, and where it runs."""
    import jax
    from ringattn_core import discovery

    found = discovery.registrations()[name]
    devices = jax.devices()
    return f"{name} of {found.distribution} {found.version} on {len(devices)} {devices[0].platform} devices"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
