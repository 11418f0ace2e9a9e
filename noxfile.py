# SPDX-License-Identifier: Apache-2.0
"""Which checks there are, and in which environment each one runs."""

import argparse
import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import nox
import nox.command

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"ringattn needs Python 3.11 or newer, and this nox runs on {sys.version.split()[0]}: install nox on 3.11")

nox.needs_version = ">=2025.11.12"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["quick", "lint", "types", "tests", "newest_jax", "conformance", "docs"]
# An interpreter that is not there is reported as skipped; it is never downloaded.
nox.options.error_on_missing_interpreters = False
nox.options.download_python = "never"

# Sessions start hundreds of processes that import JAX: 0.7 s each with Python's bytecode files, 2.2 s without.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
LIBRARIES = tuple(sorted(str(path.parent) for path in ROOT.glob("packages/*/pyproject.toml")))
PACKAGES = (*LIBRARIES, str(ROOT / "conformance"))
# What the tests share; it is never published.
TESTING = str(ROOT / "testing")
ANY_MACHINE = ("ringattn-core", "ringattn-xla", "ringattn-tools", "ringattn-adapters", "ringattn-sparse")
EVERYWHERE = tuple(path for path in LIBRARIES if Path(path).name in ANY_MACHINE)
BACKENDS = ("xla", "triton", "tpu")
BENCHMARKS = tuple(f"benchmarks/{name}.py" for name in ("import_time", "compile_time", "ring_memory"))
# The dependency groups of the suites of benchmarks that need a device.
DEVICES = {"gpu": "on-gpus", "gpus": "on-gpus", "tpu": "on-tpus"}
# (Python, JAX, groups of compilers). `nox -s tests` uses the first, `nox -s newest_jax` the second, and
# `nox -s exhaustive` all. CONTRIBUTING says how a new JAX is taken in.
SUPPORTED = (
    ("3.11", "0.10.2", ("triton-3-6", "libtpu")),
    ("3.12", "0.12.0.1", ("triton-3-9",)),
    ("3.12", "0.11.2", ("triton-3-9",)),
    ("3.11", "0.10.0", ()),
)
# The tests of core that break first when JAX changes: meshes and `shard_map`. `nox -s thirdparty` runs the core tier of
# the suite on the newest JAX, with rings, masks and gradients.
MOVING = ("meshes", "shard_map_calls", "sharding")
ON_THE_NEWEST = tuple(f"packages/ringattn-core/tests/test_{name}.py" for name in MOVING)
CPU = {"JAX_PLATFORMS": "cpu"}
# The workers of pytest fill the cores, so NumPy starts no threads for its matrix products.
WORKERS = CPU | {"OPENBLAS_NUM_THREADS": "1"}
# XLA's optimiser for CPUs takes more than half of the time of the tests. The quickstart, the README's example and the
# suite's module about numerics run with it, and so do the tests that load libtpu, because libtpu reads these flags too.
NO_OPTIMISER = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
QUICK = (
    "--xla_cpu_parallel_codegen_split_count=1",
    # Passes that only make a program for CPUs faster, and its compilation slower.
    "--xla_disable_hlo_passes=cpu-parallel-task-assigner,reshape-mover,tree_reduction_rewriter",
)
ONLY_BEFORE_JAX_0_11 = ("--xla_cpu_use_fusion_emitters=false",)
# Bytes of compiled programs that are kept between runs.
MOST_COMPILED = 2 * 1024**3
TPU = "packages/ringattn-tpu"
LIBTPU = tuple(f"{TPU}/tests/test_{name}.py" for name in ("compile", "device_order"))
ALL_BUT_TPU = ("packages", f"--ignore={TPU}")
# Without a GPU or TPU these kernels are interpreted.
INTERPRETED = ("triton", "tpu")
SUITE = "ringattn_conformance.suite"
# Minutes of each part of `nox -s conformance` on two idle cores.
MINUTES = {"build": 1, "xla": 5, "triton": 2, "tpu": 5}
# The examples of third-party backends, by the name that each registers.
THIRD_PARTIES = {"example": "third-party-backend", "example-ring": "third-party-ring"}
# Fails where Python finds one of these modules outside the environment of the session.
INSTALLED = """
import importlib.util, pathlib, sys
for name in sys.argv[1:]:
    origin = pathlib.Path(importlib.util.find_spec(name).origin)
    assert origin.is_relative_to(sys.prefix), f"{name} comes from {origin}"
"""


