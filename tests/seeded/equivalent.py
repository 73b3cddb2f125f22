"""Faults that no schedule shows: (operator, function, the line's text, where) -> why.

where    of a fault in PTX a kernel, or a kernel and target, or "": all
A row that is found when it is tried is an error. "Not modelled" is no equivalence: the machine cannot tell.
"""

BARRIER, SCOPE, FENCE = "ptx: drop barrier", "ptx: narrow device scope", "ptx: drop fence"
HEALTHY = 'healthy = tl.atomic_add(peers.failure, 0, sem="relaxed", scope="gpu") == FINE'
FAILED = 'return tl.atomic_add(peers.failure, 0, sem="relaxed", scope="gpu") != FINE'
RELEASE = 'tl.atomic_xchg(flag, tl.load(peers.epoch), mask=healthy, sem="release", scope="sys")'
RECORD = 'first = tl.atomic_cas(peers.failure, zero, zero + code, sem="relaxed", scope="gpu") == FINE'
TICK = 'tl.atomic_max(peers.failure + CLOCK_WORD, ticks, sem="relaxed", scope="gpu")'
TICKS = (
    'return tl.atomic_max(peers.failure + CLOCK_WORD, tl.full((), 0, tl.int64), sem="relaxed", scope="gpu")'
)
TWO = "two barriers stand between the stores and the release, of the atomic and of the source"
ONE = "a meeting is one program, so no other reads its rank's failure and clock"

EARLY, LEADER = "waits earlier for what it waits for anyway", "signals.wait_all_arrivals(peers)"
NEXT = "a barrier of another line stands between the last reads and the next copy, and before mbarriers go"
BY_TMA = "acc = multiply_add(acc, x.load([row, k]), w.load([col, k]).T, PRECISION)"
TMA = "matmul_kernel sm_90"
HANDED = "the barrier with which an atomic hands the flag to all threads stands behind the acquire too"

EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    ("drop barrier", "publish", "tl.debug_barrier()", ""): TWO,
    ("drop barrier", "wait", "tl.debug_barrier()", ""): HANDED,
    ("swap", "all_gather_gated_matmul_kernel", LEADER, ""): EARLY,
    ("swap", "all_gather_matmul_kernel", LEADER, ""): EARLY,
    ("swap", "all_gather_wgrad_kernel", LEADER, ""): EARLY,
    ("swap", "one_shot_kernel", LEADER, ""): "only an address is computed before",
    (BARRIER, "descriptor_loop", "for k in tl.range(0, K, BLOCK_K, warp_specialize=SPECIALIZED):", TMA): NEXT,
    (BARRIER, "descriptor_loop", BY_TMA, TMA): NEXT,
    (BARRIER, "multiply_add", "acc = tl.dot(x, widen(w), acc, input_precision=PRECISION)", TMA): (
        "each thread has waited at the mbarrier itself"
    ),
    (BARRIER, "publish", "tl.debug_barrier()", ""): TWO,
    (BARRIER, "publish", RELEASE, ""): TWO,
    (BARRIER, "publish", HEALTHY, ""): "only the thread that reads the failure uses what it read",
    (BARRIER, "record", RECORD, ""): "only the thread that records the failure stores the status",
    (
        "ptx: later wait for copies",
        "dot_loop",
        "for k in range(0, K, BLOCK_K):",
        "",
    ): "no copy is under way there",
    (SCOPE, "publish", HEALTHY, "meet_kernel"): ONE,
    (SCOPE, "failed", FAILED, "meet_kernel"): ONE,
    (SCOPE, "record", RECORD, "meet_kernel"): ONE,
    (SCOPE, "_clock", TICK, "meet_kernel"): ONE,
    (SCOPE, "_clock", TICKS, "meet_kernel"): ONE,
    (FENCE, "multiply_add", "acc = tl.dot(x, widen(w), acc, input_precision=PRECISION)", ""): (
        "not modelled: wgmma reads shared memory by the async proxy, threads wrote it by the generic one"
    ),
    (
        FENCE,
        "descriptor_loop",
        "acc = multiply_add(acc, x.load([row, k]), w.load([col, k]).T, PRECISION)",
        "",
    ): ("not modelled: a copy by TMA over what threads of the program have read, which is another proxy"),
}
