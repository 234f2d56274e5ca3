#pragma once
// Ops that ATen has a composite kernel for and this package one of its own, other than dispatch(). They are named
// apart from their kernels: dispatch_keys.cpp gives dispatch_kernel() to all the others, whichever file is loaded
// first.

namespace tessera {

/// By which autograd's formulas put gradients together, see backward_constants.cpp. None that hooks compute with, whose
/// tensors may be anything.
inline constexpr const char* kGradientJoins = R"(
    _index_put_impl_ cat diagonal_scatter glu_backward index.Tensor index_add_ index_put index_select masked_scatter put
    scatter_add select_scatter slice_scatter stack)";

/// In as_strided.cpp, dispatch_keys.cpp, foreach.cpp and inplace_view.cpp.
inline constexpr const char* kOtherOwnKernels = R"(
    as_strided_copy as_strided_scatter is_same_size _foreach_addcdiv.Tensor _foreach_addcdiv_.Tensor
    _foreach_addcmul.Tensor _foreach_addcmul_.Tensor)";

}  // namespace tessera
