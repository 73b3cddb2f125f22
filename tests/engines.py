"""The engines that tests go through: `triton` where it is installed, in its interpreter."""

from importlib.util import find_spec

import pytest

TRITON = pytest.param("triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason="needs triton"))
ENGINES = ["collective", "chunked", TRITON]
