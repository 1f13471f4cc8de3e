# SPDX-License-Identifier: Apache-2.0
"""Every example in examples/flows as its README says to run it: with one command, and as separate terminals.

All runs are sessions of their own, so that a process which stays behind is found, and ended, whatever became of it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOWS = ROOT / "examples" / "flows"
EXAMPLES = sorted(path.stem for path in FLOWS.glob("*.py") if not path.stem.startswith("_"))
FLOWS_OF_THE_SPECIFICATION = {
    "blocks",
    "contiguous_cache",
    "layerwise",
    "link",
    "many_prompts",
    "own_memory",
    "ping_pong",
    "rank_table",
    "swap_blocks",
    "switch_role",
}
BACKENDS = ["shm", "cma", "tcp"]
#: Each over the network, and over one of the ways within a host (`test_flows_*` combine more).
WITH_ONE_COMMAND = [(name, way) for i, name in enumerate(EXAMPLES) for way in ("tcp", ("shm", "cma")[i % 2])]
RUN_LIMIT_S = 200
END_LIMIT_S = 60
#: More than they take for themselves: none of these tests is about how long a busy machine takes.
PATIENTLY = ("--limit-s", "150")


class Terminal:
    """A command in a session of its own, with its output as one text."""

    def __init__(self, example: str, *args: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"examples.flows.{example}", *args],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._seen: list[str] = []

    def address(self) -> str:
        """Where it says it listens."""
        for line in self._process.stdout:
            self._seen.append(line)
            if found := re.search(r"listens at (\S+);", line):
                return found[1]
        raise AssertionError(f"it ended without listening: {''.join(self._seen)}")

    def finish(self) -> tuple[int, str]:
        """Its exit status and all of its output."""
        rest, _ = self._process.communicate(timeout=RUN_LIMIT_S)
        return self._process.returncode, "".join(self._seen) + rest

    def send(self, signal_number: int) -> None:
        """Only to the process that was started: the others are its own to end."""
        self._process.send_signal(signal_number)

    def left_behind(self) -> list[int]:
        """Processes of its session that are still there some time after it has ended."""
        end = time.monotonic() + END_LIMIT_S
        while (pids := session_members(self._process.pid)) and time.monotonic() < end:
            time.sleep(0.05)
        return pids

    def close(self) -> None:
        for pid in [self._process.pid, *session_members(self._process.pid)]:
            if self._process.returncode is None or pid != self._process.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait(END_LIMIT_S)
        self._process.stdout.close()


def session_members(session_id: int) -> list[int]:
    """Live processes of a session."""
    members = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session_id and fields[0] not in "ZX":
                    members.append(int(name))
    return members


@contextmanager
def terminal(example: str, *args: str) -> Iterator[Terminal]:
    opened = Terminal(example, *args)
    try:
        yield opened
    finally:
        opened.close()


def run_with_one_command(example: str, backend: str) -> str:
    with terminal(example, "--backend", backend, *PATIENTLY) as launcher:
        status, output = launcher.finish()
        assert launcher.left_behind() == []
    assert status == 0, output
    return output


def test_every_flow_of_the_specification_has_an_example():
    assert set(EXAMPLES) >= FLOWS_OF_THE_SPECIFICATION
    readme = (ROOT / "examples" / "README.md").read_text()
    for name in EXAMPLES:
        assert f"flows/{name}.py" in readme, f"examples/README.md lacks {name}"
        assert f"python -m examples.flows.{name}\n" in (FLOWS / f"{name}.py").read_text(), "how to run it"


def test_blocks_with_one_command():
    output = run_with_one_command("blocks", "auto")
    assert re.search(r"^decoder +\| checked: blocks \[2, 3\] came from the prompt", output, re.MULTILINE), output
    assert output.endswith("examples.flows.blocks: OK\n")


@pytest.mark.slow
@pytest.mark.parametrize(("example", "backend"), WITH_ONE_COMMAND)
def test_with_one_command(example, backend):
    output = run_with_one_command(example, backend)
    assert "| FAILED" not in output
    assert "Traceback" not in output
    assert re.search(r"^decoder( \d)? *\| checked: .*", output, re.MULTILINE), output
    assert re.search(r"^decoder( \d)? *\| done, [1-9]\d* checks passed$", output, re.MULTILINE), output
    assert output.endswith(f"examples.flows.{example}: OK\n")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("example", ["blocks", "layerwise"])
def test_in_two_terminals(example, backend):
    with terminal(example, "--role", "prompt", "--listen", "127.0.0.1:0", "--backend", backend, *PATIENTLY) as prompt:
        address = prompt.address()
        with terminal(example, "--role", "decoder", "--connect", address, "--backend", backend, *PATIENTLY) as decoder:
            for end in (decoder, prompt):
                status, output = end.finish()
                assert status == 0, output
                assert re.search(r"^\w+ +\| done", output, re.MULTILINE), output
                assert end.left_behind() == []


@pytest.mark.slow
def test_wrong_data_is_found():
    """The decoder expects the data of another seed: what it compares is what the prompt wrote."""
    with terminal("blocks", "--role", "prompt") as prompt:
        address = prompt.address()
        with terminal("blocks", "--role", "decoder", "--connect", address, "--seed", "7") as decoder:
            status, output = decoder.finish()
            assert status == 1, output
            assert re.search(
                r"^decoder +\| FAILED: blocks \[2, 3\] .* of 2097152 bytes are wrong", output, re.MULTILINE
            )
        status, output = prompt.finish()
        assert status == 1, output
        assert "FAILED: cluster 2 left before it said 'pulled'" in output


@pytest.mark.slow
def test_a_decoder_without_a_prompt_says_why_it_ends():
    with terminal("blocks", "--role", "decoder", "--connect", "127.0.0.1:1") as decoder:
        status, output = decoder.finish()
    assert status == 1, output
    assert "FAILED: link_clusters gave LLM_LINK_FAILED" in output


@pytest.mark.slow
def test_ctrl_c_ends_a_prompt_that_waits():
    with terminal("blocks", "--role", "prompt") as prompt:
        prompt.address()
        prompt.send(signal.SIGINT)
        status, output = prompt.finish()
        assert status in (130, -signal.SIGINT), output  # a shell shows 130 for both
        assert "Traceback" not in output


#: Python drops what is raised while it finalizes an object, as some modules do while they are imported.
A_SIGNAL_IN_A_FINALIZER = """
import signal
from examples.flows import _ends
from examples.flows.blocks import llm_datadist

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.{name})

