#pragma once
// Random numbers of DTensors: the same seed gives the same global tensor whatever its placements, the mesh and the
// number of ranks, equal to what one device draws for a plain tensor of the same sizes.
//
//   tessera::manual_seed(0);                                   // on every rank
//   x.normal_();                                               // a DTensor [5, 3], Shard(0) or anything else
//   auto y = at::dropout(x, 0.1, true);
//
// on one device is at::manual_seed(0), x.normal_() on a plain [5, 3], and the same dropout. (On CUDA the dropout of a
// plain tensor is a fused kernel that draws other elements.)
//
// How: every rank draws the whole tensor from its generator and keeps its own part, so generators advance equally on
// all ranks. The cost is one tensor of the global size, freed at once, and the time to draw it; no communication. Ops
// that read values to draw by them (bernoulli of probabilities, normal of means, multinomial) gather those first.
//
// On CUDA (--config=cuda) normal_, uniform_ and bernoulli_ of a number, and what is made of them (randn, rand,
// dropout), draw a rank's own part alone, with the same numbers (cuda/sharded_draw.h): neither memory nor time for the
// rest.
//
// Each rank has generators of its own for this, which plain tensors do not touch: plain random ops (a loader's
// shuffling, dropout of data-parallel activations) may differ from rank to rank without making replicated DTensors
// differ. All start from libtorch's default seed. A generator that is passed to an op is used instead; it must be in
// the same state on every rank.
//
// Thread safety: as at::Generator, one thread of a rank at a time.

#include <ATen/core/Generator.h>

#include <cstdint>

namespace tessera {

/// Seeds the calling rank's generators, of all devices. Call with the same seed on every rank of the meshes on which
/// DTensors are drawn: on all, for parameters. Replicas of such a mesh, as the data-parallel ones of mesh["tp"], draw
/// the same: for a dropout on it that differs from sample to sample, seed anew with seed + mesh.local_rank("dp") once
/// the parameters are there.
void manual_seed(uint64_t seed);

/// The calling rank's generator for DTensors on `device_type` (CUDA: of the current device). Save and restore its state
/// with get_state() and set_state() to repeat or to checkpoint.
at::Generator dtensor_generator(at::DeviceType device_type);

/// A new generator for plain tensors on `device`, with this seed. Tensors on meta take that of the CPU.
at::Generator new_generator(at::Device device, uint64_t seed);

}  // namespace tessera
