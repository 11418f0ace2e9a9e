# SPDX-License-Identifier: Apache-2.0
"""The format of reports: what is written is read back, and what is not of it is refused with what to do."""

import json
from pathlib import Path

import pytest
from ringattn_conformance import schema
from sample_reports import report


def test_what_is_written_is_read_back(tmp_path: Path):
    path = tmp_path / "new" / "report.json"
    schema.write(path, report())
    assert schema.read(path) == report()
    assert [one.name for one in path.parent.iterdir()] == ["report.json"]


def test_a_field_that_it_does_not_know_is_let_through(tmp_path: Path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**report(), "colour": "blue"}))
    assert schema.read(path)["date"] == report()["date"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has the format None, this program reads 2. Run the suite again"),
        (json.dumps({**report(), "format": 1}), "has the format 1, this program reads 2"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, content: str, message: str):
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(ValueError) as refusal:
        schema.read(path)
    assert message in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"lost\.json: No such file or directory\. Name a report"):
        schema.read(tmp_path / "lost.json")
