"""The theoretical idle share of a pipeline step: costs for simulating an order of passes, and formulas.

fusedtp/train/bubbles.py simulates the order. `Costs` are those of equal stages; torch leaves the pass I of stage 0
empty and does both in W.

The formulas are from the literature, for p ranks with v stages each and m microbatches. A rank's forward, input and
weight passes of a microbatch take f, i and w. A formula gives the idle time of a rank in a step; its share is
idle / (m (f + i + w) + idle).

    GPipe, 1F1B               (p - 1) (f + i + w)        Huang et al. 2019; Narayanan et al. 2021, section 2.2.1
    interleaved 1F1B          (p - 1) (f + i + w) / v    Narayanan et al. 2021, section 2.2.2
    looped breadth-first      (p - 1) (f + i + w) / v    Lamy-Poirier 2023, section 3
    interleaved zero bubble   (p - 1) (f + i - w) / v    ZB-H1 of Qi et al. 2024 (Zero Bubble), table 1, by v stages
    ZBV                       (p - 1) f / 2 if f = i = w: none but the last rank's later start, which only a step
                              without a common end hides    Qi et al. 2024 (Controllable Memory), V-ZB
    DualPipeV                 (p - 1) (f + 2 (i + w) - 3 w) / 2    DeepSeek's DualPipe, README, without overlap

torch's orders give these figures (tests/bench/test_bubbles.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fusedtp.train.bubbles import Cost
from fusedtp.train.stages import BACKWARD, FORWARD, INPUT, WEIGHT


@dataclass(frozen=True)
class Costs:
    """Seconds per microbatch for all stages of a rank: forward, input gradients, weight gradients."""

    forward: float
    input: float
    weight: float

    @property
    def all(self) -> float:
        return self.forward + self.input + self.weight

    def of(self, kind: str, stage: int, stages: int) -> float:
        """Seconds of a pass of one stage, out of `stages` on a rank."""
        whole = {
            FORWARD: self.forward,
            BACKWARD: self.input + self.weight,
            INPUT: 0.0 if stage == 0 else self.input,
            WEIGHT: self.weight + (self.input if stage == 0 else 0.0),
        }
        return whole[kind] / stages

    def each(self, stages: int) -> Cost:
        """Costs of the passes on ranks with this many stages."""
        return partial(self.of, stages=stages)


def formula(schedule: str, ranks: int, stages: int, microbatches: int, costs: Costs) -> float | None:
    """The idle share by the literature; None if there is no formula for these costs."""
    f, i, w = costs.forward, costs.input, costs.weight
    idle = {
        "gpipe": f + i + w,
        "1f1b": f + i + w,
        "looped_bfs": (f + i + w) / stages,
        "interleaved_1f1b": (f + i + w) / stages,
        "interleaved_zero_bubble": (f + i - w) / stages,
        "zbv_zero_bubble": f / stages if f == i == w else None,
        "dualpipev": (f + 2 * (i + w) - 3 * w) / 2,
    }[schedule]
    if idle is None:
        return None
    waits = (ranks - 1) * idle
    return waits / (microbatches * costs.all + waits)
