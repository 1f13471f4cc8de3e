# SPDX-License-Identifier: Apache-2.0
"""A small prefill/decode proxy, made to be read: the whole protocol is `_serve`.

    python proxy.py --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

1. The client's request goes to a prefill server P, cut down to one token, with kv_transfer_params that say "somebody
   else will decode". P computes the prompt, keeps its KV blocks, and puts a *ticket* into its answer.
2. The client's request, unchanged but for that ticket, goes to a decode server D. D fetches the KV blocks from P with
   the ticket's help and generates. Its answer is passed to the client byte by byte.

The proxy never looks into the ticket. A ticket is good for one sequence, so a request for several (n > 1, or a list of
prompts) goes to D alone: slower, but right. For anything serious use `vllm-router`, which speaks the same protocol.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web

JsonObject = dict[str, Any]

logger = logging.getLogger("proxy")

CONNECT_TIMEOUT_S = 5.0
MAX_REQUEST_BYTES = 64 << 20
PREFILL_TICKET_REQUEST = {"do_remote_decode": True, "do_remote_prefill": False}
FORWARDED_HEADERS = ("Authorization", "X-Request-Id")
PASSED_BACK_HEADERS = ("Content-Type", "X-Request-Id", "Retry-After")


class UpstreamError(Exception):
    """A server refused, or could not be reached. Carries the answer that the client gets."""

    def __init__(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        super().__init__(f"status {status}")
        self.status, self.body, self.content_type = status, body, content_type

    @classmethod
    def unreachable(cls, url: str, cause: BaseException) -> UpstreamError:
        """502: names the server and what went wrong."""
        return cls(502, _error_body(f"{url}: {type(cause).__name__}: {cause}", 502))


def _error_body(message: str, status: int) -> bytes:
    return json.dumps({"error": {"message": message, "type": "proxy_error", "code": status}}).encode()


def prefill_body(body: JsonObject) -> JsonObject:
    """The request that P gets: the same prompt, one token, one choice, no stream.

    Whatever concerns only the generated text must go, or P would refuse it (min_tokens above max_tokens,
    stream_options without stream, best_of or n without effect) or do needless work. Sampling options stay: P's one
    token is thrown away.
    """
    dropped = ("stream_options", "min_tokens", "max_completion_tokens", "n", "best_of", "use_beam_search")
    cut = {key: value for key, value in body.items() if key not in dropped}
    one_token = {"max_completion_tokens": 1} if "max_completion_tokens" in body else {}
    return cut | one_token | {"max_tokens": 1, "stream": False, "kv_transfer_params": dict(PREFILL_TICKET_REQUEST)}


def decode_body(body: JsonObject, ticket: JsonObject | None) -> JsonObject:
    """The request that D gets. Without a ticket D computes the prompt itself, which is slow but right."""
    plain = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    return plain if ticket is None else plain | {"kv_transfer_params": ticket}


def num_sequences(body: JsonObject) -> int:
    """How many sequences D will run for this request: choices times prompts of a batch."""
    prompt = body.get("prompt")
    is_batch = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return (len(prompt) if isinstance(prompt, list) and is_batch else 1) * int(body.get("n") or 1)


class Proxy:
    """Routes each request to the next P and the next D.

    Args:
        prefill_urls: base URLs of the prefill servers.
        decode_urls: base URLs of the decode servers.
    """

    def __init__(self, prefill_urls: Sequence[str], decode_urls: Sequence[str]) -> None:
        self._prefill_urls: Iterator[str] = itertools.cycle([url.rstrip("/") for url in prefill_urls])
        self._decode_urls: Iterator[str] = itertools.cycle([url.rstrip("/") for url in decode_urls])

    async def with_session(self, _app: web.Application) -> AsyncIterator[None]:
        """Holds the upstream session for as long as the application lives. It bounds connecting, not generation."""
        timeout = ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        async with ClientSession(timeout=timeout) as self._session:
            yield

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        try:
            return await self._serve(request, await _json_body(request))
        except UpstreamError as error:
            return web.Response(status=error.status, body=error.body, headers={"Content-Type": error.content_type})

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models: as the next decode server says."""
        try:
            async with self._session.get(next(self._decode_urls) + request.path) as answer:
                return web.Response(status=answer.status, body=await answer.read(), headers=_passed_back(answer))
        except (ClientError, TimeoutError, asyncio.TimeoutError) as error:
            return web.Response(status=502, body=_error_body(str(error), 502), content_type="application/json")

    async def health(self, _request: web.Request) -> web.Response:
        """GET /health: the proxy itself is up. A server that is not shows in the requests that need it."""
        return web.json_response({"status": "ok"})

    # If the client leaves, aiohttp cancels this coroutine (handler_cancellation). Leaving an `async with` of `_post`
    # by cancellation closes that connection, and vLLM then aborts the request: in stage 1 on P, in stage 2 on D.
    async def _serve(self, request: web.Request, body: JsonObject) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in FORWARDED_HEADERS if name in request.headers}
        headers.setdefault("X-Request-Id", uuid.uuid4().hex)
        ticket = None
        if num_sequences(body) == 1:
            ticket = await self._prefill(next(self._prefill_urls) + request.path, body, headers)
        async with self._post(next(self._decode_urls) + request.path, decode_body(body, ticket), headers) as answer:
            return await _pass_through(request, answer)

    async def _prefill(self, url: str, body: JsonObject, headers: dict[str, str]) -> JsonObject | None:
        async with self._post(url, prefill_body(body), headers) as answer:
            try:
                ticket = (await answer.json()).get("kv_transfer_params")
            except (ClientError, ValueError) as error:
                raise UpstreamError.unreachable(url, error) from error
        if not ticket:
            logger.warning("%s gave no kv_transfer_params: the decode server will compute the prompt itself", url)
            return None
        return dict(ticket)

    @asynccontextmanager
    async def _post(self, url: str, body: JsonObject, headers: dict[str, str]) -> AsyncIterator[ClientResponse]:
        """An upstream answer with a good status; raises UpstreamError otherwise."""
        try:
            answer = await self._session.post(url, json=body, headers=headers)
        except (ClientError, TimeoutError, asyncio.TimeoutError) as error:
            raise UpstreamError.unreachable(url, error) from error
        async with answer:
            if answer.status >= 400:
                raise UpstreamError(answer.status, await answer.read(), answer.content_type)
            yield answer


