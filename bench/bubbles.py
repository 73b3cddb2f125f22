"""What share of a pipeline step its ranks are idle, in theory: costs to play an order of passes with, and formulas.

fusedtp/train/bubbles.py plays the order. `Costs` are those of equal stages; torch leaves I of stage 0 empty and does
both in W.

Formulas are of the literature, for p ranks with v stages each and m microbatches, in which a rank's forward, input and
weight passes of a microbatch take f, i and w. Idle is what they give as the time that a rank waits in a step; its share
is idle / (m (f + i + w) + idle).

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
    """Seconds that a rank takes for a microbatch, forward, inputs' and weights' gradients, of all its stages."""

    forward: float
    input: float
    weight: float

    @property
    def all(self) -> float:
        return self.forward + self.input + self.weight

    def of(self, kind: str, stage: int, stages: int) -> float:
        """Of one stage out of `stages` on a rank."""
        whole = {
            FORWARD: self.forward,
            BACKWARD: self.input + self.weight,
            INPUT: 0.0 if stage == 0 else self.input,
            WEIGHT: self.weight + (self.input if stage == 0 else 0.0),
        }
        return whole[kind] / stages

    def each(self, stages: int) -> Cost:
        """Of the passes of ranks with so many stages."""
        return partial(self.of, stages=stages)


def formula(schedule: str, ranks: int, stages: int, microbatches: int, costs: Costs) -> float | None:
    """The share by the literature; None where it has none for these costs."""
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
