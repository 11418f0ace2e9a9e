# SPDX-License-Identifier: Apache-2.0
"""Stores tuned configurations in JSON files, one for each problem. Disk errors only warn."""

import dataclasses
import functools
import json
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ringattn_core.backends.discovery import Registration
from ringattn_core.config import RingAttentionConfig
from ringattn_core.errors import in_one_line
from ringattn_core.tuning import choice
from ringattn_core.tuning.problem import Problem

VARIABLE: Final = "RINGATTN_CACHE_DIR"
_FORMAT: Final = 1
_logger: Final = logging.getLogger("ringattn")
_report: Final = functools.cache(_logger.warning)
"""Logs each message once, because the same disk error would recur at every call."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """The cache file at `path`: the problem, the chosen configuration, and the time or failure of each trial."""

    problem: Mapping[str, Any]
    config: RingAttentionConfig
    trials: Sequence[Mapping[str, Any]]
    path: Path


def directory() -> Path | None:
    """The directory of the cache files; `None`, with a warning, if the user has no cache directory."""
    asked = os.environ.get(VARIABLE)
    if asked:
        return Path(os.path.abspath(os.path.expanduser(asked))) / "tuning"
    import platformdirs

    try:
        root: Any = platformdirs.user_cache_dir("ringattn", appauthor=False)
    except (RuntimeError, OSError, KeyError) as error:
        root = error
    if isinstance(root, str) and os.path.isabs(root):
        return Path(root) / "tuning"
    _report(
        f"there is no cache directory for this user ({root}): tuning results hold for this process only. "
        f"Set {VARIABLE} to a directory"
    )
    return None


def read(problem: Problem) -> Entry | None:
    """The entry for this problem, or `None`. An unusable file is reported, and the next tuning replaces it."""
    root = directory()
    return None if root is None else read_file(root / f"{problem.digest}.json", problem.key)


def write(problem: Problem, config: RingAttentionConfig, trials: Sequence[Mapping[str, Any]] = ()) -> Path | None:
    """Replaces the entry of the problem atomically. On failure it warns and returns `None`."""
    root = directory()
    if root is None:
        return None
    path = root / f"{problem.digest}.json"
    told = {"format": _FORMAT, "problem": problem.told, "config": config.to_dict(), "trials": trials}
    # A random name, because processes on several hosts may write to one directory at the same time.
    temporary = path.with_suffix(f".{secrets.token_hex(8)}.new")
    try:
        text = json.dumps(told, indent=1)
        root.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, TypeError, ValueError) as error:
        _report(f"cannot store a tuned configuration in {root}: {in_one_line(error)}. It holds for this process only")
        return None
    return path


def read_file(path: Path, key: str | None = None) -> Entry | None:
    """The entry in a file; `None`, usually with a warning, if it is missing, unreadable, or not for problem `key`."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != _FORMAT:
            raise ValueError(f"its format is {told['format']!r}")
        if key not in (None, json.dumps(told["problem"], sort_keys=True)):
            raise ValueError("it is for another problem")
        config = RingAttentionConfig.from_dict(told["config"])
        return Entry(dict(told["problem"]), config, tuple(map(dict, told["trials"])), path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        reason = in_one_line(error)
        _report(f"the tuned configuration in {path} cannot be used: {reason}. The backend's default is used")
        return None


def store(
    registration: Registration, problem: Problem, config: RingAttentionConfig, trials: Sequence[Mapping[str, Any]]
) -> None:
    """Makes `config` the tuned configuration of the problem, in memory and in a file.

    No file is written for a backend that was registered in this process, because it has no version. `trials` are the
    times of all candidates.
    """
    choice.store(registration, problem, config)
    if not registration.in_process:
        write(problem, config, trials)