async def _json_body(request: web.Request) -> JsonObject:
    try:
        body = await request.json()
    except ValueError as error:
        raise UpstreamError(400, _error_body(f"the request body is not JSON: {error}", 400)) from error
    if not isinstance(body, dict):
        raise UpstreamError(400, _error_body("the request body is not a JSON object", 400))
    return body


def _passed_back(answer: ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in PASSED_BACK_HEADERS if name in answer.headers}


async def _pass_through(request: web.Request, answer: ClientResponse) -> web.StreamResponse:
    """Send D's answer on as it comes; for both streamed and plain answers.

    If D breaks off in mid-answer, so does the connection to the client: a clean end would look like a whole answer.
    """
    response = web.StreamResponse(status=answer.status, headers=_passed_back(answer))
    await response.prepare(request)
    try:
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except ConnectionResetError:
        raise  # it is the client that left
    except ClientError as error:
        logger.error("the decode server broke off: %s", error)
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


def make_app(prefill_urls: Sequence[str], decode_urls: Sequence[str]) -> web.Application:
    """The aiohttp application."""
    proxy = Proxy(prefill_urls, decode_urls)
    app = web.Application(client_max_size=MAX_REQUEST_BYTES)
    app.cleanup_ctx.append(proxy.with_session)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, proxy.generate)
    app.router.add_get("/v1/models", proxy.models)
    app.router.add_get("/health", proxy.health)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description="A small prefill/decode proxy for vLLM servers.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", action="extend", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", action="extend", required=True, metavar="URL")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    app = make_app(options.prefill, options.decode)
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True, shutdown_timeout=2.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
