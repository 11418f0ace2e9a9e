# SPDX-License-Identifier: Apache-2.0
"""How pytest runs the suite: which backends, on how many devices, and what the header says.

Nothing here imports JAX before the suite is asked for.
"""

import os
import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pytest

from . import report as reporting
from .report import PROPERTY

BACKEND_OPTION: Final = "--ringattn-backend"
FULL_OPTION: Final = "--ringattn-full"
LARGEST_OPTION: Final = "--ringattn-largest-ring"
REPORT_OPTION: Final = "--ringattn-report"
DEVICES: Final = 8
COUNT_FLAG: Final = "--xla_force_host_platform_device_count"
SUITE: Final = "ringattn_conformance"
REPORTED: Final = ("jax", "jaxlib", "numpy", "ringattn-core", "ringattn-conformance")
RUN: Final = reporting.Run()


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
    group.addoption(
        LARGEST_OPTION,
        type=int,
        choices=range(1, DEVICES + 1),
        default=DEVICES,
        metavar="RANKS",
        dest="ringattn_largest_ring",
        help="no rotating case on a ring of more ranks (default: %(default)s); for backends that are slow to interpret",
    )
    group.addoption(
        REPORT_OPTION,
        type=Path,
        metavar="FILE",
        dest="ringattn_report",
        help="write what was tried, on what, and the worst errors, as JSON",
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
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    lines = [f"ringattn: python {platform.python_version()}, {versions}"]
    lines += [f"ringattn backend: {described(name)}" for name in backends(config)]
    lines.append(f"ringattn rings: up to {config.option.ringattn_largest_ring} ranks in the rotation of cases")
    variables = ", ".join(f"{name}={value}" for name, value in _variables().items())
    return [*lines, "ringattn environment: " + (variables or "nothing set")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Every failure of the suite ends with the line that runs it alone; every test hands on the errors it measured."""
    backend = getattr(item, "callspec", None) and item.callspec.params.get("ringattn_backend")  # pyright: ignore
    measuring = sys.modules.get(f"{SUITE}.tolerances")
    if backend and call.when == "call":
        item.user_properties.append((PROPERTY, (backend, measuring.taken() if measuring else {})))
    done = yield
    if done.failed and backend:
        module = item.getparent(pytest.Module)
        where = module.obj.__name__ if module is not None else ""
        line = f"pytest --pyargs '{where}::{item.name}' {BACKEND_OPTION} {backend}"
        done.sections.append(("run this alone", line))
    return done


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    measured: Any = dict(report.user_properties).get(PROPERTY)
    if measured and report.when == "call":
        RUN.add(measured[0], report.nodeid, report.outcome, measured[1])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In the process that was started: under xdist the workers' reports end there."""
    options = session.config.option
    if options.ringattn_report and not hasattr(session.config, "workerinput"):
        about = {
            "versions": _versions(),
            "environment": _variables(),
            "options": {"full": bool(options.ringattn_full), "largest_ring": options.ringattn_largest_ring},
            "exit_status": int(exitstatus),
        }
        reporting.write(options.ringattn_report, reporting.document(RUN, about))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = metafunc.fixturenames
    if "ringattn_backend" in names:
        metafunc.parametrize("ringattn_backend", backends(metafunc.config))
    if "ringattn_point" in names:
        from .lattice import points

        options = metafunc.config.option
        found = points(bool(options.ringattn_full), options.ringattn_largest_ring)
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


def _versions() -> dict[str, str]:
    return {name: _version(name) for name in REPORTED}


def _variables() -> dict[str, str]:
    """The variables of the environment that count."""
    counting = [name for name in sorted(os.environ) if name.startswith(("RINGATTN_", "JAX_")) or name == "XLA_FLAGS"]
    return {name: os.environ[name] for name in counting}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
