# SPDX-License-Identifier: Apache-2.0
"""The command: what it prints, what it writes, and the exit codes that its help promises."""

import json
from pathlib import Path
from typing import Any

import pytest
from ringattn_conformance import cli, schema
from sample_reports import report
from small_suites import Done, expecting, started


def _run(folder: Path, *arguments: str) -> Done:
    """On the cheapest file of the suite, unless the arguments say otherwise."""
    written = folder / "report.json"
    line = ("run", "xla", "--tier", "core", "--report", str(written), *arguments)
    done = started(folder, "-m", "ringattn_conformance.cli", *line)
    found = json.loads(written.read_text()) if written.is_file() else None
    return Done(done.returncode, done.stdout + done.stderr, found)


def test_a_run_that_leaves_something_out_is_not_certified(tmp_path: Path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    done = _run(tmp_path, "--", "-k", "well_formed")
    assert done.code == cli.NOT_CERTIFIED, done.text
    assert done.backend["outcomes"] == {"passed": 1}
    left_out = len(done.backend["deselected"])
    assert left_out > 100
    assert f"NOT CERTIFIED for the core tier: {left_out} tests deselected" in done.text
    assert "warning" not in done.text


def test_what_is_wrong_with_the_expectations_is_found_and_fails(tmp_path: Path):
    expecting(
        tmp_path,
        'expected-failures = {"test_protocol::test_what_is_registered_is_well_formed" = "it is not"}',
    )
    done = _run(tmp_path, "--tolerance-factor", "2", "--largest-ring", "4", "--", "-k", "well_formed")
    assert done.code == cli.FAILED, done.text
    assert done.backend["unexpected_passes"] == ["test_protocol::test_what_is_registered_is_well_formed"]
    assert done.report["options"] == {"tier": "core", "largest_ring": 4, "tolerance_factor": 2}


@pytest.mark.parametrize(
    "arguments",
    [("run", "nobody"), ("run", "xla", "--tier", "best"), ("run", "xla", "--expectations", "lost.toml"), ("walk",), ()],
    ids=" ".join,
)
def test_what_cannot_be_used_is_told_apart(tmp_path: Path, arguments: tuple[str, ...]):
    done = started(tmp_path, "-m", "ringattn_conformance.cli", *arguments)
    assert done.returncode == cli.UNUSABLE, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, cli.CERTIFIED),
        ({"expected_failures": {"a": "hard"}}, cli.CERTIFIED),
        ({"failed": ["a"]}, cli.FAILED),
        ({"crashes": ["a"]}, cli.FAILED),
        ({"unexpected_passes": ["a"]}, cli.FAILED),
        ({"unknown_expectations": ["a"]}, cli.FAILED),
        ({"deselected": ["a"]}, cli.NOT_CERTIFIED),
        ({"tolerance_factor": 2.0}, cli.NOT_CERTIFIED),
        ({"exit_status": 2}, cli.NOT_CERTIFIED),
    ],
)
def test_the_exit_code_is_the_verdict(changes: dict[str, Any], code: int):
    assert cli.exit_code(report(**changes)) == code


def test_a_badge_is_drawn_to_where_it_is_asked_for(tmp_path: Path):
    schema.write(tmp_path / "report.json", report())
    image = tmp_path / "badge.svg"
    assert cli.main(["badge", str(tmp_path / "report.json"), "-o", str(image)]) == 0
    assert image.read_text().startswith("<svg")


def test_of_several_backends_a_badge_wants_one_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    both: Any = report()
    both["backends"]["other"] = both["backends"]["acme"]
    schema.write(tmp_path / "report.json", both)
    line = ["badge", str(tmp_path / "report.json"), "-o", str(tmp_path / "badge.svg")]
    for more, message in (([], "has several backends: acme, other. Name one"), (["--backend", "x"], "no backend 'x'")):
        with pytest.raises(SystemExit) as exit:
            cli.main([*line, *more])
        assert exit.value.code == cli.UNUSABLE
        assert message in capsys.readouterr().err
    assert cli.main([*line, "--backend", "other"]) == 0


@pytest.mark.parametrize(("changes", "code", "last"), [({}, 0, "nothing is worse"), ({"failed": ["a"]}, 1, "a fails")])
def test_two_reports_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], code: int, last: str
):
    schema.write(tmp_path / "before.json", report())
    schema.write(tmp_path / "after.json", report(**changes))
    assert cli.main(["compare", str(tmp_path / "before.json"), str(tmp_path / "after.json")]) == code
    assert last in capsys.readouterr().out


def test_a_report_that_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit:
        cli.main(["compare", str(tmp_path / "lost.json"), str(tmp_path / "lost.json")])
    assert exit.value.code == cli.UNUSABLE
    assert "ringattn-conformance: " in (told := capsys.readouterr().err) and "lost.json: No such file" in told


@pytest.mark.parametrize("changes", [{"backends": {"acme": {}}}, {"backends": ["acme"]}, {"versions": None}], ids=str)
def test_a_damaged_report_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**report(), **changes}))
    with pytest.raises(SystemExit) as exit:
        cli.main(["compare", str(path), str(path)])
    assert exit.value.code == cli.UNUSABLE
    told = capsys.readouterr().err
    assert "a report is damaged" in told and told.count("\n") == 1
