# SPDX-License-Identifier: Apache-2.0
"""Whether the documents are true: their code runs, their table is current, their links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")
RUNNABLE = [page for page in PAGES if page != README and CODE.search(page.read_text())]
# What docs/quickstart.md says holds for every page.
EIGHT_DEVICES = 'import jax\njax.config.update("jax_num_cpu_devices", 8)\n'


def named(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def run(code: str, tmp_path: Path) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    script = tmp_path / "pasted.py"
    script.write_text(code)
    return subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=environment)


def test_the_readme_example_runs_as_it_is_pasted(tmp_path: Path):
    (example,) = CODE.findall(README.read_text())
    result = run(example, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Array" in result.stdout, "it prints no gradients"


def test_the_readme_example_has_at_most_15_lines():
    (example,) = CODE.findall(README.read_text())
    assert len([line for line in example.splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize("page", RUNNABLE, ids=named(RUNNABLE))
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path):
    result = run(EIGHT_DEVICES + "\n".join(CODE.findall(page.read_text())), tmp_path)
    assert result.returncode == 0, f"{page}:\n{result.stdout}\n{result.stderr}"


def test_a_page_whose_code_is_wrong_is_found(tmp_path: Path):
    assert run(EIGHT_DEVICES + "assert jax.device_count() == 7", tmp_path).returncode != 0


def test_the_readme_needs_two_commands_and_both_are_sessions():
    lines = [line for block in SHELL.findall(README.read_text()) for line in block.splitlines()]
    assert lines[1:] == ["pip install nox && nox -s quickstart", "nox -s conformance"]
    sessions = re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    assert {"quickstart", "conformance"} <= set(sessions)
    assert "nox -s conformance\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("document", ["README.md", "docs/conformance.md"])
def test_a_generated_table_says_what_the_code_says(document: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import tables

    found = ROOT / document
    name, table = tables.TABLES[found]
    assert len(table().splitlines()) > 10
    assert f"\n{table()}\n" in found.read_text(), f"the table of {name} is stale. Run: python docs/tables.py"
    assert tables.current(found) == found.read_text()


@pytest.mark.parametrize("page", PAGES, ids=named(PAGES))
def test_a_link_leads_to_a_file(page: Path):
    lost = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert not lost, f"{page} links to {lost}"


def test_every_page_is_in_the_table_of_contents():
    contents = (ROOT / "docs" / "index.md").read_text()
    listed = set(re.search(r"```\{toctree\}\n(?::.*\n)*\n(.*?)```", contents, re.DOTALL)[1].split())
    assert listed == {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}


def test_every_error_is_on_its_page():
    from ringattn_core import errors

    page = (ROOT / "docs" / "errors.md").read_text()
    names = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.RingAttnError)
    }
    missing = {name for name in names if f"`{name}`" not in page} - {"RingAttnError"}
    assert not missing, f"docs/errors.md does not mention {missing}"
