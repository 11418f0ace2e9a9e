# SPDX-License-Identifier: Apache-2.0
"""The plugin of pytest that runs the suite: its options, its header, and the backends it runs on.

Nothing here imports JAX before the suite is asked for.
"""

import functools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from . import environment, expectations, tiers, tolerance_factor
from .collection import PARAMETER
from .recorder import BACKEND_OPTION, FACTOR_OPTION, TIER_OPTION, Recorder

LARGEST_OPTION: Final = "--ringattn-largest-ring"
REPORT_OPTION: Final = "--ringattn-report"
EXPECTATIONS_OPTION: Final = "--ringattn-expectations"
MIXTURE: Final = "ringattn_mixture"
FORWARD_MIXTURE: Final = "ringattn_forward_mixture"
COVERS: Final = 2
"""How many covers of mixtures the full tier has; the core tier has one."""
FORWARD_STEP: Final = 8
"""One of this many mixtures also runs without gradients, which is another program."""
DEVICES: Final = tiers.RINGS[-1]
COUNT_FLAG: Final = "--xla_force_host_platform_device_count"
SUITE: Final = "ringattn_conformance"
RECORDER: Final = "ringattn_recorder"


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
        TIER_OPTION,
        choices=list(tiers.TIERS),
        default=tiers.FULL,
        dest="ringattn_tier",
        help="how much is tried (default: %(default)s). "
        + "; ".join(f"{n}: {what}" for n, what in tiers.TIERS.items()),
    )
    group.addoption(
        LARGEST_OPTION,
        type=int,
        choices=range(1, DEVICES + 1),
        default=DEVICES,
        metavar="RANKS",
        dest="ringattn_largest_ring",
        help="no rotating case on a ring of more ranks (default: %(default)s), which spoils the certificate; "
        "for backends that are slow to interpret",
    )
    group.addoption(
        REPORT_OPTION,
        type=Path,
        metavar="FILE",
        dest="ringattn_report",
        help="write what was tried, on what, and the worst errors, as JSON",
    )
    group.addoption(
        EXPECTATIONS_OPTION,
        type=Path,
        metavar="PATH",
        dest="ringattn_expectations",
        help="the backend's pyproject.toml, whose [tool.ringattn-conformance] names the failures that are expected "
        "(default: ./pyproject.toml, where there is one)",
    )
    group.addoption(
        FACTOR_OPTION,
        type=tolerance_factor.parsed,
        default=1.0,
        metavar="X",
        dest="ringattn_tolerance_factor",
        help="multiply every tolerance; more than 1 spoils the certificate",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Runs before any conftest.py can import JAX, which reads XLA_FLAGS once."""
    if _concerns(early_config.known_args_namespace, args):
        force_devices()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{tiers.MARK}(tier, *ids): the smallest tier of the suite that runs the test")
    if _concerns(config.option, config.args):
        force_devices()
        config.add_cleanup(functools.partial(tolerance_factor.use, tolerance_factor.used()))
        tolerance_factor.use(config.option.ringattn_tolerance_factor)
        expected = expectations.read(config.option.ringattn_expectations, config.invocation_params.dir)
        config.pluginmanager.register(Recorder(config, expected, lambda: backends(config)), RECORDER)


def force_devices() -> None:
    """Makes eight CPU devices, unless XLA_FLAGS sets a number or JAX is already imported."""
    flags = os.environ.get("XLA_FLAGS", "")
    if COUNT_FLAG not in flags and "jax" not in sys.modules:
        os.environ["XLA_FLAGS"] = f"{flags} {COUNT_FLAG}={DEVICES}".strip()


def _concerns(options: Any, args: Iterable[str]) -> bool:
    """Whether this run of pytest uses the suite; the plugin does nothing in other runs."""
    return bool(getattr(options, "ringattn_backends", None)) or any(SUITE in arg for arg in args)


def pytest_report_header(config: pytest.Config) -> list[str]:
    recorder = config.pluginmanager.get_plugin(RECORDER)
    if recorder is None:
        return []
    options, versions = config.option, environment.versions()
    lines = [f"ringattn: {', '.join(f'{name} {version}' for name, version in versions.items())}"]
    lines += [f"ringattn backend: {described(name)}" for name in backends(config)]
    lines.append(f"ringattn tier: {options.ringattn_tier}, rings of up to {options.ringattn_largest_ring} by turns")
    if options.ringattn_tolerance_factor != 1:
        lines.append(f"ringattn tolerances: TIMES {options.ringattn_tolerance_factor:g}")
    expected = sum(len(recorder.expected.of(name)) for name in backends(config))
    lines += [f"ringattn expected failures: {expected}"] if expected else []
    variables = ", ".join(f"{name}={value}" for name, value in environment.variables().items())
    return [*lines, "ringattn environment: " + (variables or "nothing set")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = metafunc.fixturenames
    mixtures = [name for name in names if name in (MIXTURE, FORWARD_MIXTURE)]
    if mixtures:
        metafunc.parametrize(
            (PARAMETER, *mixtures), _mixtures(metafunc.config, FORWARD_STEP if FORWARD_MIXTURE in names else 1)
        )
    elif PARAMETER in names:
        metafunc.parametrize(PARAMETER, backends(metafunc.config))
    if "ringattn_point" in names:
        from .lattice import points

        found = points(metafunc.config.option.ringattn_largest_ring)
        parameters = [pytest.param(point, id=str(point), marks=tiers.mark(tier)) for point, tier in found]
        metafunc.parametrize("ringattn_point", parameters)


@pytest.fixture
def ringattn_largest_ring(request: pytest.FixtureRequest) -> int:
    """The largest ring on which cases run, by the option of the command line."""
    return request.config.option.ringattn_largest_ring


def _mixtures(config: pytest.Config, step: int) -> list[Any]:
    """Every backend with every `step`-th of its mixtures; those of the first cover are in the core tier."""
    from ringattn_core.backends import discovery
    from ringattn_core.contract.features import Feature

    from .mixtures import mixtures

    found = []
    for name in backends(config):
        features = frozenset(filter(discovery.get(name).descriptor().supports, Feature))
        for mixture in mixtures(features, config.option.ringattn_largest_ring, COVERS)[::step]:
            tier = tiers.mark(tiers.FULL if mixture.cover else tiers.CORE)
            found.append(pytest.param(name, mixture, id=f"{name}-{mixture}", marks=tier))
    return found


def backends(config: pytest.Config) -> list[str]:
    """The backends named on the command line, or every installed one that is available on this machine."""
    from ringattn_core.backends import discovery
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
        from ringattn_core.errors import from_clone

        raise pytest.UsageError(
            f"no ring-attention backend can run here ({why}). To add one: {from_clone('ringattn-xla')}"
        )
    return available


def described(name: str) -> str:
    """A line about a backend: name, distribution, version and devices."""
    import jax
    from ringattn_core.backends import discovery

    found = discovery.registrations()[name]
    devices = jax.devices()
    return f"{name} of {found.distribution} {found.version} on {len(devices)} {devices[0].platform} devices"
