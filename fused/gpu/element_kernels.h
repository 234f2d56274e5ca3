#pragma once
// Launches elementwise ops (element_tile.h).

#include <cuda_runtime_api.h>

#include "fused/gpu/element_tile.h"
#include "fused/gpu/kernel_dtype.h"

namespace tessera::fused {

/// Launches Op: SwigluForward, SwigluBackward, TanhGegluForward or TanhGegluBackward.
template <class Op>
cudaError_t launch_elements(const ElementOperands<Op::kIn, Op::kOut>& of, KernelDtype dtype, cudaStream_t stream);

extern template cudaError_t launch_elements<SwigluForward>(const ElementOperands<2, 1>&, KernelDtype, cudaStream_t);
extern template cudaError_t launch_elements<SwigluBackward>(const ElementOperands<3, 2>&, KernelDtype, cudaStream_t);
extern template cudaError_t launch_elements<TanhGegluForward>(const ElementOperands<2, 1>&, KernelDtype, cudaStream_t);
extern template cudaError_t launch_elements<TanhGegluBackward>(const ElementOperands<3, 2>&, KernelDtype, cudaStream_t);

}  // namespace tessera::fused
