# SPDX-License-Identifier: Apache-2.0
"""Which checks there are, and in which environment each one runs."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nox

nox.needs_version = ">=2025.11.12"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "types", "tests", "conformance", "docs"]
# An interpreter that is not there is reported as skipped; it is never downloaded.
nox.options.error_on_missing_interpreters = False
nox.options.download_python = "never"

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
LIBRARIES = tuple(sorted(str(path.parent) for path in ROOT.glob("packages/*/pyproject.toml")))
PACKAGES = (*LIBRARIES, str(ROOT / "conformance"))
EVERYWHERE = tuple(path for path in LIBRARIES if Path(path).name in ("ringattn-core", "ringattn-xla"))
BACKENDS = ("xla", "triton", "tpu")
BENCHMARKS = tuple(f"benchmarks/{name}.py" for name in ("import_time", "compile_time", "ring_memory", "cpu_attention"))
# (Python, JAX, groups of compilers): the newest JAX of each interpreter, and the floor, which compiles for nothing.
SUPPORTED = (
    ("3.11", "0.10.2", ("triton-3-6", "libtpu")),
    ("3.12", "0.11.2", ("triton-3-9",)),
    ("3.11", "0.10.0", ()),
)
# The tests of core that a new version of JAX breaks first. `nox -s tests` runs all tests on the first version above and
# these on the second; `nox -s exhaustive` runs all tests on all versions.
LEAN_ON_JAX = (
    "ring",
    "ring_of_several_axes",
    "sharding",
    "batching",
    "masks",
    "layout",
    "import_hygiene",
    "adapters_jax_nn",
)
CPU = {"JAX_PLATFORMS": "cpu"}
# XLA's optimiser for CPUs takes more than half of the time of tests that are not about what it makes of a program.
# What users run on a CPU, and what libtpu compiles, which reads these flags too, is tested without them.
UNOPTIMISED = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
ONLY_BEFORE_JAX_0_11 = ("--xla_cpu_use_fusion_emitters=false",)
COMPILED_BY_LIBTPU = "packages/ringattn-tpu"
UNOPTIMISED_TESTS = ("packages", f"--ignore={COMPILED_BY_LIBTPU}")
# Without a GPU or TPU the suite runs the kernels in their interpreter, and no ring of eight by turns. That of Pallas is
# slow: what only a kernel can get wrong is tried in every case, the rest as far as the core tier goes.
INTERPRETED = ("triton", "tpu")
SUITE = "ringattn_conformance.suite"
OF_KERNELS = tuple(f"{SUITE}.test_{name}" for name in ("block", "masks", "dropout", "numerics"))
IN_PARTS = {"tpu": ((SUITE, "--ringattn-tier", "core"), OF_KERNELS)}
# The examples of strangers' backends, by the name that each registers.
STRANGERS = {"example": "third-party-backend", "example-ring": "third-party-ring"}
# Every module of ours, wherever Python finds it, is of the environment that the session made.
INSTALLED = """
import importlib.util, pathlib, sys
for name in sys.argv[1:]:
    origin = pathlib.Path(importlib.util.find_spec(name).origin)
    assert origin.is_relative_to(sys.prefix), f"{name} comes from {origin}"
"""


def group(name: str) -> tuple[str, ...]:
    """The requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), name)


def hurried(session: nox.Session) -> dict[str, str]:
    """The environment of tests that need no optimised programs; a flag that XLA does not know would end the process."""
    version = session.run("python", "-c", "import jax; print(jax.__version__)", silent=True, env=CPU)
    old = str(version).startswith("0.10.")
    return CPU | {"XLA_FLAGS": " ".join((*UNOPTIMISED, *(ONLY_BEFORE_JAX_0_11 if old else ())))}


