#pragma once
// Simulates GPUs for tests: the device type CUDA in a program that does not link libtorch's CUDA half.
//
//   const c10::Device gpu(c10::kCUDA, 0);
//   at::Tensor x = at::ones({3}, gpu) * 2;  // computed on the CPU, by ATen
//   host_waits();                           // {}: the host has not waited for the device
//   x.sum().item();                         // now it is {"aten::_local_scalar_dense"}
//
// It detects, with an exception in the op:
// - accesses to memory that work on another stream reads or writes, without an event or the host in between;
// - memory that is freed while a stream unknown to its owner (record_stream) may still use it;
// - ops on tensors of two GPUs, or on freed memory.
//
// Graphs are captured and replayed with CUDA's rules (captured_step/device_graph.h). Throws if the host waits, an event
// was recorded outside, a stream has not joined or is not joined at the end, or freed memory is used.
//
// If the host accesses a tensor's memory by data_ptr(), the program ends. Uninitialized memory is NaN, as is pinned
// memory that the GPU copies to until the host has waited.
//
// Kernels run immediately on the CPU, on tensors that share the GPU's memory (gpu_ops.cpp); streams and events are
// vector clocks (stream_clocks.h), which tell how a real GPU could reorder work. It does not simulate speed, CUDA
// kernels with their rounding and limits, NCCL, or pinned memory that the host writes while the GPU reads it.
//
// Linking it makes at::hasCUDA() true. Thread safety: like CUDA; each thread has its current device and streams.
// Source: PyTorch's CUDA Sanitizer (torch/cuda/_sanitizer.py), which observes a real GPU.

#include <string>
#include <vector>

namespace tessera::simulated_gpu {

constexpr int kDevices = 4;

/// Returns the host's waits, in any thread, since the program began or forget_host_waits(). They are names of ops, or
/// of calls such as "Stream::synchronize".
std::vector<std::string> host_waits();
void forget_host_waits();

}  // namespace tessera::simulated_gpu
