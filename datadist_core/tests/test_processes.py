# SPDX-License-Identifier: Apache-2.0
"""Two and three real processes: transfers, death of either end, relinking, other network namespaces."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from datadist_core.testing.ports import free_port
from datadist_core.tests.child import Child, ChildFailed
from datadist_core.tests.core_ends import LINK_MS, filled_cache, make_end, must_link
from datadist_core.wire.codec import PREAMBLE

pytestmark = pytest.mark.slow

BACKENDS = ["shm", "tcp", "auto"]
P, D, D2 = 1, 2, 3


def expected_blocks(seed: int, blocks: list[int]) -> list[np.ndarray]:
    with make_end("loopback") as end:
        return [tensor[blocks].copy() for tensor in filled_cache(end, seed).numpy()]


def eventually(condition, what: str, seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        threading.Event().wait(0.02)


@pytest.fixture(params=BACKENDS)
def two(request):
    with (
        Child(cluster_id=P, backend=request.param, listen=f"127.0.0.1:{free_port()}") as prompt,
        Child(cluster_id=D, backend=request.param) as decoder,
    ):
        prompt.do("fill", 1)
        decoder.do("fill", 2)
        assert decoder.do("link", P, prompt.host, prompt.port)[0] == "LLM_SUCCESS"
        yield prompt, decoder


def test_pull_and_push_between_processes(two):
    prompt, decoder = two
    for got, want in zip(decoder.do("pull", P, [0, 1, 9], [4, 5, 2]), expected_blocks(1, [0, 1, 9]), strict=True):
        np.testing.assert_array_equal(got, want)
    decoder.do("push", P, [0, 1], [7, 8])
    for got, want in zip(prompt.do("read", [7, 8]), expected_blocks(2, [0, 1]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_chosen_backend_is_the_best_one(two, request):
    prompt, decoder = two
    asked = request.node.callspec.params["two"]
    for child, other in ((decoder, P), (prompt, D)):
        info = child.do("link_info", other)
        assert info.backend == ("shm" if asked == "auto" else asked)
        if asked == "auto":
            assert "another process" in info.rejected["loopback"]


def test_one_decoder_two_prompts_in_three_processes():
    with (
        Child(cluster_id=P, listen="127.0.0.1:0") as one,
        Child(cluster_id=D2, listen="127.0.0.1:0") as two,
        Child(cluster_id=D) as decoder,
    ):
        one.do("fill", 1)
        two.do("fill", 5)
        decoder.do("fill", 2)
        for prompt in (one, two):
            assert decoder.do("link", prompt.cluster_id, prompt.host, prompt.port)[0] == "LLM_SUCCESS"
        for prompt, seed in ((one, 1), (two, 5)):
            got = decoder.do("pull", prompt.cluster_id, [3], [3])
            np.testing.assert_array_equal(got[2], expected_blocks(seed, [3])[2])


def test_death_of_the_prompt_is_noticed_and_a_new_one_links(two, request):
    prompt, decoder = two
    backend = request.node.callspec.params["two"]
    prompt.kill()
    eventually(lambda: decoder.do("num_links") == 0, "the decoder notices")
    with pytest.raises(ChildFailed, match="LLM_NOT_YET_LINK"):
        decoder.do("pull", P, [0], [0])
    with Child(cluster_id=P, backend=backend, listen=f"127.0.0.1:{prompt.port}") as again:
        again.do("fill", 7)
        assert decoder.do("link", P, again.host, again.port)[0] == "LLM_SUCCESS"
        np.testing.assert_array_equal(decoder.do("pull", P, [1], [1])[0], expected_blocks(7, [1])[0])


def test_a_restarted_decoder_with_the_same_id_replaces_the_dead_one(two, request):
    prompt, decoder = two
    backend = request.node.callspec.params["two"]
    decoder.kill()
    with Child(cluster_id=D, backend=backend) as again:
        again.do("fill", 2)
        assert again.do("link", P, prompt.host, prompt.port)[0] == "LLM_SUCCESS"
        again.do("pull", P, [0], [0])
    eventually(lambda: prompt.do("num_links") == 0, "the prompt forgets the dead decoder")


def test_restarts_leak_no_descriptors(two, request):
    prompt, decoder = two
    decoder.kill()
    eventually(lambda: prompt.do("num_links") == 0, "the first decoder is forgotten")
    start = prompt.do("fds")
    for _ in range(4):
        with Child(cluster_id=D, backend=request.node.callspec.params["two"]) as again:
            again.do("fill", 2)
            assert again.do("link", P, prompt.host, prompt.port)[0] == "LLM_SUCCESS"
            again.do("pull", P, [0], [0])
            again.kill()
        eventually(lambda: prompt.do("num_links") == 0, "the decoder is forgotten")
    eventually(lambda: prompt.do("fds") <= start, "descriptors are back")


@pytest.mark.parametrize("backend", ["tcp"])
def test_a_stopped_prompt_ends_the_pull_at_its_deadline(backend):
    with (
        Child(cluster_id=P, backend=backend, listen="127.0.0.1:0") as prompt,
        Child(cluster_id=D, backend=backend) as decoder,
    ):
        prompt.do("fill", 1)
        decoder.do("fill", 2)
        decoder.do("link", P, prompt.host, prompt.port)
        decoder.do("pull", P, [0], [0])
        prompt.stop()
        try:
            with pytest.raises(ChildFailed, match=r"LLM_TIMEOUT|LLM_LINK_FAILED"):
                decoder.do("pull", P, [0], [0], deadline_s=1.0)
        finally:
            prompt.resume()


def test_a_silent_peer_is_given_up_after_missed_heartbeats():
    with Child(cluster_id=P, listen="127.0.0.1:0") as prompt, Child(cluster_id=D) as decoder:
        decoder.do("link", P, prompt.host, prompt.port)
        prompt.stop()
        try:
            eventually(lambda: decoder.do("num_links") == 0, "heartbeats are missed", seconds=120)
        finally:
            prompt.resume()


def test_listeners_that_start_at_once_get_distinct_ports():
    def start(number: int) -> Child:
        return Child(cluster_id=100 + number, backend="tcp", listen="127.0.0.1:0")

    with ThreadPoolExecutor(8) as pool:
        children = list(pool.map(start, range(8)))
    try:
        assert len({child.port for child in children}) == 8
    finally:
        for child in children:
            child.__exit__()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", PREAMBLE + b"\xff\xff\xff\xff", os.urandom(4096), PREAMBLE]
)
def test_strangers_do_not_disturb_the_listener(garbage):
    with make_end("auto", "127.0.0.1:0") as prompt, make_end() as decoder:
        address = prompt.listen_address
        with socket.create_connection((address.host, address.port), timeout=30) as stranger:
            stranger.sendall(garbage)
            must_link(decoder, prompt)
            decoder.check_link_status(prompt.cluster_id)


def ours_in_dev_shm() -> set[str]:
    """Other programs make files there at any time; `test_b21_*` has a /dev/shm of its own, and looks at everything."""
    return {name for name in os.listdir("/dev/shm") if "datadist" in name}


def test_memory_files_leave_nothing_behind_after_sigkill():
    before = ours_in_dev_shm()
    for _ in range(3):
        with Child(cluster_id=P, listen="127.0.0.1:0") as prompt:
            prompt.do("fill", 1)
            prompt.kill()
    assert ours_in_dev_shm() <= before


@pytest.fixture
def namespaces():
    """Two network namespaces joined by a veth pair: 10.231.7.1 in the first, 10.231.7.2 in the second."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        if os.environ.get("DATADIST_REQUIRE_ALL") == "1":
            pytest.fail("network namespaces need root and iproute2, and this run must skip nothing")
        pytest.skip("needs root and iproute2")
    names = [f"ddt{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", f"v{names[0]}", "netns", names[0], "type", "veth", "peer", f"v{names[1]}", "netns", names[1])
        for i, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.231.7.{i}/24", "dev", f"v{name}")
            _ip("-n", name, "link", "set", f"v{name}", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=20)


