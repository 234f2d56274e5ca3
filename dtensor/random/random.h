#pragma once
// Random numbers of DTensors. A seed gives one global tensor for all placements, meshes and numbers of ranks, equal to
// a plain tensor's on one device.
//
//   tessera::manual_seed(0);  // on every rank; like at::manual_seed(0) on one device
//   x.normal_();              // a DTensor [5, 3], Shard(0) or anything else; like a plain [5, 3]
//   auto y = at::dropout(x, 0.1, true);
//
// Each rank has its own generators for DTensors, all with libtorch's default seed, which plain tensors do not use. An
// explicit generator must have the same state on all ranks. docs/semantics.md covers cost, CUDA and seeding.
// Thread safety: like at::Generator, one thread of a rank at a time.

#include <ATen/core/Generator.h>

#include <cstdint>

namespace tessera {

/// Seeds the calling rank's generators on all devices. Use the same seed on all ranks of the meshes of random DTensors.
void manual_seed(uint64_t seed);

/// Returns the calling rank's generator for DTensors on `device_type` (on CUDA, the current device). Use get_state()
/// and set_state() to repeat or checkpoint draws.
at::Generator dtensor_generator(at::DeviceType device_type);

/// Makes a generator for plain tensors on `device`. Meta tensors use a CPU generator.
at::Generator new_generator(at::Device device, uint64_t seed);

}  // namespace tessera
