"""The schedules that a mutant must survive: the fused kernels at W = 3, in calls that differ in what they leave out.

    copies    the same calls, the rows of one rank, of none, of all carried by copies beside the kernel
    calls     three calls on one workspace; uneven shards, one empty in the second call, tails in every direction
    none      a call without any row between two others
    idle      rank 0 has no columns of its own and so reads nothing of its peers
    tma       one of the calls, its operands by TMA where no peer writes them
    two       the calls, with two programs of a rank that send and two others
    wrap      the calls with a number that wraps from 2**31 - 1 to -2**31
    other     rank 1 is in another call, with less to send: every rank must notice and none may wait in vain; once in
              a call of which rank 1 would have no rows
    late      rank 2 alone: rank 1 is in another call and rank 0 is not there yet; it must notice without waiting for 0
    mixed     a fused call, a gather by copies and its two meetings in either slot, a fused call
    nothing   the same with two ranks and no rows: only arrivals are exchanged; by either transport
    local     the plain matmul, by pointers and by descriptors
    grouped   the matmuls of ragged groups, with tiles stored whole and by halves
    elementwise  RMSNorm, SwiGLU, rotary embedding and cross-entropy, one rank
    meetings  a copy to the own slot, a meeting, copies from the peers' slots, a meeting; and again
    strangers a meeting with a rank that is in another call

In `other` what ranks read is garbage by design, see Note [A failed call] in kernels/signals.py, so races are not looked
for there. A failed rank sends nothing more, and what waits for it then would wait for its timeout; so in `other` and
`nothing` one program of a rank is resident: it has signalled its arrival before another sees anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fusedtp.checks.cases import fused_case
from fusedtp.checks.dense import DECLARED, Call
from fusedtp.checks.experts import OPERATIONS as EXCHANGED
from fusedtp.checks.lint import ELEMENTWISE, GROUPED, LOCAL
from fusedtp.ops.rows import split
from fusedtp.sim.case import Case
from fusedtp.sim.explore import Schedule
from fusedtp.sim.strategies import DEFAULT

from .elementwise_cases import elementwise
from .grouped_cases import grouped_case
from .local_cases import local
from .trial_cases import (
    WORLD,
    beside_copies,
    by_tma,
    calls,
    idle,
    late,
    meetings,
    mixed,
    no_rows,
    none_between,
    other_call,
    strangers,
    wrapping,
)

OPERATIONS = {
    **{kernel.function: name for name, (_, kernel) in DECLARED.items()},
    "moe_dispatch_kernel": "moe_dispatch",
    "moe_combine_kernel": "moe_combine",
    "moe_dispatch_matmul_kernel": "moe_dispatch_matmul",
    "moe_matmul_combine_kernel": "moe_matmul_combine",
}
VISITING = ("all_gather_wgrad_kernel",)  # looks for every peer before any of its data, rank - 1 first


@dataclass(frozen=True)
class Trial:
    """A case and the schedules to try.

    kernel    what is launched, call by call
    detect    look for races, not only at results and deadlocks
    succeeds  no rank may take the call for failed
    calls     whose results are compared
    """

    kernel: str
    case: Case
    schedules: tuple[Schedule, ...]
    detect: bool = True
    succeeds: bool = True
    calls: tuple[Call, ...] = ()

    def own_rows(self, number: int, rank: int) -> range:
        """Rows of the results of a call that this rank need not receive: its shard, or what it sums for all."""
        call = self.calls[number]
        if call.operation in EXCHANGED:  # no stretch of them
            return range(0)
        sizes = call.sizes if call.operation.startswith("all_gather") else split(sum(call.sizes), WORLD)
        begin = sum(sizes[:rank])
        return range(begin, begin + sizes[rank])


def schedules(count: int, residents: tuple[Any, ...] = (None, 1, 2, "varying")) -> tuple[Schedule, ...]:
    """Strategies, residencies and lateness of stores in turn, out of step with one another."""
    s, r = len(DEFAULT), len(residents)
    return tuple(
        Schedule(DEFAULT[i % s], i, residents[(i + i // s) % r], weak=(i // r) % 2 == 1) for i in range(count)
    )


def tried(kernel: str) -> bool:
    """Whether there are trials of this kernel."""
    return kernel in (*OPERATIONS, *ELEMENTWISE, *GROUPED, *LOCAL, "meet_kernel", "bump_epoch")


def trials(kernels: Iterable[str], count: int = 24) -> Iterator[Trial]:
    """What tries these kernels, the cheapest and most telling first; `count` schedules of the three calls."""
    kernels = set(kernels)
    known = {kernel: name for kernel, name in OPERATIONS.items() if kernel in kernels}
    for kernel in [name for name in LOCAL if name in kernels]:
        for tma in (False, True):
            yield Trial(kernel, local(kernel, tma), schedules(1, (None,)))
    for kernel in [name for name in GROUPED if name in kernels]:
        for halves in (False, True):
            yield Trial(kernel, grouped_case(kernel, halves), schedules(1, (None,)))
    for kernel in sorted(kernels.intersection(ELEMENTWISE)):
        yield Trial(kernel, elementwise(kernel), schedules(1, (None,)))
    few = max(1, count // 2)
    if "meet_kernel" in kernels:
        yield Trial("meet_kernel", strangers(), schedules(min(3, few), (1,)), succeeds=False)
        yield Trial("meet_kernel", meetings(), schedules(count))
    for kernel, operation in known.items():
        yield Trial(kernel, no_rows(operation), schedules(min(3, few), (1,)), succeeds=False)
        if operation.startswith("all_gather"):
            yield Trial(
                kernel, no_rows(operation, copied=(0, 1)), schedules(min(3, few), (1,)), succeeds=False
            )
    for kernel, operation in known.items():
        made = by_tma(operation)
        yield Trial(kernel, fused_case(f"tma of {operation}", made, seed=3), schedules(2), calls=tuple(made))
    for kernel, operation in known.items():
        made = [replace(call, programs=(2, 2)) for call in calls(operation)]
        case = fused_case(f"two of {operation}", made, seed=3)
        yield Trial(kernel, case, schedules(2), calls=tuple(made))
    for kernel, operation in known.items():
        yield Trial(kernel, wrapping(operation), schedules(2), calls=tuple(calls(operation)))
    for kernel, operation in known.items():
        made = calls(operation)
        case = fused_case(f"calls of {operation}", made, seed=3)
        yield Trial(kernel, case, schedules(count), calls=tuple(made))
    for kernel, operation in known.items():
        odd = other_call(calls(operation)[0])
        yield Trial(kernel, odd, schedules(min(6, few), (1,)), detect=False, succeeds=False)
        few_rows = replace(calls(operation)[0], sizes=(1, 0, 0))
        yield Trial(kernel, other_call(few_rows), schedules(min(3, few), (1,)), detect=False, succeeds=False)
        if kernel in VISITING:
            for call in (few_rows, calls(operation)[0]):
                yield Trial(kernel, late(call), schedules(min(3, few), (None,)), detect=False, succeeds=False)
        for parity in range(2):
            yield Trial(kernel, mixed(operation, parity), schedules(few))
        made = none_between(operation)
        case = fused_case(f"none of {operation}", made, seed=5)
        yield Trial(kernel, case, schedules(few), calls=tuple(made))
        if operation.startswith("all_gather"):
            made = beside_copies(operation)
            case = fused_case(f"copies of {operation}", made, seed=3)
            yield Trial(kernel, case, schedules(few), calls=tuple(made))
            yield Trial(kernel, idle(operation), schedules(few), calls=tuple(calls(operation)))
