# SPDX-License-Identifier: Apache-2.0
"""How fast transfers are, next to this machine at its best and to other engines: `python -m datadist_core.bench`.

Absolute numbers say little on a machine that others use too. So every contender moves the same block lists in turns
with plain references (a C loop of memcpy, the same with streaming stores, a bare socket) and with other engines, and
what counts is the ratio of two of them within the same rounds. Read on in `contract.py`, which says what a contender
is, then `contenders.py`, `field.py` (the turns) and `measure.py`; `bars.py` says what is to be reached.
"""
