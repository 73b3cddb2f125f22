"""The engines that tests run through; `triton` needs Triton and runs in its interpreter."""

from importlib.util import find_spec

import pytest

TRITON = pytest.param("triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason="needs triton"))
ENGINES = ["collective", "chunked", TRITON]
