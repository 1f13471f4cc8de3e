# SPDX-License-Identifier: Apache-2.0
"""Shipped, so that a third party can check its own backend.

`conformance` holds the rules as tests (needs pytest), `pair` opens and links two backends, `faults` has backends that
go wrong on purpose, `soak` stops and kills two ends under load. Nothing else in datadist_core imports this.
"""
