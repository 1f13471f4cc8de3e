# SPDX-License-Identifier: Apache-2.0
"""One target under atheris: `python -m fuzz.engine TARGET [options of libFuzzer] [folders]`. For `fuzz.__main__`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

import atheris  # type: ignore[import-not-found]

from .limits import limited
from .target import load

AGAIN = "DATADIST_FUZZ_AGAIN"


def main() -> None:
    name, *options = sys.argv[1:]
    logging.disable(logging.INFO)
    logging.getLogger().addHandler(logging.NullHandler())
    with atheris.instrument_imports(include=["datadist_core", "vllm_datadist", "fuzz.targets"]):
        target = load(name)
    mutate: Callable[[bytes, int, int], bytes] | None = getattr(target, "mutate", None)

    def mixed(data: bytes, max_size: int, seed: int) -> bytes:
        """Every fourth time as libFuzzer would: it knows which bytes the code has been comparing."""
        if mutate is None or seed % 4 == 0:
            return bytes(atheris.Mutate(data, max_size))
        return mutate(data, max_size, seed)

    def one(data: bytes) -> None:
        limited(target.run, data)

    # To merge, libFuzzer starts itself again by this name.
    again = os.environ.get(AGAIN, sys.argv[0])
    atheris.Setup([again, *options], one, custom_mutator=mixed if mutate else None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
