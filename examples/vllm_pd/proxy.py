# SPDX-License-Identifier: Apache-2.0
"""A small prefill/decode proxy, made to be read: the whole protocol is `_serve`.

    python proxy.py --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

1. The client's request goes to a prefill server P, cut down to one token, with kv_transfer_params that say "somebody
   else will decode". P computes the prompt, keeps its KV blocks, and puts a *ticket* into its answer.
2. The client's request, unchanged but for that ticket, goes to a decode server D. D fetches the KV blocks from P with
   the ticket's help and generates. Its answer is passed to the client byte by byte.

The proxy never looks into the ticket. A ticket is good for one sequence, so a request for several (n > 1, a list of
prompts, beam search) goes to D alone: slower, but right. For anything serious use `vllm-router`, which speaks the same
protocol (the pull of 1. and 2.).

Push. `--transfer-mode push` asks P to write the KV blocks into D's memory instead. P can do so while it still computes,
if it knows D early. Therefore `--same-time` sends both requests at once; what brings them together at P is a transfer
id that is made up here. D has no ticket then, and is told where P's first worker listens: `--prefill-worker HOST:PORT`,
one for each --prefill (P's `kv_connector_extra_config` has that `port`).

    ... --prefill http://p:8100 --transfer-mode push --same-time --prefill-worker p:26000 --decode http://d:8200

Conversations. `--conversations SECONDS`, for engines that are all kv_both: D's answer brings a ticket for all that D
has computed, and the next turn's request to P carries it: P takes over the earlier turns from D and computes only what
is new. The ticket goes with the conversation: the client says which (header X-Session-ID), or it is a chat whose first
messages are those of the last turn. P itself checks how much of it holds. SECONDS is how long D keeps its blocks, its
`lease_s`. vLLM puts no ticket into streamed answers, so those turns leave nothing to take over.

Servers. `--admin` lets them come and go: `PUT /servers` with a JSON object of `prefill`, `decode` and (--same-time)
`prefill_worker`. Requests under way end where they are, new ones go to the new servers. `GET /servers` shows them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import logging
import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web

JsonObject = dict[str, Any]

logger = logging.getLogger("proxy")

CONNECT_TIMEOUT_S = 5.0
MAX_REQUEST_BYTES = 64 << 20
MAX_CONVERSATIONS = 10_000
PREFILL_TICKET_REQUEST = {"do_remote_decode": True, "do_remote_prefill": False}
FORWARDED_HEADERS = ("Authorization", "X-Request-Id")
PASSED_BACK_HEADERS = ("Content-Type", "X-Request-Id", "Retry-After")


class UpstreamError(Exception):
    """A server refused, or could not be reached. Carries the answer that the client gets."""

    def __init__(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        super().__init__(f"status {status}")
        self.status, self.body, self.content_type = status, body, content_type

    @classmethod
    def saying(cls, message: str, status: int = 400) -> UpstreamError:
        error = {"message": message, "type": "proxy_error", "code": status}
        return cls(status, json.dumps({"error": error}).encode())

    def answer(self) -> web.Response:
        return web.Response(status=self.status, body=self.body, headers={"Content-Type": self.content_type})

    @classmethod
    def unreachable(cls, url: str, cause: BaseException) -> UpstreamError:
        """502: names the server and what went wrong."""
        return cls.saying(f"{url}: {type(cause).__name__}: {cause}", 502)


def prefill_body(body: JsonObject, params: JsonObject) -> JsonObject:
    """The request that P gets: the same prompt, one token, one choice, no stream.

    Whatever concerns only the generated text must go, or P would refuse it (min_tokens above max_tokens,
    stream_options without stream, best_of or n without effect) or do needless work. Sampling options stay: P's one
    token is thrown away.
    """
    dropped = ("stream_options", "min_tokens", "max_completion_tokens", "n", "best_of", "use_beam_search")
    cut = {key: value for key, value in body.items() if key not in dropped}
    one_token = {"max_completion_tokens": 1} if "max_completion_tokens" in body else {}
    return cut | one_token | {"max_tokens": 1, "stream": False, "kv_transfer_params": params}


def decode_body(body: JsonObject, params: JsonObject | None) -> JsonObject:
    """The request that D gets. Without a ticket D computes the prompt itself, which is slow but right."""
    plain = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    return plain if params is None else plain | {"kv_transfer_params": params}


def num_sequences(body: JsonObject) -> int:
    """How many sequences D will run for this request: choices times prompts of a batch. Raises UpstreamError."""
    try:
        num_choices = int(body.get("n") or 1)
    except (TypeError, ValueError, OverflowError) as error:
        raise UpstreamError.saying(f"n must be a whole number, is {body['n']!r}") from error
    prompt, embeds = body.get("prompt"), body.get("prompt_embeds")
    is_batch = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    num_prompts = len(prompt) if isinstance(prompt, list) and is_batch else bool(prompt)
    return max(1, num_prompts + (len(embeds) if isinstance(embeds, list) else bool(embeds))) * num_choices


def is_for_both(body: JsonObject) -> bool:
    """Whether P can help: not with several sequences, nor with beam search, whose requests carry no ticket in vLLM."""
    return num_sequences(body) == 1 and not body.get("use_beam_search")


@dataclass(frozen=True)
class Servers:
    """Where requests go.

    Attributes:
        prefill: base URLs of the prefill servers.
        decode: base URLs of the decode servers.
        prefill_workers: HOST:PORT of each prefill server's first worker; only where P and D are called at once.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    prefill_workers: tuple[str, ...] = ()

    @classmethod
    def of(cls, prefill: Sequence[str], decode: Sequence[str], workers: Sequence[str], same_time: bool) -> Servers:
        """Raises ValueError for lists that do not fit each other."""
        if not prefill or not decode:
            raise ValueError("at least one prefill and one decode server are needed")
        if (same_time or workers) and len(workers) != len(prefill):
            raise ValueError(f"{len(prefill)} prefill servers, but {len(workers)} addresses of their workers")
        if not all(worker.rpartition(":")[0] and worker.rpartition(":")[2].isdigit() for worker in workers):
            raise ValueError(f"prefill workers must be HOST:PORT, found {', '.join(workers)}")
        urls = tuple(url.rstrip("/") for url in prefill), tuple(url.rstrip("/") for url in decode)
        return cls(*urls, tuple(workers))