# Sessions that need another one before them, by `requires` or by `notify`.
NEED_WHEELS = frozenset(("conformance", "thirdparty", "exhaustive"))


def asked() -> list[str]:
    """The sessions that the command line asks for, without parameters; none if it only asks what there is."""
    line = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-s", "-e", "--session", "--sessions", nargs="*", dest="sessions")
    parser.add_argument(
        *("-l", "--list", "--list-sessions", "-h", "--help", "--version"), action="store_true", dest="told"
    )
    found, _ = parser.parse_known_args(line)
    names = found.sessions or [*filter(None, os.environ.get("NOXSESSION", "").split(","))] or nox.options.sessions
    short = {name.partition("(")[0].partition("-3.")[0] for name in names or ()}
    return [] if found.told else sorted(short | ({"build"} if short & NEED_WHEELS else set()))


def locked(names: Sequence[str]) -> Iterator[object]:
    """Locks a file for each session. Without it, nox would remake an environment that another nox is using."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    for name in names:
        path = ROOT / ".nox" / f"{name}.lock"
        try:
            path.parent.mkdir(exist_ok=True)
            file = path.open("w")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"nox -s {name} runs in {ROOT} already: wait until it has ended, or use a second clone")
        except OSError as error:
            sys.exit(f"nox makes environments in {ROOT}, which cannot be written to ({error.strerror}): copy the clone")
        yield file


LOCKS = [*locked(asked())]


def workers() -> str:
    """How many processes pytest starts: two, or one on a machine of one core or of less than 6 GB."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    groups = Path("/proc/self/cgroup")
    lines = groups.read_text().splitlines() if groups.is_file() else []
    inner = [Path("/"), *(Path(line.split(":", 2)[2]) for line in lines)]
    files = ("/sys/fs/cgroup{}/memory.max", "/sys/fs/cgroup/memory{}/memory.limit_in_bytes")  # cgroups v2, v1
    limits = [Path(file.format(group)) for one in inner for group in (one, *one.parents) for file in files]
    bytes_there = [int(text) for path in limits if path.is_file() and (text := path.read_text().strip()).isdigit()]
    if hasattr(os, "sysconf"):
        bytes_there.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return "1" if cores < 2 or min(bytes_there, default=2**40) < 6e9 else "2"


def install(session: nox.Session, *what: str) -> None:
    """`session.install`, which in failure ends the session with one sentence that says what to do."""
    try:
        session.install(*what)
    except nox.command.CommandFailed:
        session.error(
            f"the lines above say why what {session.name} needs could not be installed. It needs a network, or a "
            "mirror that pip and uv are told of; without one, nox -R -s reuses an environment of an earlier run"
        )


