"""Triton's interpreter gives the same types, bits and errors with `quick` as without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]

BOTH_WAYS = """
import itertools, operator

import torch, triton
import triton.language as tl
from triton.runtime import interpreter

from tests.harness.quick import quick

DTYPES = [tl.int1, tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float16, tl.bfloat16,
          tl.float32, tl.float64, tl.float8e5]
NUMBERS = [0, 1, 7, -3, 2**31 - 1, 2**31, 2**40, True, 2.5]
OPERATIONS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
              operator.lt, operator.eq, operator.and_, operator.lshift, tl.minimum]
SHAPES = [(), (4,), (1, 4)]
found = []


def shown(operation, a, b):
    try:
        made = operation(a, b)
    except Exception as error:
        return type(error).__name__
    return str(made.type), made.handle.data.tobytes(), str(made.shape)


def value(number, dtype, shape):
    scalar = tl.cast(float(number) if dtype.is_floating() else number, dtype)
    return tl.broadcast_to(tl.broadcast_to(scalar, (1,) * len(shape)), shape) if shape else scalar


@triton.jit
def kernel(x):
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        a = value(3, dtype, shape)
        for operation, number in itertools.product(OPERATIONS, NUMBERS):
            found.append(shown(operation, a, number))
            found.append(shown(operation, number, a))
        for operation, other in itertools.product(OPERATIONS, DTYPES):
            if other != tl.float8e5:
                found.append(shown(operation, a, value(2, other, ())))
                found.append(shown(operation, a, value(2, other, (4,))))
    for step in (1, 2):
        found.append(shown(operator.add, x, step))
        found.append(shown(operator.add, x, tl.arange(0, 4)))


def run():
    found.clear()
    kernel[(1,)](torch.zeros(4))
    return [each for each in found if "pointer" not in str(each)]


plain = run()
with quick(interpreter):
    twice = run(), run()  # what is remembered the first time counts the second time
assert len(plain) > 10_000 and len(set(map(str, plain))) > 100, (len(plain), len(set(map(str, plain))))
for quicker in twice:
    differing = [(n, a, b) for n, (a, b) in enumerate(zip(plain, quicker, strict=True)) if a != b]
    assert not differing, (len(differing), differing[:5])
"""


@pytest.mark.slow
def test_every_operation_on_numbers_gives_the_same_as_without(tmp_path):
    script = tmp_path / "both_ways.py"  # the interpreter reads a kernel's source from a file
    script.write_text(BOTH_WAYS)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