@dataclass(frozen=True)
class Pair:
    """The servers of one request."""

    prefill: str
    decode: str
    prefill_worker: str = ""


class Conversations:
    """The tickets that D gave for the last turns, each for one use, while D keeps its blocks.

    Args:
        keep_s: how long that is.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._tickets: OrderedDict[str, tuple[float, JsonObject]] = OrderedDict()

    def put(self, keys: Sequence[str], ticket: JsonObject) -> None:
        """After a turn; `keys` are its own."""
        if keys:
            self._tickets.pop(keys[0], None)
            self._tickets[keys[0]] = (time.monotonic() + self._keep_s, ticket)
        while len(self._tickets) > MAX_CONVERSATIONS:
            self._tickets.popitem(last=False)

    def take(self, keys: Sequence[str]) -> JsonObject | None:
        """Before a turn: of the longest known beginning."""
        for key in keys:
            end_s, ticket = self._tickets.pop(key, (0.0, None))
            if ticket is not None and time.monotonic() < end_s:
                return ticket
        return None


def conversation_keys(body: JsonObject, session: str | None) -> list[str]:
    """The client's name for it, else one per beginning of the chat, the whole first; [] where there is neither."""
    if session:
        return [session]
    messages = body.get("messages")
    if not isinstance(messages, list):
        return []
    digest = hashlib.sha256(json.dumps([body.get("model"), body.get("tools")]).encode())
    keys = []
    for message in messages:
        digest.update(json.dumps(message, sort_keys=True).encode())
        keys.append(digest.hexdigest())
    return keys[::-1]


