"""One file a suite: NAME, RANKS ("one", "several" or "any"), cases(plan, tp) and measure(rank, case) -> rows."""
