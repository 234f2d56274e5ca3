#pragma once
// Marks functions for both g++ and nvcc's device code, so that tests run a kernel's threads on the CPU.

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__ inline
#else
#define TESSERA_HOST_DEVICE inline
#endif
