# SPDX-License-Identifier: Apache-2.0
"""The half that lives in the scheduler: tables only."""