def prompt(end):
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.PROMPT, _ends.PROMPT) as prompt:
        prompt.init(end.config().generate_options())
        notes = end.notes(prompt)
        Finalized()
        end.say("goes on")
        notes.tell(_ends.DECODER, "filled")

_ends.main("", "a_signal.py", {{"prompt": prompt}})
"""


@pytest.mark.slow
@pytest.mark.parametrize(("signal_number", "wanted"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_is_lost_where_it_arrives_ends_the_next_wait(signal_number, wanted):
    program = A_SIGNAL_IN_A_FINALIZER.format(name=signal_number.name)
    run = subprocess.run(
        [sys.executable, "-c", program, "--role", "prompt", *PATIENTLY],
        cwd=ROOT, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False,
    )  # fmt: skip
    assert "Exception ignored in" in run.stderr
    assert "| goes on\n" in run.stdout
    assert run.returncode == wanted, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_behind_when_the_command_is_ended(signal_number):
    with terminal("many_prompts", *PATIENTLY) as launcher:
        launcher.address()
        launcher.send(signal_number)
        status, output = launcher.finish()
        assert status == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[signal_number], output
        assert launcher.left_behind() == []


@pytest.mark.slow
def test_an_end_that_waits_in_vain_ends_at_its_limit():
    with terminal("blocks", "--role", "prompt", "--limit-s", "3") as prompt:
        status, output = prompt.finish()
        assert status == 1, output
        assert "FAILED: waited too long for cluster 2 to link" in output


def test_an_end_without_an_address_says_what_it_needs():
    with terminal("blocks", "--role", "decoder") as decoder:
        status, output = decoder.finish()
    assert status == 1
    assert "--connect IP:PORT" in output
