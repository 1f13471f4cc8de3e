# SPDX-License-Identifier: Apache-2.0
"""Several requests with one ticket (n > 1): one loads, the others wait for it and use this engine's own cache."""

from __future__ import annotations

import copy

from connector.tests.test_scheduler import Output, Request, _blocks, _side, _ticket

NUM_TOKENS = 10
BLOCKS = _blocks([1, 2, 3])


def _family(side, size: int = 3) -> list[Request]:
    params = _ticket(NUM_TOKENS)
    requests = [Request(f"{i}_d", NUM_TOKENS, copy.deepcopy(params)) for i in range(size)]
    for request in requests:
        side.on_new_request(request)
    return requests


def test_followers_wait_for_the_leader_and_then_go_on_alone():
    side = _side()
    leader, *followers = _family(side)
    assert side.num_new_matched_tokens(leader, 0) == (NUM_TOKENS, True)
    for follower in followers:
        assert side.num_new_matched_tokens(follower, 0) == (None, False)
    side.update_state_after_alloc(leader, BLOCKS, NUM_TOKENS)
    assert [side.num_new_matched_tokens(one, 0) for one in followers] == [(None, False)] * 2
    side.update_output(Output(finished_recving={leader.request_id}))
    for follower in followers:
        assert side.num_new_matched_tokens(follower, 8) == (0, False)
        side.update_state_after_alloc(follower, BLOCKS, 0)
    work = side.take_work()
    assert len(work.loads) == 1
    assert len(work.watches) == 1
    assert not work.releases  # the load itself releases P's lease; nobody else may


def test_a_failed_leader_sets_its_followers_free():
    side = _side()
    leader, follower = _family(side, 2)
    side.update_state_after_alloc(leader, BLOCKS, NUM_TOKENS)
    side.update_output(Output(finished_recving={leader.request_id}, failed_recving={leader.request_id}))
    assert side.num_new_matched_tokens(follower, 0) == (0, False)


def test_a_leader_that_leaves_before_its_load_sets_its_followers_free():
    side = _side()
    leader, follower = _family(side, 2)
    side.request_finished(leader.finished("FINISHED_ABORTED"), [[]])
    assert side.num_new_matched_tokens(follower, 0) == (0, False)
    assert len(side.take_work().releases) == 1


def test_a_follower_that_leaves_disturbs_nobody():
    side = _side()
    leader, follower = _family(side, 2)
    side.request_finished(follower.finished("FINISHED_ABORTED"), [[]])
    assert side.num_new_matched_tokens(leader, 0) == (NUM_TOKENS, True)
    assert not side.take_work().releases


def test_a_ticket_that_was_used_up_is_not_used_again():
    side = _side()
    leader, *_ = _family(side, 1)
    params = copy.deepcopy(leader.kv_transfer_params)
    side.update_state_after_alloc(leader, BLOCKS, NUM_TOKENS)
    side.update_output(Output(finished_recving={leader.request_id}))
    side.request_finished(leader.finished(), [[1, 2, 3]])
    late = Request("late", NUM_TOKENS, params)
    side.on_new_request(late)
    assert side.num_new_matched_tokens(late, 0) == (0, False)