class Proxy:
    """Routes each request to the next P and the next D.

    Args:
        servers: where to.
        transfer_mode: "pull" or "push"; "" = whatever the engines have as their default.
        same_time: ask P and D at once.
        keep_s: how long D keeps a conversation's blocks; 0 = do not ask it to.
    """

    def __init__(self, servers: Servers, transfer_mode: str = "", same_time: bool = False, keep_s: float = 0.0) -> None:
        self._mode: JsonObject = {"transfer_mode": transfer_mode} if transfer_mode else {}
        self._same_time = same_time
        self._conversations = Conversations(keep_s) if keep_s else None
        self._use(servers)

    def _use(self, servers: Servers) -> None:
        self._servers = servers
        workers = servers.prefill_workers or ("",) * len(servers.prefill)
        self._prefills: Iterator[tuple[str, str]] = itertools.cycle(zip(servers.prefill, workers, strict=True))
        self._decodes: Iterator[str] = itertools.cycle(servers.decode)

    def _next_pair(self) -> Pair:
        prefill, worker = next(self._prefills)
        return Pair(prefill, next(self._decodes), worker)

    async def with_session(self, _app: web.Application) -> AsyncIterator[None]:
        """Holds the upstream session for as long as the application lives. It bounds connecting, not generation."""
        async with ClientSession(timeout=ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)) as self._session:
            yield

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        try:
            return await self._serve(request, await _json_body(request))
        except UpstreamError as error:
            return error.answer()

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models: as the next decode server says."""
        try:
            async with self._session.get(next(self._decodes) + request.path) as answer:
                return web.Response(status=answer.status, body=await answer.read(), headers=_passed_back(answer))
        except (ClientError, TimeoutError, asyncio.TimeoutError) as error:
            return UpstreamError.unreachable(request.path, error).answer()

    async def health(self, _request: web.Request) -> web.Response:
        """GET /health: the proxy itself is up. A server that is not shows in the requests that need it."""
        return web.json_response({"status": "ok"})

    async def servers(self, request: web.Request) -> web.Response:
        """GET /servers, PUT /servers."""
        if request.method == "PUT":
            try:
                wanted = await _json_body(request)
                lists = [_strings(wanted, name) for name in ("prefill", "decode", "prefill_worker")]
                self._use(Servers.of(*lists, same_time=self._same_time))
            except (UpstreamError, ValueError) as error:
                return (error if isinstance(error, UpstreamError) else UpstreamError.saying(str(error))).answer()
        now = self._servers
        return web.json_response({"prefill": now.prefill, "decode": now.decode, "prefill_worker": now.prefill_workers})

    # If the client leaves, aiohttp cancels this coroutine (handler_cancellation). Leaving an `async with` of `_post`
    # by cancellation closes that connection, and vLLM then aborts the request: in stage 1 on P, in stage 2 on D.
    async def _serve(self, request: web.Request, body: JsonObject) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in FORWARDED_HEADERS if name in request.headers}
        headers.setdefault("X-Request-Id", uuid.uuid4().hex)
        pair = self._next_pair()
        if not is_for_both(body):
            async with self._post(pair.decode + request.path, decode_body(body, None), headers) as answer:
                return await _pass_through(request, answer)
        if self._same_time:
            return await self._serve_at_once(request, body, headers, pair)
        if self._conversations is not None:
            return await self._serve_turn(request, body, headers, pair, self._conversations)
        ticket = await self._prefill(pair.prefill + request.path, body, headers, PREFILL_TICKET_REQUEST | self._mode)
        async with self._post(pair.decode + request.path, decode_body(body, ticket), headers) as answer:
            return await _pass_through(request, answer)

    async def _serve_at_once(
        self, request: web.Request, body: JsonObject, headers: dict[str, str], pair: Pair
    ) -> web.StreamResponse:
        """P and D meet by the transfer id. Whichever fails first is the answer, and the other one is cut off."""
        named = self._mode | {"transfer_id": uuid.uuid4().hex}
        host, _, port = pair.prefill_worker.rpartition(":")
        told = named | {"do_remote_prefill": True, "remote_host": host.strip("[]"), "remote_port": int(port)}
        asked = named | PREFILL_TICKET_REQUEST
        async with AsyncExitStack() as stack:
            post = self._post(pair.decode + request.path, decode_body(body, told), headers)
            stages = (
                asyncio.ensure_future(self._prefill(pair.prefill + request.path, body, headers, asked)),
                asyncio.ensure_future(stack.enter_async_context(post)),
            )
            try:
                _, answer = await asyncio.gather(*stages)
                return await _pass_through(request, answer)
            finally:
                for stage in stages:
                    stage.cancel()
                await asyncio.gather(*stages, return_exceptions=True)

    async def _serve_turn(
        self, request: web.Request, body: JsonObject, headers: dict[str, str], pair: Pair, conversations: Conversations
    ) -> web.StreamResponse:
        """P gets the last turn's ticket; D is asked for one too, and the client does not see it."""
        keys = conversation_keys(body, request.headers.get("X-Session-ID"))
        known = conversations.take(keys)
        url = pair.prefill + request.path
        try:
            ticket = await self._prefill(url, body, headers, (known or {}) | {"do_remote_decode": True})
        except UpstreamError as error:
            if known is None or error.status < 500:
                raise
            logger.warning("%s could not take over the last turn, and computes all of it", url)
            ticket = await self._prefill(url, body, headers, PREFILL_TICKET_REQUEST)
        wants_ticket = bool(keys) and not body.get("stream")
        params = (ticket or {}) | {"do_remote_decode": True} if wants_ticket else ticket
        async with self._post(pair.decode + request.path, decode_body(body, params), headers) as answer:
            if not wants_ticket:
                return await _pass_through(request, answer)
            whole = await _json_answer(pair.decode, answer)
            if given := whole.pop("kv_transfer_params", None):
                conversations.put(keys, given)
            return web.json_response(whole, status=answer.status)

    async def _prefill(
        self, url: str, body: JsonObject, headers: dict[str, str], params: JsonObject
    ) -> JsonObject | None:
        async with self._post(url, prefill_body(body, params), headers) as answer:
            ticket = (await _json_answer(url, answer)).get("kv_transfer_params")
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


