#pragma once
// Launches a table of copies (strided_copy.h).

#include <cuda_runtime_api.h>

#include "cuda/strided_copy.h"

namespace tessera::cuda {

/// Dtypes that the kernel reads and writes. Bits are 1, 2, 4 or 8 bytes of the same dtype on both sides.
enum class CopyDtype { Bits8, Bits16, Bits32, Bits64, Float32, BFloat16, Float16 };

/// Launches the copies asynchronously and returns the launch's status. Dtypes are equal Bits or two floating ones. A
/// table without tiles launches nothing.
cudaError_t launch_copies(const CopyTable& table, CopyDtype to, CopyDtype from, cudaStream_t stream);

}  // namespace tessera::cuda
