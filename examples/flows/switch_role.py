# SPDX-License-Identifier: Apache-2.0
"""Switching roles: the prompt becomes a decoder and the decoder a prompt, without a restart.

This one is written for V1, where roles are enforced and `switch_role` has to be enabled.

    python -m examples.flows.switch_role

or in two terminals (the decoder's address is where it listens once it is a prompt):

    python -m examples.flows.switch_role --role prompt --listen 127.0.0.1:26000
    python -m examples.flows.switch_role --role decoder --connect 127.0.0.1:26000 --listen 127.0.0.1:26001
"""

from __future__ import annotations

import datadist_core as llm_datadist

from ._ends import DECODER, PROMPT, End, Notes, cluster_info, fill, free_address, main, pattern

DESC = llm_datadist.CacheDesc(4, [16, 128, 64], llm_datadist.DataType.DT_FLOAT)
ROLE = llm_datadist.LLMRole
Status = llm_datadist.LLMStatusCode


def config_v1(end: End) -> llm_datadist.LLMConfig:
    config = llm_datadist.LLMConfig()
    config.enable_switch_role = True
    config.transfer_backend = end.backend
    config.sync_kv_timeout = 10_000
    config.ge_options = {"ge.flowGraphMemMaxSize": "67108864"}
    config.link_retry_count = 10  # who links may be a little earlier than who listens
    return config


def prompt(end: End) -> None:
    config = config_v1(end)
    config.listen_ip_info = end.listen
    with llm_datadist.LLMDataDist(ROLE.PROMPT, PROMPT) as datadist:
        datadist.init(config.generate_options())
        notes = end.notes(datadist)
        serve(end, datadist, notes, DECODER, end.seed)
        address = llm_datadist.HostPort.parse(notes.wait(DECODER, "I shall listen at"))
        notes.wait_unlinked(DECODER)

        datadist.switch_role(ROLE.DECODER)  # no address: it stops listening
        end.say("I am a decoder now")
        fetch(end, datadist, notes, DECODER, address, end.seed + 1)
        end.must_succeed("unlink_clusters", datadist.unlink_clusters([cluster_info(DECODER, address)], timeout=5000))


def decoder(end: End) -> None:
    with llm_datadist.LLMDataDist(ROLE.DECODER, DECODER) as datadist:
        datadist.init(config_v1(end).generate_options())
        notes = end.notes(datadist)
        fetch(end, datadist, notes, PROMPT, end.connect[0], end.seed)
        end.check_refused("switch_role while linked", Status.LLM_EXIST_LINK, lambda: datadist.switch_role(ROLE.PROMPT))
        listen = end.listen or str(free_address())
        notes.tell(PROMPT, "I shall listen at", listen)
        end.must_succeed(
            "unlink_clusters", datadist.unlink_clusters([cluster_info(PROMPT, end.connect[0])], timeout=5000)
        )

        datadist.switch_role(ROLE.PROMPT, {"llm.listenIpInfo": listen})
        end.say(f"I am a prompt now, at {listen}")
        serve(end, datadist, notes, PROMPT, end.seed + 1)
        notes.wait_unlinked(PROMPT)


def serve(end: End, datadist: llm_datadist.LLMDataDist, notes: Notes, peer: int, seed: int) -> None:
    """What a prompt does: have a cache, and keep it until it was pulled."""
    manager = datadist.kv_cache_manager
    cache = manager.allocate_blocks_cache(DESC, llm_datadist.BlocksCacheKey(datadist.cluster_id))
    fill(cache, pattern(DESC, seed))
    notes.tell(peer, "filled")
    notes.wait(peer, "pulled")
    manager.deallocate_cache(cache)


def fetch(
    end: End,
    datadist: llm_datadist.LLMDataDist,
    notes: Notes,
    peer: int,
    address: llm_datadist.HostPort,
    seed: int,
) -> None:
    """What a decoder does: link, and pull."""
    manager = datadist.kv_cache_manager
    cache = manager.allocate_blocks_cache(DESC)
    end.must_succeed("link_clusters", datadist.link_clusters([cluster_info(peer, address)], timeout=10_000))
    notes.wait(peer, "filled")
    manager.pull_blocks(llm_datadist.BlocksCacheKey(peer), cache, [0, 1], [2, 3])
    end.check(
        f"blocks 2 and 3 from cluster {peer}", [t[2:4] for t in cache.numpy()], [t[:2] for t in pattern(DESC, seed)]
    )
    notes.tell(peer, "pulled")
    manager.deallocate_cache(cache)


if __name__ == "__main__":
    main(__doc__, __file__, {"prompt": prompt, "decoder": decoder})
