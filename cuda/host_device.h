#pragma once
// Functions for g++ and for nvcc's device code alike: what a thread of a kernel does is tested on the CPU.

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__ inline
#else
#define TESSERA_HOST_DEVICE inline
#endif
