#pragma once
// Dtypes supported by kernels of the fused ops.

namespace tessera::fused {

enum class KernelDtype { Float32, BFloat16, Float16, Float64 };

}  // namespace tessera::fused