def compiled(session: nox.Session) -> dict[str, str]:
    """The environment in which JAX keeps compiled programs between runs, apart for each kind of processor.

    JAX's key covers the program, XLA's flags and the versions of JAX and jaxlib. JAX gets no limit of size: with one,
    it reads a file for each program in the folder whenever it adds a program (github.com/jax-ml/jax/pull/36753), which
    took more than half of the time of the tests. So this function empties a folder that has grown too large. Without a
    limit JAX takes no lock: packages/conftest.py writes whole files, and a process of another test that finds half a
    file compiles its program again.
    """
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.is_file() else [platform.processor()]
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))} or {*lines})
    folder = Path(session.cache_dir, "compiled", hashlib.sha256("".join(features).encode()).hexdigest()[:12])
    with contextlib.suppress(FileNotFoundError):  # another session has just renamed a file
        kept = [*folder.glob("*-cache")]
        if sum(path.stat().st_size for path in kept) > MOST_COMPILED:
            for path in kept:
                path.unlink(missing_ok=True)
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_COMPILATION_CACHE_MAX_SIZE": "-1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.02",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def group(name: str) -> tuple[str, ...]:
    """The requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), name)


def hurried(session: nox.Session, *more: str) -> dict[str, str]:
    """The environment of tests in which XLA compiles fast, with more flags. XLA ends the process at an unknown flag."""
    version = session.run("python", "-c", "import jax; print(jax.__version__)", silent=True, env=CPU)
    old = str(version).startswith("0.10.")
    return WORKERS | {"XLA_FLAGS": " ".join((*QUICK, *more, *(ONLY_BEFORE_JAX_0_11 if old else ())))}


def runs(python: str) -> bool:
    """Whether a Python starts: a version manager may have put a command there that refuses to run."""
    try:
        return subprocess.run([python, "-c", ""], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def reveal(version: str) -> bool:
    """Whether an interpreter is installed. One that only pyenv knows is put first on the PATH."""
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
# What `nox -s tests` uses. Where the Python of the first is not installed, that is the Python that runs nox, with the
# JAX and the compilers of the second.
FIRST = SUPPORTED[0] if reveal(SUPPORTED[0][0]) else (None, *SUPPORTED[1][1:])
# The interpreter of third parties' wheels: a newer one than other sessions use, where it is installed.
NEWEST = "3.13" if reveal("3.13") else None


@nox.session
def quickstart(session: nox.Session) -> None:
    """A ring of 8 over 16k packed tokens with gradients, on this machine's CPU: a table and a plot."""
    install(session, *group("quickstart"), *EVERYWHERE)
    session.run("python", "examples/quickstart.py", *session.posargs, env=CPU)


@nox.session
def quick(session: nox.Session) -> None:
    """Each promise of docs/promises.md by its fastest tests, in 2 minutes on two idle cores; says what was not run."""
    install_for_quick(session)
    environment = hurried(session, *NO_OPTIMISER) | compiled(session)
    session.run("python", "-m", "ringattn_testing.quick", "--workers", workers(), *session.posargs, env=environment)


@nox.session(default=False)
def broken_lines(session: nox.Session) -> None:
    """Breaks lines of core one at a time, and says which test of `quick` catches each; or those with a word in them."""
    install_for_quick(session)
    session.run("python", "-m", "ringattn_testing.broken_lines", *session.posargs, env=hurried(session, *NO_OPTIMISER))


def install_for_quick(session: nox.Session) -> None:
    install(session, *group("jax"), *group("test-quick"), *EVERYWHERE, str(ROOT / "conformance"), TESTING)


@nox.session(python=FIRST[0])
def tests(session: nox.Session) -> None:
    """The tests of the packages and of the repository, on one JAX, but those marked as `exhaustive`."""
    _, jax, compilers = FIRST
    install_for_tests(session, jax, compilers)
    if "libtpu" in compilers:
        run_tests(session, LIBTPU, (TPU, *(f"--ignore={path}" for path in LIBTPU)), ("tests",), ALL_BUT_TPU)
    else:
        session.warn(f"left out: the tests of ringattn-tpu, which need Python {SUPPORTED[0][0]} for their libtpu")
        run_tests(session, ("tests",), ALL_BUT_TPU)


@nox.session(python=SUPPORTED[1][0])
def newest_jax(session: nox.Session) -> None:
    """The tests of core that depend most on JAX, on the newest JAX; the others run there in `exhaustive`."""
    install_for_tests(session, SUPPORTED[1][1], ())
    run_tests(session, ON_THE_NEWEST)


@nox.session(default=False)
@nox.parametrize("python,jax,compilers", [nox.param(*case, id="jax-{1}".format(*case)) for case in SUPPORTED[1:]])
def tests_elsewhere(session: nox.Session, jax: str, compilers: tuple[str, ...]) -> None:
    """The tests of the packages on the other supported versions of JAX."""
    install_for_tests(session, jax, compilers)
    run_tests(session, ALL_BUT_TPU if compilers else EVERYWHERE)


@nox.session(default=False)
def exhaustive(session: nox.Session) -> None:
    """What CI leaves out: marked tests, other versions of JAX, the suite's full tier. An estimate: over two hours."""
    session.notify("tests", ["-m", "exhaustive", *ALL_BUT_TPU])
    for _, jax, _ in SUPPORTED[1:]:
        session.notify(f"tests_elsewhere(jax-{jax})")
    session.notify("hosts")
    session.notify("build")
    for backend in BACKENDS:
        session.notify(f"conformance({backend})", ["--ringattn-tier", "full"])


