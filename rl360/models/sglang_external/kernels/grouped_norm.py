"""Grouped RMSNorm in one pass, the residual added on the way. One program normalises one group of one token.

In: pointers to rows of hidden states, weight, and the residual (ignored without HAS_RESIDUAL). Out: the normed rows,
and the sum in the residual's place. Shapes and strides are rl360.models.sglang_external.grouped_norm's care.
"""

import triton
import triton.language as tl


@triton.jit
def grouped_rms_norm(  # type: ignore[no-untyped-def]  # Triton reads the signature
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    width,
    group_width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows x width may pass 2^31
    offsets = tl.arange(0, BLOCK)
    inside = offsets < group_width
    columns = tl.program_id(1) * group_width + offsets
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual_ptr + row * width + columns
        total = x + tl.load(place, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(residual_ptr.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / group_width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)
