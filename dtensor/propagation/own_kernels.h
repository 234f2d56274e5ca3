#pragma once
// Ops with a composite kernel in ATen and a separate kernel in this package, other than dispatch(). The list is
// separate from the kernels, because dispatch_keys.cpp gives dispatch_kernel() to all others, in any order of loading.

namespace tessera {

/// Ops by which autograd's formulas combine gradients; see backward_constants.cpp. Excludes ops that hooks may compute
/// with.
inline constexpr const char* kGradientJoins = R"(
    _index_put_impl_ cat diagonal_scatter glu_backward index.Tensor index_add_ index_put index_select masked_scatter put
    scatter_add select_scatter slice_scatter stack)";

/// Ops of as_strided.cpp, dispatch_keys.cpp, foreach.cpp and inplace_view.cpp.
inline constexpr const char* kOtherOwnKernels = R"(
    as_strided_copy as_strided_scatter is_same_size _foreach_addcdiv.Tensor _foreach_addcdiv_.Tensor
    _foreach_addcmul.Tensor _foreach_addcmul_.Tensor)";

}  // namespace tessera
