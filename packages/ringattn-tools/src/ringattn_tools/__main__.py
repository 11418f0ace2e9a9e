# SPDX-License-Identifier: Apache-2.0
"""Makes `python -m ringattn_tools` the same as the command `ringattn`."""

from .main import main

if __name__ == "__main__":
    raise SystemExit(main())
