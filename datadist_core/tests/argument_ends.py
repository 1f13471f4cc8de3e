# SPDX-License-Identifier: Apache-2.0
"""Rows for LLMDataDist: its arguments, its statuses, and its life."""

from __future__ import annotations

import json
from dataclasses import replace

from datadist_core import LLMClusterInfo, LLMDataDist, LLMRole, LLMStatusCode
from datadist_core.tests.argument_rows import (
    INVALID,
    NOT_BOOL,
    NOT_CALLABLE,
    NOT_DICT,
    NOT_INT,
    NOT_LINKED,
    NOT_LIST,
    NOT_OURS,
    NOT_STR,
    Callee,
    Fault,
    Row,
    Where,
    flat,
    statuses_raised,
)
from datadist_core.tests.argument_world import STRANGER, World
from datadist_core.tests.core_ends import cluster_info, config, remote_info

UINT64_END = 2**64
NO_COMMUNICATOR = 2**40
S = LLMStatusCode


def _lone_info(w: World) -> list[LLMClusterInfo]:
    return [cluster_info(w.lone)]


def rank_table(ranks: tuple[object, ...] = ("0", "1"), ip: object = "127.0.0.1") -> str:
    devices = [{"device_id": "0", "device_ip": ip, "rank_id": rank} for rank in ranks]
    return json.dumps({"server_list": [{"device": devices}]})


def _communicator(w: World) -> dict[str, object]:
    ranks = {w.lone.cluster_id: 0, STRANGER: 1}
    return {"comm_name": "rows", "cluster_rank_info": ranks, "rank_table": rank_table()}


CONSTRUCTOR = Callee("LLMDataDist", lambda w: LLMDataDist, lambda w: {"role": LLMRole.MIX, "cluster_id": 1})
INIT = Callee("LLMDataDist.init", lambda w: w.decoder.init, lambda w: {"options": config()})
LINK_CLUSTERS = Callee(
    "LLMDataDist.link_clusters",
    lambda w: w.decoder.link_clusters,
    lambda w: {"clusters": _lone_info(w), "timeout": 5000},
)
UNLINK_CLUSTERS = Callee(
    "LLMDataDist.unlink_clusters",
    lambda w: w.decoder.unlink_clusters,
    lambda w: {"clusters": [w.prompt_info()], "timeout": 5000, "force": False},
)
CHECK_LINK = Callee(
    "LLMDataDist.check_link_status",
    lambda w: w.decoder.check_link_status,
    lambda w: {"remote_cluster_id": w.prompt.cluster_id},
)
SWITCH_ROLE = Callee(
    "LLMDataDist.switch_role",
    lambda w: w.lone.switch_role,
    lambda w: {"role": LLMRole.DECODER, "switch_options": {"llm.listenIpInfo": "127.0.0.1:0"}},
)
LINK = Callee("LLMDataDist.link", lambda w: w.lone.link, _communicator)
UNLINK = Callee("LLMDataDist.unlink", lambda w: w.lone.unlink, lambda w: {"comm_id": NO_COMMUNICATOR})
QUERY = Callee(
    "LLMDataDist.query_register_mem_status",
    lambda w: w.lone.query_register_mem_status,
    lambda w: {"comm_id": NO_COMMUNICATOR},
)
LINK_FAILURE = Callee(
    "LLMDataDist.link_failure", lambda w: w.decoder.link_failure, lambda w: {"remote_cluster_id": w.prompt.cluster_id}
)
LINK_INFO = Callee(
    "LLMDataDist.link_info", lambda w: w.decoder.link_info, lambda w: {"remote_cluster_id": w.prompt.cluster_id}
)
LINK_ID = Callee(
    "LLMDataDist.link_id", lambda w: w.decoder.link_id, lambda w: {"remote_cluster_id": w.prompt.cluster_id}
)
REGISTER_SERVICE = Callee(
    "LLMDataDist.register_service", lambda w: w.prompt.register_service, lambda w: {"name": "other", "handler": len}
)
CALL = Callee(
    "LLMDataDist.call",
    lambda w: w.decoder.call,
    lambda w: {"remote_cluster_id": w.prompt.cluster_id, "name": "echo", "body": b"x", "timeout_s": 30.0},
)
FIND_CLUSTER = Callee(
    "LLMDataDist.find_cluster",
    lambda w: w.decoder.find_cluster,
    lambda w: {"host": "127.0.0.1", "port": w.lone.listen_address.port, "timeout_s": 30.0},
)
WAIT_FENCED = Callee(
    "LLMDataDist.wait_fenced",
    lambda w: w.decoder.wait_fenced,
    lambda w: {"remote_cluster_id": STRANGER, "timeout_s": 0},
)
ON_LINK_LOST = Callee("LLMDataDist.on_link_lost", lambda w: w.decoder.on_link_lost, lambda w: {"callback": print})
GETTERS = [
    Callee(f"LLMDataDist.{name}", lambda w, name=name: lambda: getattr(w.decoder, name), lambda w: {})
    for name in ("cache_manager", "kv_cache_manager", "listen_address")
]
#: All that need init and end with finalize.
ENDS = [
    LINK_CLUSTERS, UNLINK_CLUSTERS, CHECK_LINK, SWITCH_ROLE, LINK, UNLINK, QUERY, LINK_FAILURE, LINK_INFO, LINK_ID,
    REGISTER_SERVICE, CALL, FIND_CLUSTER, WAIT_FENCED, ON_LINK_LOST, *GETTERS,
]  # fmt: skip


