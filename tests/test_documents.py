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
OTHERS = ("CONTRIBUTING.md", "CHANGELOG.md", "conformance/README.md", "examples/*/README.md")
LINKING = [*PAGES, *(page for pattern in OTHERS for page in sorted(ROOT.glob(pattern)))]
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?:\]\(|src=\")(?!https?:)([^)\"#\s]*)(?:#([^)\"]*))?[)\"]")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
SESSION = re.compile(r"^def (\w+)\(session", re.MULTILINE)
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
    assert result.stdout.startswith("loss ") and "gradients" in result.stdout, "it prints no gradients"
    assert len(result.stdout.splitlines()) == 1, "it prints more than a line"


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
    assert {"quickstart", "conformance"} <= set(SESSION.findall((ROOT / "noxfile.py").read_text()))
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


def lost(page: Path) -> list[str]:
    """The links of a page that lead to no file, or to no heading of one."""
    found = []
    for file, heading in LINK.findall(CODE.sub("", page.read_text())):
        target = page.parent / file if file else page
        if not target.exists():
            found.append(file)
        elif heading and heading not in anchors(target):
            found.append(f"{file}#{heading}")
    return found


def anchors(page: Path) -> set[str]:
    """What headings are called in links, here and where the repository is read."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(page.read_text())}


@pytest.mark.parametrize("page", LINKING, ids=named(LINKING))
def test_a_link_leads_to_a_file_and_to_a_heading_of_it(page: Path):
    assert not lost(page), f"{page} links to {lost(page)}"


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text('# In `two` words\n[a](page.md#in-two-words) [b](#in-two) [c](none.md) <img src="none.svg">\n')
    assert lost(page) == ["#in-two", "none.md", "none.svg"]


def test_a_session_that_a_document_names_is_one():
    sessions = set(SESSION.findall((ROOT / "noxfile.py").read_text()))
    named = {name for page in LINKING for name in re.findall(r"nox -s (\w+)", page.read_text())}
    assert {"docs", "thirdparty"} <= named
    assert named <= sessions, f"there is no session {named - sessions}"


def test_every_benchmark_is_on_its_page():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    scripts = [path.name for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert len(scripts) >= 6
    missing = {name for name in scripts if f"`benchmarks/{name}`" not in page}
    assert not missing, f"docs/benchmarks.md does not mention {missing}"


def test_the_variables_that_are_read_are_those_that_the_documents_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import tables
    from ringattn_core.backends.selection import VARIABLES

    read = {*VARIABLES, *(name for backend in tables.descriptors() for name in backend.variables)}
    named = {name for page in LINKING for name in re.findall(r"\bRINGATTN_[A-Z_]*[A-Z]\b", page.read_text())}
    assert named == read


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
