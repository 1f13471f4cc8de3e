# SPDX-License-Identifier: Apache-2.0
"""Before anything else is said on a link: both ends prove that they know the shared secret (`llm.Security`).

    dialling end                                             listening end
    Challenge (version, both cluster ids, my nonce)     -->
                                                        <--  CounterChallenge (my nonce)
    Proof (HMAC of all of it, as the dialling end)      -->  checks it
    checks it                                           <--  Proof (HMAC of all of it, as the listening end)

Both nonces are new for every connection, so that no recorded proof is of use again; the two ends make different proofs,
so that none can be sent back; and the listening end proves nothing to who has not, nor that it is another cluster than
the one that was asked for, so that a proof of one end cannot be passed off as that of another. What the two have in
common then, and nobody else, is the key of this link: see `Session`.

Without TLS this proves who is there at the start, to who is not in between; docs/security.md says what it leaves open.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..errors import LinkFailed, LLMException, ProtocolError
from ..security import Security
from ..types import LLMStatusCode
from ..wire import messages as m
from ..wire.codec import MAX_HELLO_BYTES

if TYPE_CHECKING:
    from .link import Link

NONCE_BYTES = 32
TOKEN_BYTES = 16
_DIALLING, _LISTENING, _KEY = "dialling end", "listening end", "link key"
_SET_IT = (
    "set the same secret at both ends, or at neither (LLMConfig.security, the option llm.Security, or "
    '"security" in kv_connector_extra_config)'
)
#: To who guesses, a wrong secret is told like this and no better.
WRONG_SECRET = f"the shared secrets of the two ends differ; {_SET_IT}"
NO_SECRET_THERE = f"this end requires a shared secret, and the dialling end has none; {_SET_IT}"
NO_SECRET_HERE = f"the dialling end requires a shared secret, and this end has none; {_SET_IT}"


@dataclass(frozen=True, slots=True)
class Session:
    """What both ends know of a link once they have proved themselves.

    Attributes:
        key: known to nobody else.
        dialling_id, listening_id: the cluster ids that were proved.
    """

    key: bytes = field(repr=False)
    dialling_id: int
    listening_id: int

    def token(self, said: bytes) -> bytes:
        """The link's token for the backends. `said` was sent for all to read; this was not."""
        return hmac.new(self.key, b"link token" + said, hashlib.sha256).digest()[:TOKEN_BYTES]


class Authentication:
    """Both ends' part. Thread-safe: it keeps nothing of its own.

    Args:
        refuse: ends a link and tells the dialling end why.
    """

    def __init__(self, security: Security, cluster_id: int, refuse: Callable[[Link, LLMException], None]) -> None:
        self._security = security
        self._cluster_id = cluster_id
        self._refuse = refuse

    @property
    def is_on(self) -> bool:
        return self._security.secret is not None

    # -- the dialling end (a thread that may wait)

    def prove_to(self, link: Link, expected_cluster_id: int, answer: Callable[[type], m.AnyMessage]) -> None:
        """Until both ends have proved themselves. Raises what went wrong, or what the other end refused."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        challenge = m.Challenge(m.PROTOCOL_VERSION, self._cluster_id, expected_cluster_id, nonce)
        link.send(challenge)
        said = _said(challenge, answer(m.CounterChallenge))
        link.send(m.Proof(self._security.prove(_DIALLING, *said)))
        proof = answer(m.Proof)
        if not isinstance(proof, m.Proof) or not self._security.check(proof.mac, _LISTENING, *said):
            raise LinkFailed(f"{link.channel.peer_address} has not proved that it knows the shared secret")
        self._trust(link, challenge, said)

    # -- the listening end (the control loop's thread, which must not wait)

    def await_proof(self, link: Link) -> None:
        """Have a newcomer prove itself. One without a secret, or with one where this end has none, is refused."""
        link.expect(m.Challenge).add_done_callback(self._step(link, self._challenged))

    def _challenged(self, link: Link, challenge: m.AnyMessage) -> None:
        if not self.is_on:
            raise LinkFailed(NO_SECRET_HERE)
        if not isinstance(challenge, m.Challenge) or challenge.protocol_version != m.PROTOCOL_VERSION:
            raise ProtocolError(f"a challenge of another protocol version than {m.PROTOCOL_VERSION}")
        counter = m.CounterChallenge(secrets.token_bytes(NONCE_BYTES))
        said = _said(challenge, counter)
        link.expect(m.Proof).add_done_callback(self._step(link, partial(self._proved, challenge, said)))
        link.send(counter)

    def _proved(self, challenge: m.Challenge, said: list[bytes], link: Link, proof: m.AnyMessage) -> None:
        if not isinstance(proof, m.Proof) or not self._security.check(proof.mac, _DIALLING, *said):
            raise LinkFailed(WRONG_SECRET)
        check_ids(self._cluster_id, challenge.cluster_id, challenge.expected_cluster_id)
        self._trust(link, challenge, said)
        link.send(m.Proof(self._security.prove(_LISTENING, *said)))

    def _step(self, link: Link, step: Callable[[Link, m.AnyMessage], None]) -> Callable[[Future[m.AnyMessage]], None]:
        def run(future: Future[m.AnyMessage]) -> None:
            if future.exception() is not None:
                return  # the link has ended
            try:
                step(link, future.result())
            except LLMException as error:
                self._refuse(link, error)

        return run

    # -- both

    def _trust(self, link: Link, challenge: m.Challenge, said: list[bytes]) -> None:
        """Before the peer can know that it is trusted."""
        key = self._security.prove(_KEY, *said)
        link.session = Session(key, challenge.cluster_id, challenge.expected_cluster_id)
        link.channel.allow(MAX_HELLO_BYTES)

    def check_hello(self, link: Link, hello: m.Hello) -> None:
        """LinkFailed unless it comes from who has proved itself, where that is asked for."""
        if not self.is_on:
            return
        if link.session is None:
            raise LinkFailed(NO_SECRET_THERE)
        if (hello.cluster_id, hello.expected_cluster_id) != (link.session.dialling_id, link.session.listening_id):
            raise ProtocolError("the hello names other cluster ids than the challenge did")


class OtherCluster(LinkFailed):
    """Another cluster was asked for than the one that answers, which is `cluster_id`."""

    def __init__(self, message: str, cluster_id: int = 0) -> None:
        super().__init__(message, LLMStatusCode.LLM_PARAM_INVALID)
        self.cluster_id = cluster_id


def check_ids(mine: int, theirs: int, expected: int) -> None:
    """LinkFailed unless the dialling end `theirs` expects us, and is not us."""
    if expected != mine:
        raise OtherCluster(f"remote_cluster_id={expected} was asked for, but this is cluster {mine}", mine)
    if theirs == mine:
        raise LinkFailed(f"both ends have cluster_id={mine}; it must be unique", LLMStatusCode.LLM_PARAM_INVALID)


def _said(challenge: m.Challenge, counter: m.AnyMessage) -> list[bytes]:
    """All that was said so far, as parts of a proof. ProtocolError for nonces that are not as long as they must be."""
    nonces = [challenge.nonce, counter.nonce if isinstance(counter, m.CounterChallenge) else b""]
    if any(len(nonce) != NONCE_BYTES for nonce in nonces):
        raise ProtocolError(f"a challenge must have {NONCE_BYTES} bytes")
    numbers = (challenge.protocol_version, challenge.cluster_id, challenge.expected_cluster_id)
    return [*(str(number).encode() for number in numbers), *nonces]
