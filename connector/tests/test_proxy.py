# SPDX-License-Identifier: Apache-2.0
"""The example proxy without engines: what it makes of requests and lists of servers that are not as they should be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("aiohttp")
from aiohttp.test_utils import TestClient, TestServer

from examples.vllm_pd.proxy import Proxy, Servers, UpstreamError, is_for_both, make_app, num_sequences

#: Nothing listens on port 1.
P, D = "http://127.0.0.1:1", "http://localhost:1"


@pytest.mark.parametrize("same_time", [False, True])
def test_workers_are_as_many_as_prefill_servers(same_time: bool) -> None:
    """Also where they are not needed: the surplus servers would never be asked."""
    with pytest.raises(ValueError, match="2 prefill servers, but 1 addresses of their workers"):
        Servers.of([P, P], [D], ["h:1"], same_time)
    assert Servers.of([P, P], [D], ["h:1", "h:2"], same_time).prefill_workers == ("h:1", "h:2")
    assert Servers.of([P, P], [D], [], same_time=False).prefill_workers == ()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [[1], [2]], "n": 3}, 6),
        ({"messages": [], "n": None}, 1),
        ({"prompt_embeds": "base64"}, 1),
        ({"prompt_embeds": ["base64"]}, 1),
        ({"prompt_embeds": ["a", "b", "c"]}, 3),
        ({"prompt": "a", "prompt_embeds": "b"}, 2),
        ({"prompt": "a", "n": "2"}, 2),
    ],
)
def test_every_prompt_and_choice_is_a_sequence(body: dict[str, Any], expected: int) -> None:
    assert num_sequences(body) == expected
    assert is_for_both(body) is (expected == 1)


@pytest.mark.parametrize("n", ["x", [2], {"a": 1}, float("inf"), float("nan")])
def test_a_number_of_choices_that_is_none_is_the_clients_fault(n: object) -> None:
    with pytest.raises(UpstreamError) as caught:
        num_sequences({"n": n})
    assert caught.value.status == 400
    assert b"n must be a whole number" in caught.value.body


def test_bad_requests_are_answered_and_change_nothing() -> None:
    async def ask() -> None:
        app = make_app(Proxy(Servers.of([P], [D], [], same_time=False)), is_admin=True)
        async with TestClient(TestServer(app)) as client:
            answer = await client.post("/v1/completions", json={"prompt": "a", "n": [2]})
            assert (answer.status, "n must be a whole number" in await answer.text()) == (400, True)
            before = await (await client.get("/servers")).json()
            for wrong in ("http://x", {"http://x": 1}, [1], None, [["http://x"]]):
                answer = await client.put("/servers", json={"prefill": wrong, "decode": [D]})
                assert (answer.status, "prefill must be a list of strings" in await answer.text()) == (400, True)
            answer = await client.put("/servers", data=b"{")
            assert (answer.status, "is not JSON" in await answer.text()) == (400, True)
            answer = await client.put("/servers", json={"prefill": [P, P], "decode": [D], "prefill_worker": ["h:1"]})
            assert answer.status == 400
            assert await (await client.get("/servers")).json() == before
            assert (await client.put("/servers", json={"prefill": [P, P], "decode": [D]})).status == 200

    asyncio.run(ask())
