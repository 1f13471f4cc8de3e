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
                    `parts`     one job at several workers of P

Each file holds its machine as a table (state, event) -> (next state, what to do); what is not in the table is not
allowed. A machine is fed events and returns what to do; who does it, in which thread and on which clock, is the
driver's affair. The drivers are `worker.saves`, `worker.loads`, `worker.renewals`, `worker.offers` and
`worker.pushes` (threads, the real clock) and the simulation in connector/tests/simulation (no threads, virtual time),
which runs the same machines.

Pull: D reads P's blocks. Why it is safe, although P takes no part in the read:

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
8. Whoever needs nothing (any more) says so: P then frees its blocks at once. It says so again while P answers UNKNOWN
   (not opened yet), for as long as a lease lasts. If that message is lost, 7. holds.

Several parts. P and D may have different numbers of workers, so a worker of D may read from several of P, and a worker
of P may be read by several of D:

9.  A lease at a worker of P ends when all its readers have released it, each of whom says how many there are; all are
    workers of one request of D, the first that released. HELD proves what 2. says for the reader that hears it, and
    for it alone. Workers of P that nobody reads are released by D as well, else vLLM at P would wait for their time.
10. A job of D's worker has one part per worker of P (`parts`). It is reported once, when all of them have ended; one
    that fails cancels the others, and none is left reading or being written when vLLM has its blocks back.

Push: P writes into blocks that D has reserved, while it prefills. Each worker of D offers its blocks to each worker of
P that it needs (`offer`), before, while or after P computes them; P's worker keeps the offers and sends what it has
computed (`push`, `pushes`).

    D's worker      `offer`     QUEUED -> LINKING -> OFFERING -> AWAITING <-> ASKING -> ENDED
    P's worker      `push`      WAITING -> ASKING -> READY <-> SENDING -> TELLING -> ENDED

11. Nothing is written that is not granted. Before its first write for an offer P asks D whether the offer stands, and D
    answers by what it knows then. So an offer that has not been granted can be dropped at any time, on D's side alone:
    whatever P has heard of it, and however late, it will ask in vain. No list at P has to remember what is over.
12. After the grant the blocks are P's, until P's final word about this offer, or the fence. A final word (done, failed,
    withdrawn, or: not known) is said only when no write for it is under way, and none is begun after it. The fence is
    the core's knowledge that no former link of ours to that worker can be written over by it: its end of each is
    closed, or its process is gone. Nothing is granted over a link made since: D drops an offer's link before it asks
    for the fence, and says yes only while the link that the offer was made over is up. A link that breaks, a deadline,
    an aborted request are neither: D withdraws and waits for the answer, or waits for the fence, and nothing else ends
    a granted offer.
13. A grant is worth something over one link only: the one that P had to D when it asked, which P notes before. Every
    send of that push names it, and fails over any other. So it does no harm if P hears late that a link was lost.
14. An offer that is made again has another number, and all that P still does or says under the old one finds nothing.
    It is made again only when the old one was not granted, or is fenced.
15. D uses what was pushed only after "done", and P says so only when the sends for all tokens of the offer have ended
    well, each of tokens that a step of the engine had been given to compute, from blocks that the request had, or that
    are kept for it (`scheduler.pins`), from the send's begin to its end. A request that loses its blocks (preempted,
    aborted) makes the send that is under way void: it is waited for and not counted, and all is sent again, or nothing
    more. "Done" to an offer that was never granted is not believed.
16. Tokens are paired by position: an offer names the tokens it lacks, and where each block of theirs lies. Whatever D
    has cached is not touched.
17. P's blocks, once the request has ended, are under a lease as in 1. Each worker of D that is served, or says that it
    needs nothing, is one of its readers, also if it says so before the lease is open; a send pins the lease, so that
    its blocks come back only after it. A request of D that queues has announced its offer: until that comes P keeps
    the lease alive for it, and another's word does not end it. The prompt's digest and length have to be the same at
    both, or P refuses.
18. Every state has an end: an offer its deadline, at D and at P, a question the time of a call, a send its own limit.
    Only the fence may take as long as a stopped process is stopped. If vLLM fails requests whose load failed, it is
    told of the failure at the deadline all the same, and keeps the blocks until the fence (`scheduler.settling`); if it
    computes them anew, in these very blocks, it is told after the fence.
19. A transfer is one request's of D at a time; what another offers waits for its turn at P (`push_turns`) until all
    offers of the one before have ended, and is refused if that takes too long. What D says of two requests arrives in
    any order, so P cannot tell one that takes another's place from one that a router has sent twice. It need not:
    whether an offer is still wanted D says when it is asked whether it stands (11.), and nothing of a new one is sent
    while anything of an old one is under way. Who lets go names the request that the transfer is for now, if D knows
    one (`offer_heirs`), so that P keeps what that one comes for. So a request that is given up and asked for again in
    the same step is served; unless P has just sent the first one everything, and has let go by itself.
"""
