# SPDX-License-Identifier: Apache-2.0
"""What every backend must do: `pytest --pyargs ringattn_conformance.suite --ringattn-backend NAME`."""
