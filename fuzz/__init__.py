# SPDX-License-Identifier: Apache-2.0
"""Fuzzing of everything here that reads what a peer, a router or a user sends. Not installed; see `fuzz/README.md`."""
