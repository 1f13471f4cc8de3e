# SPDX-License-Identifier: Apache-2.0
"""The older way to link: all members of a communicator call `link` with the same name and the same rank table.

    python -m examples.flows.rank_table

or in three terminals:

    python -m examples.flows.rank_table --role prompt --listen 127.0.0.1:26000
    python -m examples.flows.rank_table --role decoder --cluster-id 2 --connect 127.0.0.1:26000
    python -m examples.flows.rank_table --role decoder --cluster-id 3 --connect 127.0.0.1:26000
"""

from __future__ import annotations

import json
import time

import datadist_core as llm_datadist

from ._ends import PROMPT, End, Failed, fill, free_address, main, pattern
from ._signals import raise_if_signalled

DECODERS = (2, 3)
RANKS = {PROMPT: 0, 2: 1, 3: 2}  # cluster id -> rank
DESC = llm_datadist.CacheDesc(4, [16, 128, 64], llm_datadist.DataType.DT_FLOAT, llm_datadist.Placement.HOST)
MemStatus = llm_datadist.RegisterMemStatus


def rank_table(rank_0: llm_datadist.HostPort) -> str:
    """Where the device of each rank is. All on this host here; else there is one server entry for each host.

    The vendor's tables have no "port": all members compute one from the name and from the cluster id of rank 0, where
    it has to be free. Here it is given, so that several runs on one host do not meet.
    """
    devices: list[dict[str, str]] = [
        {"device_id": str(i), "device_ip": rank_0.host, "rank_id": str(i)} for i in range(3)
    ]
    devices[0]["port"] = str(rank_0.port)
    return json.dumps({"server_count": "1", "server_list": [{"server_id": "0", "device": devices}]})


def wait_until_linked(end: End, datadist: llm_datadist.LLMDataDist, comm_id: int) -> None:
    """PREPARING until all members have called `link`, then OK; or FAILED."""
    while (status := datadist.query_register_mem_status(comm_id)) is MemStatus.PREPARING:
        raise_if_signalled()
        if end.deadline.expired:
            raise Failed("not all members called link in time")
        time.sleep(0.05)
    end.check("status of the communicator", status, MemStatus.OK)


def prompt(end: End) -> None:
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.PROMPT, PROMPT) as prompt:
        prompt.init(end.config().generate_options())
        notes = end.notes(prompt)
        cache = prompt.cache_manager.allocate_blocks_cache(DESC, llm_datadist.BlocksCacheKey(PROMPT))
        fill(cache, pattern(DESC, end.seed))
        address = llm_datadist.HostPort.parse(end.listen)
        if address.port == 0:
            address = free_address()

        comm_id = prompt.link("examples", RANKS, rank_table(address))
        end.say_listens(address)
        wait_until_linked(end, prompt, comm_id)
        for decoder_id in DECODERS:
            notes.tell(decoder_id, "filled")
        for decoder_id in DECODERS:
            notes.wait(decoder_id, "pulled")
        for decoder_id in DECODERS:
            notes.tell(decoder_id, "all have pulled")
        prompt.unlink(comm_id)
        end.say("unlink: the communicator and its links are gone")


def decoder(end: End) -> None:
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.DECODER, end.cluster_id) as decoder:
        decoder.init(end.config().generate_options())
        cache = decoder.cache_manager.allocate_blocks_cache(DESC)
        notes = end.notes(decoder)

        comm_id = decoder.link("examples", RANKS, rank_table(end.connect[0]))
        wait_until_linked(end, decoder, comm_id)
        for cluster_id in RANKS:  # every member is linked with every other one
            if cluster_id != end.cluster_id:
                decoder.check_link_status(cluster_id)
        notes.wait(PROMPT, "filled")
        decoder.cache_manager.pull_blocks(llm_datadist.BlocksCacheKey(PROMPT), cache, [0, 1], [2, 3])
        end.check("blocks 2 and 3", [t[2:4] for t in cache.numpy()], [t[:2] for t in pattern(DESC, end.seed)])
        notes.tell(PROMPT, "pulled")
        notes.wait(PROMPT, "all have pulled")
        decoder.unlink(comm_id)  # the others are told (and warn, if they have not called it yet)


if __name__ == "__main__":
    main(__doc__, __file__, {"prompt": prompt, "decoder": decoder}, ends=["prompt", "decoder", "decoder"])
