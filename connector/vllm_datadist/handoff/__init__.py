# SPDX-License-Identifier: Apache-2.0
"""The protocol of a hand-off, as state machines: no threads, no sockets, no clock but the one handed in.

Who takes part. P has prefilled a prompt; D goes on from there. Each has one scheduler and one or more workers.

    P's scheduler   keeps the request's blocks (vLLM frees them when every worker has reported the lease's end) and
                    gives out the ticket: which lease, which blocks, which workers
    P's worker      `lease`     UNOPENED -> OPEN -> RELEASED | EXPIRED
    D's scheduler   `request`   QUEUED -> LOADING -> SETTLED -> GONE        (aborted while LOADING: ABANDONED)
    D's worker      `renewal`   RESTING <-> ASKING, until ENDED             keeps the lease alive meanwhile
                    `load`      QUEUED -> LINKING -> READING -> CONFIRMING -> ENDED     (trouble: PAUSED, once)
    both workers    `desk`      passes a step's work on to these, and their ends back to vLLM

Each file holds its machine as a table (state, event) -> (next state, what to do); what is not in the table is not
allowed. A machine is fed events and returns what to do; who does it, in which thread and on which clock, is the
driver's affair. The drivers are `worker.saves`, `worker.loads` and `worker.renewals` (threads, the real clock) and
the simulation in connector/tests/simulation (no threads, virtual time), which runs the same machines.

Why it is safe, although P takes no part in the read:

1. P's blocks are D's to read as long as the lease is OPEN. vLLM at P keeps them from before the ticket is given until
   all workers have reported the end, and a lease that has ended is never opened again. Each lease ends by its own
   clock: one that is renewed does not shield the others.
2. D reads first and asks afterwards. The release after the read, answered HELD, proves that the lease had not ended
   until then, so that every byte was read in time. To wait for a renewal before the read would prove nothing more,
   and cost a round trip. Any other answer fails the load, whatever the bytes look like. D may be so fast that P's
   step has not opened the lease yet: P lets the call wait for a while, then answers UNKNOWN, and D asks again.
3. HELD belongs to one reader. A release that is repeated (its answer was lost) gets HELD again only if the same
   attempt of the same worker of the same engine asks; another reader, such as a second D that a router gave the same
   ticket, is told RELEASED: P's blocks were free while it read, for all P knows.
4. If the link breaks during the read, the read may be repeated over a fresh link: nothing has been released. If it
   breaks after the read, only the release is repeated, never the read.
5. D's blocks are vLLM's to give away only when the load is reported. It is reported exactly once, and not before the
   read has ended, however the load ends: a cancelled load too waits for its read.
6. Everything is named by (request id, attempt), at P together with the worker's cluster id, which is new with every
   start. So the messages of an earlier attempt, or for an engine that has been restarted, find nothing. What is not
   known, or known to be over, is answered or dropped, and is never an error of the one who hears it.
7. Every state is left in bounded time, whatever the other side does. At P the lease's own time is the bound, and a
   lease that is renewed and renewed ends all the same: two engines that hand off to each other, each with its blocks
   held for the other's queue, would else wait for ever. At D a load has one deadline for all its states, and nothing
   waits for the peer without one.
8. Whoever needs nothing (any more) says so: P then frees its blocks at once. If that message is lost, 7. holds.

The roles are the strategy of a pull: P is read. For a push, P would run the `load` of its own side and D the `lease`
of the blocks it offers; the tables do not name the direction of the bytes.
"""