@nox.session(python="3.12", default=False)
def hosts(session: nox.Session) -> None:
    """The adapters beside the released libraries, rings of other kernels, and bugs of JAX that we work round."""
    install(session, *group("hosts"), *EVERYWHERE, str(ROOT / "conformance"))
    # Whole, these bring a training stack each; only the files that the tests read are needed.
    examples = [f"./examples/third-party-{name}" for name in ("triton", "fa4", "tokamax")]
    install(session, "--no-deps", *group("hosts-in-part"), *examples)
    session.run("pytest", "packages/ringattn-adapters/tests/test_released_hosts.py", env=hurried(session))
    session.run("pytest", "examples/third-party-triton/tests", env=CPU)
    for target in ("sm_90a", "sm_100a"):
        session.run("pytest", "-Wignore", "examples/third-party-fa4/tests", env=CPU | {"CUTE_DSL_ARCH": target})
        session.run("pytest", "-Wignore", "examples/third-party-tokamax/tests", "-k", target, env=CPU)
    certify = ("ringattn-conformance", "run", "example-fa4", "--tier", "core", "-n", workers())
    session.run(*certify, env=hurried(session, *NO_OPTIMISER))
    install(session, *group("jax"), "--upgrade", "jax-triton")
    install(session, "--no-deps", "--upgrade", "jax-cuda13-plugin", "jax-cuda13-pjrt")
    for script in sorted((ROOT / "benchmarks/upstream").glob("*.py")):  # fails once a way around a bug may go
        session.run("python", str(script), env=CPU)


def install_for_tests(session: nox.Session, jax: str, compilers: tuple[str, ...]) -> None:
    """JAX, the packages and what their tests need. Without compilers, only the packages that run on any machine."""
    if not compilers:
        install(session, f"jax=={jax}", *group("test"), *EVERYWHERE, str(ROOT / "conformance"), TESTING)
        return
    pins = [requirement for name in compilers for requirement in group(name)]
    install(session, f"jax=={jax}", *group("test"), *pins, *PACKAGES, TESTING)
    # A few megabytes that let a machine without a GPU lower programs for one; what they depend on is the GPU's.
    install(session, "--no-deps", f"jax-cuda13-plugin=={jax}")


def run_tests(session: nox.Session, *parts: Sequence[str]) -> None:
    """pytest on each part, or on what the command line names: that, and the tests of `LIBTPU`, with XLA's optimiser.

    The parts leave out tests that are marked as `exhaustive`.
    """
    quick = hurried(session, *NO_OPTIMISER) | compiled(session)
    for part in [session.posargs] if session.posargs else parts:
        optimised = session.posargs or part == LIBTPU
        left_out = () if session.posargs else ("-m", "not exhaustive")
        session.run("pytest", "-n", workers(), *left_out, *part, env=WORKERS if optimised else quick)


def announce(session: nox.Session, part: str) -> None:
    """Says how long a part of `nox -s conformance` takes, unless the command line says which tests it runs."""
    if not session.posargs:
        session.log(f"about {MINUTES[part]} of {sum(MINUTES.values())} minutes of nox -s conformance on two idle cores")


@nox.session
def build(session: nox.Session) -> None:
    """The sdist of every distribution, the wheel made from that sdist, and a check of both."""
    announce(session, "build")
    shutil.rmtree(DIST, ignore_errors=True)
    install(session, *group("build"))
    for package in PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(DIST), package, silent=True)
    install(session, "--no-deps", *map(str, DIST.glob("*.whl")))
    session.run("python", "tests/wheels.py", str(DIST))
    session.run("twine", "check", "--strict", *map(str, sorted(DIST.glob("ringattn_*"))))


