# SPDX-License-Identifier: Apache-2.0
"""Whether pages that show the command line show what the commands print and draw."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pictures import content

ROOT = Path(__file__).parent.parent
CONSOLE = re.compile(r"^```console\n\$ (ringattn [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = CONSOLE.findall((ROOT / "docs" / "command-line.md").read_text())
CHOOSING = (ROOT / "docs" / "choosing.md").read_text()
COMPARED = CONSOLE.findall(CHOOSING)
PICTURED = "ringattn explain --query 1,32768,8,64 --ring 4 --causal --window 9000,0"


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


@pytest.mark.parametrize(("command", "shown"), SHOWN + COMPARED, ids=[command for command, _ in SHOWN + COMPARED])
def test_what_the_page_shows_is_what_the_command_prints(command: str, shown: str, tmp_path: Path):
    # Which backends are installed differs from one environment to the next.
    said, shown = (re.sub(r"Installed: .*", "Installed: some", text) for text in (printed(command, tmp_path), shown))
    assert missing(shown, said) is None, said
    for drawn in tmp_path.glob("*.svg"):
        assert f"]({drawn.name})" in CHOOSING, f"nobody sees {drawn.name}"
        assert content(drawn) == content(ROOT / "docs" / drawn.name), f"docs/{drawn.name} is stale"


def test_a_line_that_is_not_printed_is_found():
    assert missing("one\n...\nthree\n", "one\ntwo\nthree\n") is None
    assert missing("three\n...\none\n", "one\ntwo\nthree\n") == "one"


def test_a_drawing_of_another_call_is_found():
    names = ("explain.svg", "choosing-zigzag.svg", "choosing-contiguous.svg")
    found = [content(ROOT / "docs" / name) for name in names]
    assert len({str(words) for words, _ in found}) == len({images[0] for _, images in found}) == 3


def test_the_page_shows_each_way_of_asking():
    assert len(SHOWN) == 5 and PICTURED in dict(SHOWN)


def test_every_picture_of_the_choice_is_drawn_by_a_command_on_its_page():
    drawn = re.findall(r"--svg (\S+)", " ".join(command for command, _ in COMPARED))
    assert sorted(drawn) == sorted(path.name for path in (ROOT / "docs").glob("choosing-*.svg"))
    assert len(drawn) >= 4 and len(COMPARED) > len(drawn)


def test_the_picture_of_the_page_is_that_of_the_command_above_it(tmp_path: Path):
    said = printed(f"{PICTURED} --svg explain.svg", tmp_path)
    assert "->  xla" in said, said
    assert content(tmp_path / "explain.svg") == content(ROOT / "docs" / "explain.svg")
