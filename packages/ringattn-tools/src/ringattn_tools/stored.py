# SPDX-License-Identifier: Apache-2.0
"""Lists and removes the tuning results that are stored for this user."""

import logging
from typing import Final

from ringattn_core.errors import in_one_line

from . import tuned_files

_logger: Final = logging.getLogger("ringattn")


def entries() -> list[tuned_files.Entry]:
    """Every readable entry of the cache on disk, the newest last."""
    root = tuned_files.directory()
    try:
        paths = [] if root is None else sorted(root.glob("*.json"), key=lambda path: path.stat().st_mtime)
    except OSError as error:
        _logger.warning("cannot list %s: %s", root, in_one_line(error))
        return []
    return [entry for entry in map(tuned_files.read_file, paths) if entry is not None]


def clear() -> int:
    """Removes every file of the cache, also the temporary files of writes that were killed; returns how many."""
    root = tuned_files.directory()
    paths = [] if root is None else [*root.glob("*.json"), *root.glob("*.new")]
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)
