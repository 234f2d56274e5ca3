#pragma once
// Launches a table of copies (strided_copy.h).

#include <cuda_runtime_api.h>

#include "cuda/strided_copy.h"

namespace tessera::cuda {

/// What the kernel reads and writes. Bits: same dtype on both sides, of 1, 2, 4 or 8 bytes.
enum class CopyDtype { Bits8, Bits16, Bits32, Bits64, Float32, BFloat16, Float16 };

/// Both sides Bits of one size, or two different ones of the floating dtypes. Asynchronous; returns what the launch
/// returned. A table without tiles launches nothing.
cudaError_t launch_copies(const CopyTable& table, CopyDtype to, CopyDtype from, cudaStream_t stream);

}  // namespace tessera::cuda
