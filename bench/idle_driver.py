"""A CUDA driver that does nothing, so that Triton launches compiled kernels on a machine without a GPU.

`install` builds a libcuda.so.1 with functions that return at once, and activates Triton's CUDA driver on top of it.
Everything from `kernel[grid](...)` to cuLaunchKernelEx runs as with a GPU. Operands may be CPU tensors.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

# The functions that Triton's driver calls, with the results that it reads.
SOURCE = r"""
#include <stdint.h>
#define DOES_NOTHING(name) int name() { return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 75: *value = 9; break;          /* compute capability: 9.0 */
    case 76: *value = 0; break;
    case 16: *value = 132; break;        /* multiprocessors */
    default: *value = 232448; break;     /* shared memory, which only has to suffice */
  }
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }
int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t address) { *value = address; return 0; }
int cuDriverGetVersion(int *value) { *value = 13000; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "error"; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuCtxGetLimit(uint64_t *value, int limit) { *value = 0; return 0; }
DOES_NOTHING(cuInit) DOES_NOTHING(cuCtxSetCurrent) DOES_NOTHING(cuCtxSetLimit) DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuFuncSetAttribute) DOES_NOTHING(cuFuncSetCacheConfig) DOES_NOTHING(cuOccupancyMaxActiveClusters)
DOES_NOTHING(cuTensorMapEncodeTiled) DOES_NOTHING(cuTensorMapEncodeIm2col)
DOES_NOTHING(cuLaunchKernelEx) DOES_NOTHING(cuLaunchKernel)
"""


def c_compiler() -> str | None:
    """A C compiler, which Triton also needs for its own driver; None if there is none."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")


def install(folder: str) -> None:
    """Build the driver in `folder` and make it Triton's active driver in this process, with its cache in `folder`."""
    compiler = c_compiler()
    assert compiler is not None
    source, library = Path(folder) / "idle.c", Path(folder) / "libcuda.so.1"
    source.write_text(SOURCE)
    command = [
        compiler,
        "-O2",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(library),
        str(source),
    ]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # later dlopens of libcuda.so.1 return this one
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")

    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
    from triton.runtime import driver

    class Idle(CudaDriver):
        def __init__(self) -> None:
            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
            self.get_device_capability: Any = lambda device=0: (9, 0)
            self.get_current_stream: Any = lambda device: 0
            self.get_current_device: Any = lambda: 0
            self.set_current_device: Any = lambda device: None

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(Idle())
