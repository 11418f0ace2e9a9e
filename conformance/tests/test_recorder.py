# SPDX-License-Identifier: Apache-2.0
"""What a run writes down: nothing that was left out, expected, widened or lost goes unsaid."""

import re
from pathlib import Path

import pytest
from ringattn_testing.conformance.small_suites import LETTER, SUITE, SmallSuite, expecting

EVERY = [*(f"{LETTER}[{letter}]" for letter in "abc"), "test_first::test_of_the_core"]


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "workers"])
def test_a_whole_run_is_certified_and_says_what_it_saw(ran: SmallSuite, tmp_path: Path, workers: tuple[str, ...]):
    done = ran(*workers)
    assert done.code == 0, done.text
    assert done.certificate == {"given": True, "passed": True, "tier": "full", "spoiled_by": []}
    assert re.search(r"\nxla \S+ on \d+ cpu with JAX \S+, \S+, seed 20\d{6}: CERTIFIED for the full tier\n$", done.text)
    assert done.backend["passed"] == 4
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["report.json"]


@pytest.mark.parametrize(("tier", "count"), [("core", 1), ("full", 4), ("exhaustive", 5)])
def test_a_tier_runs_its_tests_and_those_of_the_smaller_ones(ran: SmallSuite, tier: str, count: int):
    done = ran("--ringattn-tier", tier)
    assert done.backend["passed"] == count
    assert done.certificate["tier"] == tier
    assert f"ringattn tier: {tier}," in done.text


def test_what_is_deselected_is_listed_and_spoils_the_certificate(ran: SmallSuite):
    done = ran("-k", "not letter")
    assert done.backend["not_run"] == EVERY[:3]
    assert not done.certificate["given"]
    for test in EVERY[:3]:
        assert f"  {test}\n" in done.text


def test_what_workers_deselect_expect_and_do_not_know_is_listed(ran: SmallSuite, tmp_path: Path):
    expecting(tmp_path, f'expected-failures = {{"{LETTER}[b]" = "b is hard", "{LETTER}[d]" = "no such letter"}}')
    found = ran("-n", "2", "-k", "letter", RINGATTN_WRONG="b").backend
    assert found["not_run"] == EVERY[3:]
    assert found["expected_failure"] == {f"{LETTER}[b]": "b is hard"}
    assert found["unknown"] == [f"{LETTER}[d]"]


@pytest.mark.parametrize("only", ["suite/test_first.py", "suite/test_first.py::test_letter[xla-a]"])
def test_a_part_of_the_suite_is_no_run_of_the_suite(ran: SmallSuite, only: str):
    done = ran(only=only)
    assert done.backend["uncollected"] == ["test_second"]
    assert "not collected: test_second" in done.certificate["spoiled_by"]
    assert done.backend["not_run"] == (EVERY[1:4] if "::" in only else [])


def test_what_a_stop_at_the_first_failure_leaves_is_listed(ran: SmallSuite):
    done = ran("-x", RINGATTN_WRONG="abc")
    assert done.backend["failed"] == EVERY[:1]
    assert done.backend["not_run"] == EVERY[1:]
    assert done.text.splitlines()[-1].endswith("NOT CERTIFIED for the full tier: 1 test failed; 3 tests not run")


def test_a_test_that_ends_its_process_is_named(ran: SmallSuite):
    done = ran("-n", "1", RINGATTN_DEADLY="b")
    assert done.backend["crashed"] == ["suite/test_first.py::test_letter[xla-b]"]
    assert done.backend["not_run"] == [f"{LETTER}[b]"]
    assert not done.certificate["given"]


def test_collecting_alone_judges_nothing(ran: SmallSuite):
    done = ran("--collect-only")
    assert done.report is None and "CERTIFIED" not in done.text


def test_a_failure_that_is_expected_stands_in_the_certificate_with_its_reason(ran: SmallSuite, tmp_path: Path):
    expecting(tmp_path, f'expected-failures = {{"{LETTER}[b]" = "b is hard"}}')
    done = ran(RINGATTN_WRONG="b")
    assert done.code == 0, done.text
    assert done.backend["expected_failure"] == {f"{LETTER}[b]": "b is hard"}
    assert done.certificate["given"]
    assert f"  {LETTER}[b]: b is hard\n" in done.text
    assert "CERTIFIED for the full tier, with 1 expected failure\n" in done.text


def test_a_failure_that_is_expected_of_no_known_test_fails(ran: SmallSuite, tmp_path: Path):
    expecting(tmp_path, f'expected-failures = {{"{LETTER}[d]" = "no such letter"}}')
    done = ran()
    assert done.code == 1
    assert done.backend["unknown"] == [f"{LETTER}[d]"]
    assert not done.certificate["given"]


def test_a_smaller_tier_knows_the_tests_of_the_larger_ones(ran: SmallSuite, tmp_path: Path):
    expecting(tmp_path, 'expected-failures = {"test_second::test_rare" = "in the exhaustive tier alone"}')
    done = ran("--ringattn-tier", "core")
    assert done.code == 0 and done.certificate["given"]


def test_expectations_of_a_project_are_of_its_own_backends(ran: SmallSuite, tmp_path: Path):
    project = '[project.entry-points."ringattn.backends"]\nacme = "acme:BACKEND"'
    expecting(tmp_path, f'expected-failures = {{"{LETTER}[b]" = "b is hard"}}', project)
    assert ran().certificate["given"], "xla is none of acme's backends"
    expecting(tmp_path, f'expected-failures = {{"{LETTER}[b]" = "b is hard"}}', project.replace("acme =", "xla ="))
    assert ran().backend["unexpected_pass"] == [f"{LETTER}[b]"]


@pytest.mark.parametrize(
    "content",
    ['expected-failures = ["a"]', 'expected-failures = {"a" = " "}', "expected-failure = {}", "expected-failures ="],
)
def test_expectations_that_cannot_be_meant_stop_the_run(ran: SmallSuite, tmp_path: Path, content: str):
    expecting(tmp_path, content)
    done = ran()
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert f"{tmp_path / 'pyproject.toml'}" in done.text


def test_a_wider_tolerance_is_told_at_the_start_and_spoils_the_certificate(ran: SmallSuite):
    done = ran("--ringattn-tolerance-factor", "3")
    assert "ringattn tolerances: TIMES 3\n" in done.text
    assert done.report["options"]["tolerance_factor"] == 3
    assert done.certificate["spoiled_by"] == ["every tolerance was multiplied by 3"]


def test_a_failure_ends_with_the_line_that_runs_it_as_it_ran(ran: SmallSuite):
    options = ("--ringattn-tier", "exhaustive", "--ringattn-tolerance-factor", "2.0")
    done = ran(*options, RINGATTN_WRONG="b")
    assert f"::test_letter[xla-b]' --ringattn-backend xla {' '.join(options)}" in done.text


def test_of_failures_of_one_cause_one_traceback_is_printed(ran: SmallSuite):
    done = ran(RINGATTN_WRONG="abc")
    assert done.text.count('raise ValueError("a wrong letter")') == 1
    assert done.text.count(f"ValueError as in {LETTER}[a]\n") == 2
    assert done.text.count("run this alone") == 3


def test_a_test_outside_the_suite_may_fail_and_does_not_count_as_the_suite(ran: SmallSuite, tmp_path: Path):
    (tmp_path / "test_own.py").write_text(SUITE["test_first"])
    done = ran("-k", "letter", only="test_own.py", RINGATTN_WRONG="a")
    assert done.backend["failed"] == ["test_own::test_letter[a]"]
    assert done.backend["not_run"] == []
    assert done.backend["uncollected"] == ["test_first", "test_second"]
