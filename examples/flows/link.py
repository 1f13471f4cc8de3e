# SPDX-License-Identifier: Apache-2.0
"""Links: make one, check it, end it; a decoder that crashes and comes again; ending a link by force.

    python -m examples.flows.link

or in two terminals:

    python -m examples.flows.link --role prompt --listen 127.0.0.1:26000
    python -m examples.flows.link --role decoder --connect 127.0.0.1:26000
"""

from __future__ import annotations

import os
import queue
import signal

import datadist_core as llm_datadist

from ._ends import DECODER, PROMPT, End, cluster_info, main

NOBODY = 99
Status = llm_datadist.LLMStatusCode


def prompt(end: End) -> None:
    config = end.config()
    config.listen_ip_info = end.listen
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.PROMPT, PROMPT) as prompt:
        prompt.init(config.generate_options())
        notes = end.notes(prompt)
        losses: queue.Queue[llm_datadist.LLMException] = queue.Queue()
        prompt.on_link_lost(lambda cluster_id, error: losses.put(error))
        the_decoder = llm_datadist.LLMClusterInfo()
        the_decoder.remote_cluster_id = DECODER

        # The decoder links, unlinks in order, and links again.
        notes.tell(DECODER, "hello")
        notes.wait(DECODER, "about to crash", may_leave=True)
        end.say(f"noticed: {losses.get(timeout=end.deadline.remaining_s())}")
        end.say("a script for llm_datadist would call unlink_clusters now; here it may, but need not")
        notes.tell(DECODER, "welcome back")
        end.check("one link was lost; the other was ended in order", losses.empty(), True)

        notes.wait(DECODER, "now by force")
        end.must_succeed("unlink_clusters by force", prompt.unlink_clusters([the_decoder], timeout=3000, force=True))
        notes.tell(DECODER, "linked once more")
        notes.wait_unlinked(DECODER)


def decoder(end: End) -> None:
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.DECODER, DECODER) as decoder:
        decoder.init(end.config().generate_options())
        the_prompt = cluster_info(PROMPT, end.connect[0])
        notes = end.notes(decoder)

        # Clusters are linked at the same time, with one status each. One that fails does not disturb the others.
        nobody = cluster_info(NOBODY, llm_datadist.HostPort("127.0.0.1", 1))
        overall, each = decoder.link_clusters([the_prompt, nobody], timeout=5000)
        end.check("statuses of a cluster that is there and one that is not", each, [Status.LLM_SUCCESS, overall])
        end.say(f"link_clusters: {overall.name} because of cluster {NOBODY}: {decoder.link_failure(NOBODY)}")
        overall, _ = decoder.link_clusters([the_prompt], timeout=5000)
        end.check("linking again", overall, Status.LLM_ALREADY_LINK)
        decoder.check_link_status(PROMPT)
        end.say(f"check_link_status is content; the link uses {decoder.link_info(PROMPT).backend}")
        notes.wait(PROMPT, "hello")
        end.must_succeed("unlink_clusters", decoder.unlink_clusters([the_prompt], timeout=5000))
        end.check_refused(
            "check_link_status without a link", Status.LLM_NOT_YET_LINK, lambda: decoder.check_link_status(PROMPT)
        )

        end.check("exit status of a decoder that crashes", end.run_role("crash"), -signal.SIGKILL)
        end.must_succeed("link_clusters with the same cluster id", decoder.link_clusters([the_prompt], timeout=5000))
        decoder.check_link_status(PROMPT)
        notes.wait(PROMPT, "welcome back")

        # By force, no end waits for the other, so both call it. Here this end has noticed by itself before it does.
        notes.tell(PROMPT, "now by force")
        notes.wait_unlinked(PROMPT)
        overall, _ = decoder.unlink_clusters([the_prompt], timeout=3000, force=True)
        end.check("unlink_clusters by force when the other end did it before", overall, Status.LLM_NOT_YET_LINK)
        end.must_succeed("link_clusters after that", decoder.link_clusters([the_prompt], timeout=5000))
        decoder.check_link_status(PROMPT)
        notes.wait(PROMPT, "linked once more")
        end.must_succeed("unlink_clusters", decoder.unlink_clusters([the_prompt], timeout=5000))


def crash(end: End) -> None:
    """A decoder, the same cluster id, that links and dies without a word."""
    decoder = llm_datadist.LLMDataDist(llm_datadist.LLMRole.DECODER, DECODER)
    decoder.init(end.config().generate_options())
    the_prompt = cluster_info(PROMPT, end.connect[0])
    end.must_succeed("link_clusters", decoder.link_clusters([the_prompt], timeout=5000))
    end.notes(decoder).tell(PROMPT, "about to crash")
    end.say("SIGKILL to myself")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(__doc__, __file__, {"prompt": prompt, "decoder": decoder, "crash": crash})
