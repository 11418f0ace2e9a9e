# SPDX-License-Identifier: Apache-2.0
"""The plugin of pytest that runs the suite: its options, its header, and the backends it runs on.

JAX is imported only in runs of pytest that use the suite.
"""

import functools
import gc
import os
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any, Final

import pytest

from . import results, run_options, tiers
from .collection import PARAMETER, expected_failures
from .recorder import Recorder

POINT: Final = "ringattn_point"
"""The test parameter that holds a `lattice.Point`: a case with the ring and the layout that it runs on."""
SUITE: Final = "ringattn_conformance"
RECORDER: Final = "ringattn_recorder"
COUNT_FLAG: Final = "--xla_force_host_platform_device_count"
PREALLOCATE: Final = "XLA_PYTHON_CLIENT_PREALLOCATE"
PLATFORMS: Final = frozenset({"cpu", "gpu", "cuda", "rocm", "tpu"})
GARBAGE: Final = (20_000, 20, 20)
"""Thresholds of Python's garbage collector. With its own, (700, 10, 10), it takes 5 to 10% of the CPU time of the
suite, because JAX makes millions of objects while it traces."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ringattn", "ring-attention conformance")
    group.addoption(
        run_options.BACKEND,
        action="append",
        metavar="NAME",
        dest="ringattn_backends",
        help="the backend to certify; repeat for several (default: every installed one that is available here)",
    )
    for name, how in run_options.OPTIONS.items():
        group.addoption(f"--ringattn-{name}", **how)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Sets the environment before any conftest.py can import JAX, which reads XLA_FLAGS only once."""
    if _concerns(early_config.known_args_namespace, args):
        set_environment()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{tiers.MARK}(tier, *ids): the smallest tier of the suite that runs the test")
    if _concerns(config.option, config.args):
        set_environment()
        config.add_cleanup(functools.partial(gc.set_threshold, *gc.get_threshold()))
        gc.set_threshold(*GARBAGE)
        from . import comparison

        config.add_cleanup(functools.partial(setattr, comparison, "factor", comparison.factor))
        comparison.factor = config.option.ringattn_tolerance_factor
        if config.option.ringattn_seed is None:  # before workers start: they copy this process's options
            config.option.ringattn_seed = int(date.today().strftime("%Y%m%d"))
        expected = expected_failures(config.option.ringattn_expectations, config.invocation_params.dir)
        config.pluginmanager.register(Recorder(config, expected, lambda: backends(config)), RECORDER)


def _concerns(options: Any, args: Iterable[str]) -> bool:
    """Whether this run of pytest uses the suite; the plugin does nothing in other runs."""
    return bool(getattr(options, "ringattn_backends", None)) or any(SUITE in arg for arg in args)


def set_environment() -> None:
    """Makes eight CPU devices, and lets processes share a GPU. Does nothing if JAX is already imported.

    Keeps what the user has set: the number of CPU devices in XLA_FLAGS, and XLA_PYTHON_CLIENT_PREALLOCATE.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "jax" not in sys.modules:
        os.environ.setdefault(PREALLOCATE, "false")
        if COUNT_FLAG not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {COUNT_FLAG}={tiers.RINGS[-1]}".strip()


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not config.pluginmanager.has_plugin(RECORDER):
        return []
    options, versions = config.option, results.versions()
    lines = [f"ringattn: {', '.join(f'{name} {version}' for name, version in versions.items())}"]
    lines += [f"ringattn backend: {name}{tested(name)}" for name in backends(config)]
    lines.append(f"ringattn suite: {Path(__file__).parent}")
    lines.append(f"ringattn tier: {options.ringattn_tier}, seed {options.ringattn_seed}")
    if options.ringattn_tolerance_factor != 1:
        lines.append(f"ringattn tolerances: TIMES {options.ringattn_tolerance_factor:g}")
    variables = ", ".join(f"{name}={value}" for name, value in results.variables().items())
    return [*lines, "ringattn environment: " + (variables or "nothing set")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if POINT in metafunc.fixturenames:
        from . import lattice
        from .outcomes import features_of

        found = [
            pytest.param(backend, point, id=f"{backend}-{point}", marks=tiers.mark(point.tier))
            for backend in backends(metafunc.config)
            for point in lattice.calls(features_of(backend), metafunc.config.option.ringattn_seed)
        ]
        metafunc.parametrize((PARAMETER, POINT), found)
    elif PARAMETER in metafunc.fixturenames:
        metafunc.parametrize(PARAMETER, backends(metafunc.config))


def backends(config: pytest.Config) -> list[str]:
    """The backends named on the command line, or every installed one that is available on this machine."""
    from ringattn_core.backends import discovery
    from ringattn_core.errors import from_clone

    named = list(dict.fromkeys(config.getoption("ringattn_backends") or ()))
    reasons = {name: unusable(name) for name in named or discovery.registrations()}
    for name in named:
        if reasons[name] is not None:
            raise pytest.UsageError(f"{run_options.BACKEND} {name}: {reasons[name]}")
    available = [name for name, why in reasons.items() if why is None]
    if not available:
        why = "; ".join(f"{name}: {why}" for name, why in reasons.items()) or "none is installed"
        remedy = f"To add one: {from_clone('ringattn-xla')}"
        raise pytest.UsageError(f"no ring-attention backend can run here ({why}). {remedy}")
    return available


def tested(name: str) -> str:
    """Which files of a backend the run tests."""
    from ringattn_core.backends import discovery

    from .origins import file_of

    registration = discovery.get(name)
    file = file_of(registration)
    return f", registered in {registration.distribution}" if file is None else f" {registration.version} from {file}"


def unusable(name: str) -> str | None:
    """Why a backend cannot be certified here (not available, a wrong descriptor, two copies); `None` if it can."""
    import jax
    from ringattn_core.backends import discovery
    from ringattn_core.errors import RingAttnError

    from .cases import DTYPES
    from .origins import two_copies

    try:
        found = discovery.get(name)
        if (why := found.why_unavailable()) is not None:
            return why
        descriptor = found.descriptor()
        if (doubt := two_copies(found)) is not None:
            return doubt
    except RingAttnError as error:
        return str(error)
    if unknown := {*descriptor.platforms} - PLATFORMS - {jax.devices()[0].platform}:
        return f"its descriptor names the platform {min(unknown)!r}. JAX has {', '.join(sorted(PLATFORMS))}"
    if not any(feature.name.lower() in DTYPES for feature in descriptor.features):
        return f"its descriptor declares no dtype. Declare at least one of {', '.join(DTYPES).upper()}"
    return None
