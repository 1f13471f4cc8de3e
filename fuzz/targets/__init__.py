# SPDX-License-Identifier: Apache-2.0
"""The targets: one module each, see `fuzz.target.Target`."""
