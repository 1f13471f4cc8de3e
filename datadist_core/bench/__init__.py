# SPDX-License-Identifier: Apache-2.0
"""How fast transfers are, next to what this machine can do at best: `python -m datadist_core.bench`.

Absolute numbers say little on a machine that others use too. So every contender moves the same block lists in turns
with plain references (a C loop of memcpy, the same with streaming stores, a bare socket), and what counts is the ratio
of the two within one turn. Read on in `contenders.py`, which says what a contender is, then `measure.py`.
"""
