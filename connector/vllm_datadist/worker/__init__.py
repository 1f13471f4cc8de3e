# SPDX-License-Identifier: Apache-2.0
"""The half that lives in each worker: memory, links and transfers."""
