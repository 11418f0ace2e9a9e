# SPDX-License-Identifier: Apache-2.0
"""What `python -m ringattn_core` does: the same as the command `ringattn`."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