def runs(python: str) -> bool:
    """Whether a command is a Python that starts: a version manager's shim may be there and refuse."""
    try:
        return subprocess.run([python, "-c", ""], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def reveal(version: str) -> bool:
    """Whether an interpreter is here. One that pyenv holds, but does not show, is put on the PATH: the first one that
    runs stays first.
    """
    name = f"python{version}"
    if version == "{}.{}".format(*sys.version_info) or runs(name):
        return True
    if not shutil.which("pyenv"):
        return False
    prefix = subprocess.run(["pyenv", "prefix", version], capture_output=True, text=True).stdout.strip()
    if prefix and runs(str(Path(prefix, "bin", name))):
        os.environ["PATH"] = os.pathsep.join([str(Path(prefix, "bin")), os.environ["PATH"]])
    return runs(name)


for _version in sorted({python for python, *_ in SUPPORTED}):
    reveal(_version)
# What strangers' wheels are tried with: an interpreter that no other session has, if it is here.
NEWEST = "3.13" if reveal("3.13") else None


@nox.session
def quickstart(session: nox.Session) -> None:
    """A ring of 8 over 16k packed tokens with gradients, on this machine's CPU: a table and a plot."""
    session.install(*group("quickstart"), *EVERYWHERE)
    session.run("python", "examples/quickstart.py", *session.posargs, env=CPU)


@nox.session
@nox.parametrize("python,jax,compilers", [nox.param(*case, id="jax-{1}".format(*case)) for case in SUPPORTED[:2]])
def tests(session: nox.Session, jax: str, compilers: tuple[str, ...]) -> None:
    """Every test on the oldest JAX that has a compiler; on the newest, those that a new JAX breaks first."""
    install_for_tests(session, jax, compilers)
    core, xla = (f"{path}/tests" for path in EVERYWHERE)
    parts: tuple[tuple[str, ...], ...] = (("tests", COMPILED_BY_LIBTPU), UNOPTIMISED_TESTS)
    if jax != SUPPORTED[0][1]:
        parts = ((*(f"{core}/test_{name}.py" for name in LEAN_ON_JAX), xla),)
    test(session, *((session.posargs,) if session.posargs else parts))


@nox.session(default=False)
@nox.parametrize("python,jax,compilers", [nox.param(*case, id="jax-{1}".format(*case)) for case in SUPPORTED[1:]])
def every_test(session: nox.Session, jax: str, compilers: tuple[str, ...]) -> None:
    """All tests of the packages on one of the other supported versions of JAX."""
    install_for_tests(session, jax, compilers)
    test(session, UNOPTIMISED_TESTS if compilers else EVERYWHERE)


@nox.session(default=False)
def exhaustive(session: nox.Session) -> None:
    """All that CI leaves out, three hours or so: all tests on every JAX, and the suite's full tier on every backend."""
    session.notify("tests")
    for _, jax, _ in SUPPORTED[1:]:
        session.notify(f"every_test(jax-{jax})")
    for backend in BACKENDS:
        session.notify(f"conformance({backend})", ["--ringattn-tier", "full", "--ringattn-largest-ring", "8"])


def install_for_tests(session: nox.Session, jax: str, compilers: tuple[str, ...]) -> None:
    """JAX, the packages and what their tests need. Without compilers, only the packages that run on any machine."""
    if not compilers:
        session.install(f"jax=={jax}", *group("test"), *EVERYWHERE, str(ROOT / "conformance"))
        return
    pins = [requirement for name in compilers for requirement in group(name)]
    session.install(f"jax=={jax}", *group("test"), *pins, *PACKAGES)
    # A few megabytes that let a machine without a GPU lower programs for one; what they depend on is the GPU's.
    session.install("--no-deps", f"jax-cuda13-plugin=={jax}")


def test(session: nox.Session, *parts: Sequence[str]) -> None:
    """pytest on each part; what libtpu compiles, and what users name, with XLA's optimiser."""
    quick = hurried(session)
    for part in parts:
        optimised = session.posargs or COMPILED_BY_LIBTPU in part
        session.run("pytest", "-n", "2", *part, env=CPU if optimised else quick)


@nox.session
def build(session: nox.Session) -> None:
    """Every distribution: the sdist, the wheel made from that sdist, and what they say of themselves."""
    shutil.rmtree(DIST, ignore_errors=True)
    session.install(*group("build"))
    for package in PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(DIST), package, silent=True)
    session.install("--no-deps", *map(str, DIST.glob("*.whl")))
    session.run("python", "tests/wheels.py", str(DIST))


@nox.session(requires=["build"])
@nox.parametrize("backend", BACKENDS, ids=BACKENDS)
def conformance(session: nox.Session, backend: str) -> None:
    """The suite against one backend, from wheels alone: what a wheel does not declare is not there."""
    names = ("core", backend, "conformance")
    wheels = [str(*DIST.glob(f"ringattn_{name}-*.whl")) for name in names]
    pins = group("triton-3-6") if backend == "triton" else ()
    session.install(*group("jax"), *pins, *wheels)
    own_tests = ROOT / "conformance" / "tests"
    interpreted = backend in INTERPRETED
    variables = {f"RINGATTN_{backend.upper()}_INTERPRET": "1"} if interpreted else {}
    session.chdir(session.create_tmp())
    chosen = ("--ringattn-backend", backend, *(("--ringattn-largest-ring", "4") if interpreted else ()))
    quick = hurried(session)
    environment = quick | variables if interpreted else CPU
    for part in ((SUITE,),) if session.posargs else IN_PARTS.get(backend, ((SUITE,),)):
        session.run("pytest", "-n", "2", "--pyargs", *part, *chosen, *session.posargs, env=environment)
    if backend == BACKENDS[0]:
        session.run("pytest", str(own_tests), "-n", "2", env=quick)


@nox.session(requires=["build"], python=NEWEST)
def thirdparty(session: nox.Session) -> None:
    """Strangers' wheels beside ours, certified from an empty folder by the command that a stranger has."""
    wheels = Path(session.create_tmp())
    shutil.rmtree(wheels)
    session.install(*group("build"))
    for folder in STRANGERS.values():
        project = str(ROOT / "examples" / folder)
        session.run("python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), project, silent=True)
    ours = [str(*DIST.glob(f"ringattn_{name}-*.whl")) for name in ("core", "xla", "conformance")]
    session.install(*group("jax"), *ours, *map(str, wheels.glob("*.whl")))
    modules = [path.name.split("-")[0] for path in map(Path, [*ours, *wheels.glob("*.whl")])]
    environment = CPU | {"PYTHONPATH": None}
    with tempfile.TemporaryDirectory() as empty, session.chdir(empty):
        session.run("python", "-P", "-c", INSTALLED, *modules, env=environment)
        for backend in STRANGERS:
            options = session.posargs or ("--tier", "core", "-n", "2")
            session.run("ringattn-conformance", "run", backend, *options, env=environment)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, its formatter, and the rules of the house."""
    session.install(*group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("pytest", "-q", "tests/test_house_rules.py")


@nox.session
def types(session: nox.Session) -> None:
    """pyright over everything."""
    session.install(*group("types"), *PACKAGES)
    session.run("pyright", "--pythonpath", shutil.which("python", path=session.bin) or "python")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation; a warning is an error."""
    session.install(*group("docs"), *LIBRARIES)
    session.run("sphinx-build", "-W", "--keep-going", "-n", "-q", "docs", "build/docs", env=CPU)
    session.log("open build/docs/index.html")


@nox.session
def bench(session: nox.Session) -> None:
    """The benchmarks, one after the other, or those named: each prints its targets beside what it measures."""
    session.install(*group("bench"), *EVERYWHERE)
    for script in session.posargs or BENCHMARKS:
        session.run("python", script, env=CPU)
