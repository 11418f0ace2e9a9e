# SPDX-License-Identifier: Apache-2.0
"""Whether the code of the documents runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ringattn_tools.main import parsed

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?ringattn (.*)$|`ringattn (explain --query [^`]*)`", re.MULTILINE)
RUNNABLE = [page for page in PAGES if page != README and CODE.search(page.read_text())]
# What docs/quickstart.md says holds for every page.
EIGHT_DEVICES = 'import jax\njax.config.update("jax_num_cpu_devices", 8)\n'


def named(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


# XLA's optimiser takes most of the time of a page; sessions of nox pass more flags against it.
UNOPTIMISED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def run(code: str, tmp_path: Path, **flags: str) -> subprocess.CompletedProcess:
    environment = {"XLA_FLAGS": UNOPTIMISED} | os.environ | flags | {"JAX_PLATFORMS": "cpu"}
    script = tmp_path / "pasted.py"
    script.write_text(code)
    return subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=environment)


def test_the_readme_example_runs_as_it_is_pasted(tmp_path: Path):
    (example,) = CODE.findall(README.read_text())
    result = run(example, tmp_path, XLA_FLAGS="")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("loss ") and "gradients" in result.stdout, "it prints no gradients"
    assert len(result.stdout.splitlines()) == 1, "it prints more than a line"


@pytest.mark.parametrize("page", RUNNABLE, ids=named(RUNNABLE))
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path):
    result = run(EIGHT_DEVICES + "\n".join(CODE.findall(page.read_text())), tmp_path)
    assert result.returncode == 0, f"{page}:\n{result.stdout}\n{result.stderr}"


def test_every_command_of_a_page_has_arguments_that_are_read():
    given = [one or other for page in PAGES for one, other in COMMAND.findall(page.read_text())]
    assert len(given) > 8
    for words in given:
        parsed(shlex.split(words, comments=True))


def test_the_pictures_of_the_backward_pass_are_up_to_date(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(ROOT / "docs")
    import kernel_pictures

    for name, draw in kernel_pictures.DRAWN.items():
        path = kernel_pictures.path_of(name)
        assert path.read_text() == draw(), f"{path.name} is stale. Run: python docs/kernel_pictures.py"