NAMESPACE_PROMPT = """
import sys
from datadist_core.tests.core_ends import filled_cache, make_end
with make_end("auto", "10.231.7.1:0", cluster_id=1) as end:
    filled_cache(end, 1)
    print(end.listen_address.port, flush=True)
    sys.stdin.readline()
"""
NAMESPACE_DECODER = """
import sys
from datadist_core import BlocksCacheKey
from datadist_core.tests.core_ends import filled_cache, make_end, manager, remote_info
with make_end("auto", cluster_id=2) as end:
    overall, _ = end.link_clusters([remote_info(1, "10.231.7.1", int(sys.argv[1]))], timeout=30000)
    assert overall == 0, end.link_failure(1)
    cache = filled_cache(end, 2)
    manager(end).pull_blocks(BlocksCacheKey(1), cache, [3], [5])
    info = end.link_info(1)
    print(info.backend, "|", info.rejected["shm"], "|", float(cache.numpy()[1][5].sum()))
"""


def test_another_network_namespace_falls_back_to_tcp_and_says_why(namespaces):
    def in_namespace(name: str, code: str, *args: str) -> list[str]:
        return ["ip", "netns", "exec", name, sys.executable, "-c", code, *args]

    prompt = subprocess.Popen(
        in_namespace(namespaces[0], NAMESPACE_PROMPT), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        port = prompt.stdout.readline().strip()
        done = subprocess.run(
            in_namespace(namespaces[1], NAMESPACE_DECODER, port), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        backend, reason, total = done.stdout.split("|")
        assert backend.strip() == "tcp"
        assert "namespace" in reason
        assert float(total) == pytest.approx(float(expected_blocks(1, [3])[1].sum()))
    finally:
        prompt.kill()
        prompt.wait(10)
        prompt.stdin.close()
        prompt.stdout.close()


def test_cluster_info_of_a_real_end_links_again_after_unlink():
    with Child(cluster_id=P, listen="127.0.0.1:0") as prompt, make_end() as decoder:
        for _ in range(3):
            assert decoder.link_clusters([prompt.info()], timeout=LINK_MS)[0].name == "LLM_SUCCESS"
            assert decoder.unlink_clusters([prompt.info()], timeout=LINK_MS)[0].name == "LLM_SUCCESS"
        assert prompt.do("num_links") == 0
