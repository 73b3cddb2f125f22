"""Models of other libraries, split by a plan inferred from an example, compute what they do on one device.

`make libraries-table` installs the libraries in a venv of their own, where this runs too:
`.venv-libraries/bin/python -m pytest tests/parallel/hf/test_libraries.py`.
"""

import pytest

from tests.harness import WorldError, world

from . import libraries

PACKAGES = {"openai-whisper": "whisper", "vit-pytorch": "vit_pytorch", "x-transformers": "x_transformers"}
REFUSED = {"timm: EVA-02", "timm: PVT v2"}


@pytest.mark.slow
@pytest.mark.parametrize("name", libraries.CASES)
def test_models_of_other_libraries(name: str):
    library = name.partition(":")[0]
    pytest.importorskip(PACKAGES.get(library, library), reason="`make libraries-table` installs it")
    if name in REFUSED:
        with pytest.raises(WorldError, match="none could be inferred"):
            world(2, strangers=True).run(libraries.compare, name, {}, timeout=300)
        return
    found = world(2, strangers=True).run(libraries.compare, name, {}, timeout=300)[0]
    assert found["excess"] <= 1, f"{found['worst']} is off by {found['excess']:.1f} times what roundoff explains"
    assert found["share"] > 0.3, found["whole"]