def end_rows() -> list[Row]:
    return flat(
        _construction(),
        _init(),
        _cluster_list_rows(LINK_CLUSTERS),
        _cluster_list_rows(UNLINK_CLUSTERS),
        _statuses(),
        UNLINK_CLUSTERS.type_rows("force", *NOT_BOOL, None),
        *(_cluster_id_rows(one) for one in (CHECK_LINK, LINK_FAILURE, LINK_INFO, LINK_ID, CALL, WAIT_FENCED)),
        *(one.type_rows("timeout_s", "1", True, [1], None) for one in (FIND_CLUSTER, WAIT_FENCED)),
        *(one.refused("timeout_s", Fault.RANGE, value) for one in (FIND_CLUSTER, WAIT_FENCED)
          for value in (-1, -0.5, float("nan"))),
        FIND_CLUSTER.refused("timeout_s", Fault.RANGE, 0),
        FIND_CLUSTER.type_rows("host", *NOT_STR, None),
        [FIND_CLUSTER.refused("host", Fault.RANGE, value) for value in ("", "1.2.3", "a b", "127.0.0.1:80")],
        FIND_CLUSTER.type_rows("port", *NOT_INT, None),
        [FIND_CLUSTER.range_row("port", value) for value in (0, -1, 65536)],
        *(one.refused("remote_cluster_id", Fault.UNLINKED, STRANGER, str(STRANGER), NOT_LINKED)
          for one in (CHECK_LINK, LINK_INFO, CALL)),
        _switch_role(),
        _communicators(),
        _extensions(),
        _life(),
    )  # fmt: skip


def _construction() -> list[Row]:
    return flat(
        CONSTRUCTOR.type_rows("role", *NOT_OURS, 1, "PROMPT", None),
        CONSTRUCTOR.type_rows("cluster_id", *NOT_INT, None),
        [CONSTRUCTOR.range_row("cluster_id", value) for value in (-1, UINT64_END)],
    )


def _init() -> list[Row]:
    return flat(
        INIT.type_rows("options", *NOT_DICT, {1: "a"}, {"llm.LinkRetryCount": 1}, {"a": None}, None),
        INIT.refused("options", Fault.CONTENT, {"llm.LinkRetryCount": "x"}, "llm.LinkRetryCount='x'"),
        INIT.refused("options", Fault.CONTENT, {"llm.MemPoolConfig": "{"}, "llm.MemPoolConfig"),
    )


def _cluster_list_rows(callee: Callee) -> list[Row]:
    no_id = LLMClusterInfo()
    no_id.append_remote_ip_info("127.0.0.1", 1)
    return flat(
        callee.type_rows("clusters", *NOT_LIST, no_id, [5], [None], None),
        callee.refused("clusters", Fault.LENGTH, []),
        callee.refused("clusters", Fault.CONTENT, [no_id], "remote_cluster_id"),
        callee.type_rows("timeout", *NOT_INT, None),
        [callee.refused("timeout", Fault.RANGE, value) for value in (0, -1)],
    )


def _statuses() -> list[Row]:
    """Bad clusters get a status each; the call itself does not raise."""
    link = replace(LINK_CLUSTERS, bind=lambda w: lambda **given: statuses_raised(w.decoder.link_clusters(**given)))
    unlink = replace(
        UNLINK_CLUSTERS, bind=lambda w: lambda **given: statuses_raised(w.decoder.unlink_clusters(**given))
    )
    no_address = LLMClusterInfo()
    no_address.remote_cluster_id = STRANGER
    stranger = [remote_info(STRANGER, "127.0.0.1", 1)]
    return flat(
        *(_status_rows(replace(one, where=where), stranger) for where in (Where.V2, Where.V1) for one in (link,)),
        LINK_CLUSTERS.refused("clusters", Fault.CONTENT, [no_address], r"clusters\[0\]"),
        unlink.refused("clusters", Fault.UNLINKED, stranger, "NOT_YET_LINK", NOT_LINKED),
        replace(
            LINK_CLUSTERS, bind=lambda w: w.prompt.link_clusters, where=Where.V1
        ).state_row(Fault.ROLE, INVALID, "DECODER"),
    )  # fmt: skip


def _status_rows(link: Callee, stranger: list[LLMClusterInfo]) -> list[Row]:
    linked = lambda w: [w.prompt_info()]  # noqa: E731
    wrong_id = lambda w: [remote_info(STRANGER, "127.0.0.1", w.lone.listen_address.port)]  # noqa: E731
    return [
        link.refused("clusters", Fault.STATE, linked, "ALREADY_LINK", S.LLM_ALREADY_LINK),
        link.refused("clusters", Fault.UNLINKED, stranger, "LINK_FAILED", S.LLM_LINK_FAILED),
        link.refused("clusters", Fault.CONTENT, wrong_id, "PARAM_INVALID"),
    ]


