"""Diffusion transformers of diffusers, split by a plan inferred from an example, compute what they do on one device.

A plain run tests a sample; FUSEDTP_ALL_MODELS=1 (`make test-models`) tests all of them.
"""

import os

import pytest

from tests.harness import world

from . import diffusion

ALL = os.environ.get("FUSEDTP_ALL_MODELS") == "1"
# Its attention stays whole, since its rotary tables are of all heads.
PARTLY = {"LTX-Video"}


@pytest.mark.slow
@pytest.mark.parametrize("name", diffusion.CASES if ALL else ["FLUX.1", "Stable Diffusion 3"])
def test_diffusion_transformers(name: str):
    found = world(2, strangers=True).run(diffusion.compare, name, {}, timeout=300)[0]
    assert found["excess"] <= 1, f"{found['worst']} is off by {found['excess']:.1f} times what roundoff explains"
    assert found["share"] > 0.6, found["whole"]
    assert any(".attn" in layer for layer in found["whole"]) == (name in PARTLY), found["whole"]
