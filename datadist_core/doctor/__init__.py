# SPDX-License-Identifier: Apache-2.0
"""`datadist doctor`: what this host can do, whether a running peer can be reached, and what to change if not.

Every check returns findings (`findings.py`): what was found, how bad it is, and the remedy in plain words. Nothing here
changes the host or writes into a peer's memory.
"""
