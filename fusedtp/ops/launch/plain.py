"""Launcher of the plain persistent matmul: what the fused kernels add their communication to."""

from torch import Tensor

from . import tuned
from .config import VECTOR, Config, machine_of, tiles
from .run import Launch, check_tensors


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, config: Config | None = None) -> Tensor:
    """y = x @ w.T + bias on one device, see kernels/matmul.py.

    x        [M, K]   any strides
    weight   [N, K]   any strides
    bias     [N] or None
    return   [M, N]
    """
    check_tensors(x, [weight, bias])
    from fusedtp.kernels.matmul import matmul_kernel

    (m, k), n, machine = x.shape, weight.shape[0], machine_of(x.device)
    even = n % VECTOR == 0
    found = tuned.lookup("matmul", machine, x.dtype, rows=m, cols=n, k=k, even=even)
    config = config or tuned.tile(tiles(machine, x.dtype, m, n, even), found)
    y = x.new_empty(m, n)
    args = dict(
        x=x,
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        w=weight,
        stride_wn=weight.stride(0),
        stride_wk=weight.stride(1),
        bias=None if bias is None else bias.contiguous(),
        y=y,
        M=m,
        N=n,
        K=k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=config.group,
        EVEN_K=k % config.block_k == 0,
    )
    Launch(matmul_kernel, machine.programs, args, config).start(x.device)
    return y
