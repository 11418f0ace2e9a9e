# SPDX-License-Identifier: Apache-2.0
"""Promises of tuned configurations in files: every process reads what one wrote, and no file error is fatal."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ringattn_core.config import BwdParams, FwdParams, RingAttentionConfig
from ringattn_core.tuning import Problem
from ringattn_tools import tuned_files

CONFIG = RingAttentionConfig(FwdParams(64, 128, extra={"deep": (1, 2)}), BwdParams(num_warps=4))


def problem(**changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "backend": "mine", "batch": 1, "q_length": 64, "kv_length": 64, "heads": 2, "kv_heads": 1, "head_dim": 8,
        "value_dim": 8, "dtype": "float32", "platform": "cpu", "device": "a cpu", "versions": (("jax", "1"),),
        "sliding_window": (3, None), "options": (("bias", "float32[1, 1, 64, 64]"),),
    }  # fmt: skip
    return Problem(**{**fields, **changes})


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    """The messages of the warnings in a log."""
    return [record.getMessage() for record in log.records if record.levelname == "WARNING"]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGATTN_CACHE_DIR", str(tmp_path / "kept"))
    tuned_files._report.cache_clear()
    return tmp_path / "kept" / "tuning"


def put(root: Path, text: str | bytes) -> Path:
    """Writes this text to the cache file of `problem()`."""
    path = root / f"{problem().digest}.json"
    root.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


class TestWhatIsKept:
    def test_an_entry_is_read_back_equal_for_its_problem_only(self) -> None:
        trials = [{"part": "forward", "seconds": 1.5, "failure": None}]
        tuned_files.write(problem(), CONFIG, trials)
        entry = tuned_files.read(problem())
        assert entry is not None and (entry.config, list(entry.trials)) == (CONFIG, trials)
        assert tuned_files.read(problem(q_length=65)) is tuned_files.read(problem(versions=(("jax", "2"),))) is None


UNREADABLE = {
    "cut short": lambda text: text[: len(text) // 2],
    "another kind": lambda text: "[1, 2]",
    "without a part": lambda text: text.replace('"config"', '"konfig"'),
    "a field that nobody knows": lambda text: text.replace("q_blocksize", "q_blockseize"),
    "another format": lambda text: text.replace('"format": 1', '"format": 9'),
    "another problem": lambda text: text.replace('"mine"', '"other"'),
}


class TestAFileThatCannotBeUnderstood:
    @pytest.mark.parametrize("broken", UNREADABLE.values(), ids=UNREADABLE)
    def test_is_ignored_and_reported_once(self, broken: Callable[[str], str | bytes], root: Path, log: Any) -> None:
        path = tuned_files.write(problem(), CONFIG)
        assert path is not None
        put(root, broken(path.read_text()))
        assert tuned_files.read(problem()) is tuned_files.read(problem()) is None
        assert len(warnings(log)) == 1
        assert f"the tuned configuration in {path} cannot be used" in warnings(log)[0]


class TestADiskThatRefuses:
    @pytest.mark.parametrize(
        ("step", "number"), [("mkdir", errno.EROFS), ("write_text", errno.ENOSPC), ("replace", errno.EACCES)]
    )
    def test_a_write_that_fails_is_reported_once_and_leaves_nothing(
        self, step: str, number: int, root: Path, log: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os if step == "replace" else Path, step, fail)
            assert tuned_files.write(problem(), CONFIG) is tuned_files.write(problem(), CONFIG) is None
        assert len(warnings(log)) == 1
        assert "cannot store a tuned configuration" in warnings(log)[0] and os.strerror(number) in warnings(log)[0]
        assert list(root.glob("*")) == []


class TestWhereItIs:
    @pytest.fixture(autouse=True)
    def _by_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("RINGATTN_CACHE_DIR")

    @pytest.mark.parametrize("given", ["relative", "~/there"])
    def test_a_directory_of_the_environment_is_made_absolute(
        self, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("RINGATTN_CACHE_DIR", given)
        assert tuned_files.directory() == tmp_path / given.removeprefix("~/") / "tuning"

    @pytest.mark.parametrize("found", ["~/.cache/ringattn", RuntimeError("Could not determine home directory.")])
    def test_without_a_home_nothing_is_kept_and_that_is_reported_once(
        self, found: Any, tmp_path: Path, log: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import platformdirs

        def homeless(*_: Any, **__: Any) -> str:
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(platformdirs, "user_cache_dir", homeless)
        assert tuned_files.read(problem()) is tuned_files.write(problem(), CONFIG) is None
        assert len(warnings(log)) == 1 and "Set RINGATTN_CACHE_DIR to a directory" in warnings(log)[0]
        assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
from ringattn_core.config import FwdParams, RingAttentionConfig
from ringattn_core.tuning import Problem
from ringattn_tools import tuned_files
problem = {problem!r}
sys.stdin.readline()
for number in range(1, 101):
    config = RingAttentionConfig(FwdParams(number, {own}, extra={{"filling": "x" * {own}}}))
    assert tuned_files.write(problem, config) is not None
    params = tuned_files.read(problem).config.fwd_params
    assert len(dict(params.extra)["filling"]) == params.kv_blocksize
"""


def test_processes_that_write_at_once_never_see_half_an_entry(root: Path) -> None:
    """And every process finds what another has written."""
    code = [WRITER.format(problem=problem(), own=own) for own in (10, 20_000)]
    writers = [
        subprocess.Popen([sys.executable, "-c", each], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for each in code
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        assert writer.communicate(timeout=120)[1] == "" and writer.returncode == 0
    entry = tuned_files.read(problem())
    assert entry is not None and entry.config.fwd_params.q_blocksize == 100
    assert [path.name for path in root.iterdir()] == [entry.path.name]
