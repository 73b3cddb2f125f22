"""How torch functions treat the elements of a tensor, by name: one table for all tensor subclasses of this library."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any


def names(words: str) -> frozenset[str]:
    return frozenset(words.split())


@lru_cache(1024)
def name_of(func: Callable[..., Any]) -> str:
    """The name of a function, method, operator, overload, or of an attribute that is read or set."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__") and hasattr(func, "__self__"):
        return str(func.__self__.__name__)
    return name.split(".")[0]  # of an overload: add.Tensor


def is_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or name in IN_PLACE
    return name.endswith("_") or kwargs.get("inplace") is True


# Attributes and methods that need no values: answered by the wrapper itself.
METADATA = names(
    "size dim ndimension numel nelement is_floating_point is_complex is_signed element_size stride is_contiguous "
    "storage_offset get_device __len__ __hash__ is_inference shape dtype device ndim layout is_meta is_cuda is_cpu "
    "is_xpu is_mps is_quantized is_sparse is_sparse_csr is_nested is_mkldnn itemsize nbytes names name is_mtia is_maia "
    "is_ipu is_xla is_hpu is_vulkan has_names is_conj is_neg is_same_size dim_order _base _is_view"
)
# Rejected: they need the memory of the whole tensor, or would replace the wrapper's memory.
REFUSED = names(
    "data_ptr storage untyped_storage _typed_storage __dlpack__ __cuda_array_interface__ set_ resize_ resize_as_ "
    "share_memory_ unsqueeze_ squeeze_ transpose_ swapaxes_ swapdims_ t_ as_strided_ rename_ swap_tensors"
)
# They create plain tensors with the dtype and device of this one.
NEW = names("new_zeros new_ones new_full new_empty new_tensor result_type")
# Autograd attributes, answered by the tensor that receives all of the gradient.
OF_SOURCE = names("grad_fn is_leaf retains_grad retain_grad output_nr _backward_hooks")
# Each element of the result depends on the operands' elements at the same position.
ELEMENTWISE = names(
    "add sub mul div true_divide floor_divide remainder fmod pow float_power rsub neg negative abs absolute square "
    "sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos sinh cosh tanh asinh acosh atanh "
    "sigmoid erf erfc erfinv logit sign sgn signbit copysign floor ceil round trunc frac clamp clamp_min clamp_max "
    "clip maximum minimum fmax fmin where masked_fill lerp addcmul addcdiv nan_to_num isnan isinf isfinite isclose eq "
    "ne lt le gt ge not_equal less less_equal greater greater_equal logical_and logical_or logical_not logical_xor "
    "bitwise_and bitwise_or bitwise_not bitwise_xor atan atan2 hypot logaddexp xlogy subtract multiply divide radd "
    "rmul rdiv rtruediv rpow rfloordiv truediv floordiv mod rmod invert and or xor rand ror rxor pos positive relu "
    "relu6 gelu silu mish elu selu celu leaky_relu softplus softsign hardtanh hardswish hardsigmoid hardshrink "
    "softshrink tanhshrink threshold log_sigmoid to float half bfloat16 double int long bool short type type_as "
    "contiguous clone detach data zeros_like ones_like full_like empty_like copy fill zero"
)
# Work along `dim`; they run on local rows if `dim` has no token dimension. The value is the default of `dim`, if any.
ALONG: dict[str, int | None] = {
    **dict.fromkeys(names("topk sort argsort glu kthvalue mode diff"), -1),
    **dict.fromkeys(
        names(
            "mean sum prod var std var_mean std_mean nansum nanmean count_nonzero norm vector_norm linalg_norm "
            "linalg_vector_norm amax amin max min argmax argmin all any logsumexp softmax log_softmax softmin "
            "normalize cumsum cumprod cummax cummin logcumsumexp median unbind chunk split tensor_split narrow select "
            "roll flip repeat_interleave cat concat concatenate stack"
        )
    ),
}
THIRD = names(
    "chunk split tensor_split topk norm vector_norm linalg_norm linalg_vector_norm normalize kthvalue diff roll "
    "repeat_interleave"
)  # `dim` is their third argument
SPREADS = names("std var std_mean var_mean")
LISTS = names("cat concat concatenate stack")
VIEWS = names("chunk split tensor_split unbind narrow select")
IN_PLACE = {f"__i{name}__" for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"]}