def _strings(body: JsonObject, name: str) -> list[str]:
    found = body.get(name, [])
    if isinstance(found, list) and all(isinstance(one, str) for one in found):
        return found
    raise ValueError(f"{name} must be a list of strings, is {found!r}")


async def _json_body(request: web.Request) -> JsonObject:
    try:
        body = await request.json()
    except ValueError as error:
        raise UpstreamError.saying(f"the request body is not JSON: {error}") from error
    if isinstance(body, dict):
        return body
    raise UpstreamError.saying("the request body is not a JSON object")


async def _json_answer(url: str, answer: ClientResponse) -> JsonObject:
    try:
        return dict(await answer.json())
    except (ClientError, ValueError, TypeError) as error:
        raise UpstreamError.unreachable(url, error) from error


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


def make_app(proxy: Proxy, is_admin: bool = False) -> web.Application:
    """The aiohttp application."""
    app = web.Application(client_max_size=MAX_REQUEST_BYTES)
    app.cleanup_ctx.append(proxy.with_session)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, proxy.generate)
    app.router.add_get("/v1/models", proxy.models)
    app.router.add_get("/health", proxy.health)
    if is_admin:
        app.router.add_get("/servers", proxy.servers)
        app.router.add_put("/servers", proxy.servers)
    return app


def _proxy(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Proxy:
    """Ends the program with a message for options that do not fit each other."""
    if options.same_time and options.transfer_mode != "push":
        parser.error("--same-time needs --transfer-mode push: without a push, D needs the ticket that P returns")
    if options.conversations and options.transfer_mode == "push":
        parser.error("--conversations needs --transfer-mode pull: P takes over by a pull, and a request has one mode")
    try:
        servers = Servers.of(options.prefill, options.decode, options.prefill_worker, options.same_time)
        return Proxy(servers, options.transfer_mode, options.same_time, options.conversations)
    except ValueError as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description="A small prefill/decode proxy for vLLM servers.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", action="extend", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", action="extend", required=True, metavar="URL")
    parser.add_argument("--transfer-mode", choices=("pull", "push"), default="", help="default: as the engines have it")
    parser.add_argument("--same-time", action="store_true", help="ask P and D at once; with --transfer-mode push")
    parser.add_argument(
        "--prefill-worker", nargs="+", action="extend", default=[], metavar="HOST:PORT",
        help="where the first worker of each --prefill listens; with --same-time",
    )  # fmt: skip
    parser.add_argument(
        "--conversations", type=float, default=0.0, metavar="SECONDS",
        help="let P take over a chat's earlier turns from D, which keeps them so long (its lease_s)",
    )  # fmt: skip
    parser.add_argument("--admin", action="store_true", help="PUT /servers changes the servers, for anyone who asks")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    app = make_app(_proxy(parser, options), options.admin)
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True, shutdown_timeout=2.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
