# SPDX-License-Identifier: Apache-2.0
"""Whether pages show what the commands print."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONSOLE = re.compile(r"^```console\n\$ (ringattn [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("command-line.md", "mixed-layers.md")
SHOWN = [block for page in PAGES for block in CONSOLE.findall((ROOT / "docs" / page).read_text())]


def printed(command: str, folder: Path) -> str:
    """What a command says in a folder, on CPU and with a page's width."""
    arguments = shlex.split(command)[1:]
    ours = {name for name in os.environ if name.startswith(("RINGATTN_", "XLA_FLAGS"))}
    environment = {name: value for name, value in os.environ.items() if name not in ours} | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-m", "ringattn_tools", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=False,
    )
    return run.stdout + run.stderr


def missing(shown: str, said: str) -> str | None:
    """The first part of what is shown, between lines of dots, that is not said in that order; `None` if all is."""
    for part in filter(None, (part.strip("\n") for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE))):
        if part not in said:
            return part
        said = said[said.index(part) + len(part) :]
    return None


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_what_the_page_shows_is_what_the_command_prints(command: str, shown: str, tmp_path: Path):
    # Which backends are installed differs from one environment to the next.
    said, shown = (re.sub(r"Installed: .*", "Installed: some", text) for text in (printed(command, tmp_path), shown))
    assert missing(shown, said) is None, said


def test_a_line_that_is_not_printed_is_found():
    assert missing("one\n...\nthree\n", "one\ntwo\nthree\n") is None
    assert missing("three\n...\none\n", "one\ntwo\nthree\n") == "one"
