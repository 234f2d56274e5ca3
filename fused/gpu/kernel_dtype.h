#pragma once
// Dtypes that kernels of the fused ops take.

namespace tessera::fused {

enum class KernelDtype { Float32, BFloat16, Float16, Float64 };

}  // namespace tessera::fused
