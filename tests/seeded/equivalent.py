"""Faults that change nothing: (operator, function, the line's text, where) -> why.

where    of a fault in PTX a kernel, or a kernel and target, or "": all
A row that is found when it is tried is an error.
"""

EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    (
        "drop barrier",
        "publish",
        "tl.debug_barrier()",
        "",
    ): "handing `healthy` to all threads takes two barriers",
}
