# SPDX-License-Identifier: Apache-2.0
"""A deterministic simulation of hand-offs: the real protocol code on virtual time, in thousands of random schedules.

    python -m connector.tests.simulation --schedules 100000 --jobs 4     many schedules, seeds 0, 1, 2, ...
    python -m connector.tests.simulation --seed 4711                     one of them again, with its trace

Real: `SchedulerSide` with `HandoffTable` and `HoldTable`; of each worker `StepDesk`, `Leases`, `LoadMachine`,
`LoadTable`, `RenewalTable`. Modelled: vLLM's scheduler and block pool (`engine`), the threads that drive the machines
(`worker`), links, calls and one-sided reads (`network`), clients and a router (`schedule`). Everything random comes
from the seed: delays, lost calls and answers, cut links, clocks that drift and jump forward, engines that stop for a
while, die and start again, aborts at any moment, tickets that come late, twice, or never.

The invariants, by the name that a violation has:

    blocks    no block is freed or given away while anyone may still write it (D), or while it is under lease (P)
    lease     D never uses what it read unless the lease was in force until the read had ended. The simulator keeps its
              own account of every lease, and does not ask the code
    tags      each token of KV cache is tagged with whose it is: nobody ever computes with another's
    ends      every request ends in bounded time
    leak      when all is quiet, every block is back and every table is empty
    unknown   vLLM is never told the end of what it does not know, or twice
    fatal     no exception leaves the code
    calm      where nothing went wrong, no lease was left to its time and no load failed
"""
