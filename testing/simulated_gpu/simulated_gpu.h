#pragma once
// GPUs for tests on a machine without one: the device type CUDA of a program that does not link libtorch's CUDA half.
//
//   const c10::Device gpu(c10::kCUDA, 0);
//   at::Tensor x = at::ones({3}, gpu) * 2;       // computed on the CPU, by ATen
//   host_waits();                                // {}: nobody has waited for the device
//   x.sum().item();                              // now it is {"aten::_local_scalar_dense"}
//
// What it finds, as an exception of the op that does it:
// - an access to memory that other work on another stream reads or writes, without an event or the host between them;
// - memory that is freed while a stream may still use it, of which its owner was not told (record_stream);
// - an op on tensors of two GPUs, or on memory that was freed.
// The host has no access to a tensor's memory by its data_ptr(): the program ends there. Memory that nobody has written
// is NaN.
//
// How: kernels run at once, on the CPU, on tensors that share the GPU's memory (gpu_ops.cpp); streams and events are
// vector clocks (stream_clocks.h) that tell what a real GPU would be free to do in another order. After CUDA Sanitizer
// of PyTorch (torch/cuda/_sanitizer.py), which watches a real one.
//
// What the GPU copies to pinned memory, while the host goes on, is there once the host has waited; until then, NaN.
//
// What it does not show: speed, kernels of CUDA itself with their own rounding and limits, NCCL, and pinned memory that
// the host writes while the GPU reads it.
//
// Linking it makes at::hasCUDA() true. Thread safety: as CUDA's; each thread has its current device and streams.

#include <string>
#include <vector>

namespace tessera::simulated_gpu {

constexpr int kDevices = 4;

/// What the host has waited for, by any thread, since the program began or forget_host_waits(): names of ops, or of
/// calls such as "Stream::synchronize".
std::vector<std::string> host_waits();
void forget_host_waits();

}  // namespace tessera::simulated_gpu
