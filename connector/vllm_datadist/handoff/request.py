# SPDX-License-Identifier: Apache-2.0
"""One request that came to D with a ticket, as D's scheduler sees it. It has all its time from vLLM's own steps.

A ticket is good for one load. Of several requests with the same one (n > 1) the first is the leader; the others follow
it: they wait for its load and then have nothing to load, and its WATCH and RELEASE are not theirs to tell.
"""

from __future__ import annotations

from enum import Enum

from .table import Table


class RequestState(Enum):
    """ABANDONED: vLLM has finished it, and keeps its blocks until the load's end is reported.

    SETTLED, GONE: by what the workers report. vLLM may hear of it later: see `scheduler.settling`.
    """

    NEW = "new"
    QUEUED = "queued"
    LOADING = "loading"
    SETTLED = "settled"
    ABANDONED = "abandoned"
    GONE = "gone"


class RequestEvent(Enum):
    ACCEPTED = "ticket accepted"
    REFUSED = "ticket refused"
    REPLACED = "the same id came again"
    LOAD = "blocks for a load"
    NO_LOAD = "blocks, nothing to load"
    LOAD_ENDED = "load ended"
    FINISHED = "finished"


class Tell(Enum):
    """What the workers are told."""

    WATCH = "keep P's lease alive"
    LOAD = "load"
    RELEASE = "nothing is needed from P"
    END = "the request is gone"


_S, _E, _T = RequestState, RequestEvent, Tell

#: (state, event) -> (next state, what to tell the workers).
REQUEST_TABLE: Table[RequestState, RequestEvent, tuple[Tell, ...]] = Table(
    "request",
    {
        (_S.NEW, _E.ACCEPTED): (_S.QUEUED, (_T.WATCH,)),
        (_S.NEW, _E.REFUSED): (_S.SETTLED, (_T.RELEASE,)),
        (_S.QUEUED, _E.LOAD): (_S.LOADING, (_T.LOAD,)),
        (_S.QUEUED, _E.NO_LOAD): (_S.SETTLED, (_T.RELEASE,)),
        (_S.QUEUED, _E.FINISHED): (_S.GONE, (_T.END, _T.RELEASE)),
        (_S.QUEUED, _E.REPLACED): (_S.GONE, (_T.END,)),
        (_S.LOADING, _E.LOAD_ENDED): (_S.SETTLED, ()),
        (_S.LOADING, _E.FINISHED): (_S.ABANDONED, (_T.END,)),
        (_S.LOADING, _E.REPLACED): (_S.GONE, (_T.END,)),
        (_S.ABANDONED, _E.LOAD_ENDED): (_S.GONE, ()),
        (_S.ABANDONED, _E.FINISHED): (_S.ABANDONED, ()),
        (_S.ABANDONED, _E.REPLACED): (_S.GONE, (_T.END,)),
        (_S.SETTLED, _E.FINISHED): (_S.GONE, (_T.END,)),
        (_S.SETTLED, _E.REPLACED): (_S.GONE, (_T.END,)),
    },
)