def _cluster_id_rows(callee: Callee) -> list[Row]:
    return flat(callee.type_rows("remote_cluster_id", *NOT_INT, None))


def _switch_role() -> list[Row]:
    linked = replace(SWITCH_ROLE, bind=lambda w: w.decoder.switch_role)
    bad = [{key: text} for key in ("llm.listenIpInfo", "listen_ip_info") for text in ("", "nohost", "h:99999")]
    return flat(
        SWITCH_ROLE.type_rows("role", *NOT_OURS, 1, None),
        SWITCH_ROLE.type_rows("switch_options", *NOT_DICT, {"llm.listenIpInfo": 5}, {"llm.listenIpInfo": None}),
        [SWITCH_ROLE.refused("switch_options", Fault.CONTENT, value) for value in bad],
        linked.state_row(Fault.STATE, S.LLM_EXIST_LINK, "link"),
        replace(SWITCH_ROLE, where=Where.V1).state_row(
            Fault.STATE, S.LLM_FEATURE_NOT_ENABLED, "enable_switch_role"
        ),
    )  # fmt: skip


def _communicators() -> list[Row]:
    many = lambda w: {w.lone.cluster_id: 0} | {STRANGER + i: i for i in range(1, 5)}  # noqa: E731
    ranks = {
        Fault.LENGTH: ({}, lambda w: {w.lone.cluster_id: 0}, many),
        Fault.CONTENT: (
            {STRANGER: 0, STRANGER + 1: 1},
            lambda w: {w.lone.cluster_id: 1, STRANGER: 0},
            lambda w: {w.lone.cluster_id: 0, STRANGER: 0},
            lambda w: {w.lone.cluster_id: 0, -1: 1},
            lambda w: {w.lone.cluster_id: -1, STRANGER: 0},
            lambda w: {w.lone.cluster_id: 0, UINT64_END: 1},
        ),
    }
    tables = ("", "x", "5", "[]", "{}", '{"server_list": []}', '{"server_list": [{}]}', rank_table(("0",)),
              rank_table(("0", "x")), rank_table(("0", "0")), rank_table(ip="x"), rank_table(ip=None))  # fmt: skip
    no_rank = lambda w: {w.lone.cluster_id: 0, STRANGER: True}  # noqa: E731
    return flat(
        LINK.type_rows("comm_name", *NOT_STR, None),
        [LINK.refused("comm_name", Fault.LENGTH, name) for name in ("", "x" * 128)],
        LINK.type_rows("cluster_rank_info", *NOT_DICT, {"1": 0}, {True: 1}, no_rank, None),
        [LINK.refused("cluster_rank_info", fault, value) for fault, values in ranks.items() for value in values],
        LINK.type_rows("rank_table", 5, b"{}", {}, True, None),
        [LINK.refused("rank_table", Fault.CONTENT, table) for table in tables],
        *(one.type_rows("comm_id", *NOT_INT, None) for one in (UNLINK, QUERY)),
        *(
            one.refused("comm_id", Fault.UNKNOWN, value)
            for one in (UNLINK, QUERY)
            for value in (NO_COMMUNICATOR, 0, -1)
        ),
    )


def _extensions() -> list[Row]:
    return flat(
        REGISTER_SERVICE.type_rows("name", *NOT_STR, None),
        REGISTER_SERVICE.refused("name", Fault.CONTENT, "datadist_core.x"),
        REGISTER_SERVICE.type_rows("handler", *NOT_CALLABLE, None),
        CALL.type_rows("name", *NOT_STR, None),
        CALL.refused("name", Fault.UNKNOWN, "nosuch", "'nosuch'"),
        CALL.type_rows("body", "x", 5, True, None),
        CALL.type_rows("timeout_s", "1", True, None),
        [CALL.refused("timeout_s", Fault.RANGE, value, "time", S.LLM_TIMEOUT) for value in (0, -1)],
        ON_LINK_LOST.type_rows("callback", *NOT_CALLABLE, None),
    )


def _life() -> list[Row]:
    """V1 and V2 have one manager each, and everything has its time."""
    v2_getter, v1_getter, _ = GETTERS
    never_init = replace(INIT, where=Where.ENDED)
    return flat(
        v1_getter.state_row(Fault.STATE, S.LLM_FEATURE_NOT_ENABLED, "kv_cache_manager"),
        replace(v2_getter, where=Where.V1).state_row(Fault.STATE, S.LLM_FEATURE_NOT_ENABLED, "enable_cache_manager"),
        [one.state_row(Fault.NOT_INIT, None, "init", Where.FRESH) for one in ENDS],
        [one.state_row(Fault.FINALIZED, S.LLM_ENGINE_FINALIZED, "finalize", Where.ENDED) for one in ENDS],
        never_init.state_row(Fault.FINALIZED, S.LLM_ENGINE_FINALIZED, "finalize"),
    )