@nox.session(requires=["build"])
@nox.parametrize("backend", BACKENDS, ids=BACKENDS)
def conformance(session: nox.Session, backend: str) -> None:
    """The suite against one backend that is installed from wheels, with nothing that they do not declare."""
    announce(session, backend)
    if backend == "triton" and not sys.platform.startswith("linux"):
        session.skip("Triton has wheels for Linux alone")
    wheels = [str(*DIST.glob(f"ringattn_{name}-*.whl")) for name in ("core", backend, "conformance")]
    pins = group("triton-3-6") if backend == "triton" else ()
    install(session, *group("jax"), *pins, *wheels)
    session.chdir(session.create_tmp())
    if backend == BACKENDS[0] and not session.posargs:
        # One worker judges all saboteurs, in one process.
        install(session, "--no-deps", TESTING)
        own_tests = str(ROOT / "conformance" / "tests")
        session.run("pytest", own_tests, "-n", workers(), "--dist", "loadfile", env=hurried(session, *NO_OPTIMISER))
    # The suite itself turns XLA's optimiser off, but for numerics: there it takes part in the arithmetic of `xla`.
    environment = hurried(session)
    if backend in INTERPRETED:
        environment = hurried(session, *NO_OPTIMISER) | {f"RINGATTN_{backend.upper()}_INTERPRET": "1"}
    options = session.posargs or ("--ringattn-tier", "core")
    session.run("pytest", "-n", workers(), "--ringattn-backend", backend, "--pyargs", SUITE, *options, env=environment)


@nox.session(requires=["build"], python=NEWEST)
def thirdparty(session: nox.Session) -> None:
    """Third parties' wheels beside ours, certified from an empty folder by the command that a third party has."""
    wheels = Path(session.create_tmp())
    shutil.rmtree(wheels)
    install(session, *group("build"))
    with tempfile.TemporaryDirectory() as elsewhere:
        for folder in THIRD_PARTIES.values():
            # Each is a repository of its own, so it is built outside this one.
            project = shutil.copytree(ROOT / "examples" / folder, Path(elsewhere, folder))
            session.run("python", "-m", "build", "--no-isolation", "--outdir", str(wheels), str(project), silent=True)
    session.run("twine", "check", "--strict", *map(str, wheels.iterdir()))
    ours = [str(*DIST.glob(f"ringattn_{name}-*.whl")) for name in ("core", "xla", "conformance")]
    install(session, *group("jax"), *ours, *map(str, wheels.glob("*.whl")))
    modules = [path.name.split("-")[0] for path in map(Path, [*ours, *wheels.glob("*.whl")])]
    environment = hurried(session, *NO_OPTIMISER) | {"PYTHONPATH": None}
    with tempfile.TemporaryDirectory() as empty, session.chdir(empty):
        session.run("python", "-P", "-c", INSTALLED, *modules, env=environment)
        for backend in THIRD_PARTIES:
            options = session.posargs or ("--tier", "core", "-n", workers())
            session.run("ringattn-conformance", "run", backend, *options, env=environment)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, its formatter, and the rules of the house."""
    install(session, *group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("pytest", "-q", "tests/test_house_rules.py", "tests/test_rooms.py")


@nox.session
def types(session: nox.Session) -> None:
    """pyright over everything."""
    install(session, *group("types"), *PACKAGES, TESTING)
    python = shutil.which("python", path=session.bin) or "python"
    for settings in ("pyproject.toml", "pyright-tests.toml"):
        session.run("pyright", "--project", settings, "--pythonpath", python)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation; a warning is an error."""
    install(session, *group("docs"), *LIBRARIES)
    session.run("sphinx-build", "-W", "--keep-going", "-n", "-q", "docs", "build/docs", env=CPU)
    session.log("open build/docs/index.html")


@nox.session
def bench(session: nox.Session) -> None:
    """The benchmarks of claims, or those named; `--suite cpu|gpu|gpus|tpu` beside rivals; `compare` two runs.

    `--with PACKAGE` before anything else also installs a rival's package, and may be repeated.
    """
    asked, extras = list(session.posargs), []
    while asked[:1] == ["--with"]:
        extras, asked = [*extras, asked[1]], asked[2:]
    suite = asked[asked.index("--suite") + 1] if "--suite" in asked else "cpu"
    install(session, *group("bench"), *(EVERYWHERE if suite == "cpu" else LIBRARIES), *group(DEVICES.get(suite, "jax")))
    if extras:
        install(session, *extras)
    if asked and not asked[0].endswith(".py"):
        session.run("python", "benchmarks/suite.py", *asked, env=CPU if suite == "cpu" else {})
        return
    for script in asked or BENCHMARKS:
        session.run("python", script, env=CPU)
