"""Fixtures of the simulator's tests."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def impatient() -> Iterator[None]:
    """Deadlocks are reported after fewer polls in vain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedtp.sim.ptx.machine.LAST_PATIENCE", 50)
        yield
