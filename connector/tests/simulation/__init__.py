# SPDX-License-Identifier: Apache-2.0
"""A deterministic simulation of hand-offs: the real protocol code on virtual time, in thousands of random schedules.

    python -m connector.tests.simulation --schedules 100000 --jobs 4     many schedules, seeds 0, 1, 2, ...
    python -m connector.tests.simulation --seed 4711                     one of them again, with its trace

Real: `SchedulerSide` with its tables; of each worker `StepDesk`, `Leases`, `RenewalTable`, `LoadMachine`,
`OfferMachine` and `PartTable`, `PushTable` with its `PushMachine`s. Modelled: vLLM's scheduler and block pool
(`engine`), the threads that drive the machines (`loader`, `offers`, `pusher`, `renewals`), links, calls and one-sided
reads and writes (`network`), clients and a router (`schedule`). Engines have 1, 2 or 4 workers, and every block the KV
cache of the heads that its worker holds. Everything random comes from the seed: delays, lost calls and answers, cut
links whose ends notice it at different times, clocks that drift and jump forward, engines that stand still for a while,
processes that are stopped and go on with what they were at, die and start again, aborts and preemptions at any moment,
requests of a push in any order at P and D, tickets that come late, twice, or never.

The invariants, by the name that a violation has:

    blocks    no block is freed or given away while anyone may still write it (D), or while it is under lease (P)
    reserved  P never writes into a block of D that is not reserved, at that time, for the very offer it writes for
    position  nor for tokens that D had before
    source    P never sends from blocks that it has given back, nor tokens that no step has computed; but what a request
              that has lost its blocks was just sending is void, and may be anything
    complete  D never uses a pushed token that was not written, by a send that was not void
    lease     D never uses what it read unless the lease was in force until the read had ended. The simulator keeps its
              own account of every lease, and does not ask the code
    tags      each token of KV cache is tagged with whose it is: nobody ever computes with another's
    ends      every request ends in bounded time
    leak      when all is quiet, every block is back and every table is empty
    unknown   vLLM is never told the end of what it does not know, or twice
    fatal     no exception leaves the code
    calm      where nothing went wrong, no lease was left to its time and no load or push failed; but for a push that
              was asked for once more after an abort, which may come when P has let go, or before it has. Asked for
              again in the very step of the abort it is served (`retries`)
"""
