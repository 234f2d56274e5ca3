#pragma once
// Those of torch::nn::init that need all of a parameter at once, or write to single elements, for DTensors; the others
// (normal_, uniform_, constant_, xavier_*, kaiming_*) take DTensors as they are.
//
//   fully_shard(policy, {.mesh = mesh});
//   tessera::manual_seed(0);                                              // dtensor/random/random.h
//   tessera::init::orthogonal_(policy->head->weight, std::sqrt(2.0));
//
// gives the values that torch::nn::init's function of the same name gives on one device after at::manual_seed(0),
// whatever the placements and the number of ranks: every rank makes the whole parameter on the CPU and keeps its own
// part, with no communication. A plain tensor goes to torch::nn::init. No gradient is recorded. All ranks must call.
//
// Errors: ValueError on every rank for another number of dims, or a DTensor with a pending reduction.
// Thread safety: as writing to the parameter, and as dtensor/random/random.h.

#include <ATen/core/Tensor.h>

namespace tessera::init {

/// A (semi-)orthogonal matrix times `gain`; dims past the first are flattened. At least 2 dims. (A. Saxe et al.: Exact
/// solutions to the nonlinear dynamics of learning in deep linear neural networks, 2013.)
at::Tensor orthogonal_(at::Tensor tensor, double gain = 1);

/// The identity matrix. 2 dims.
at::Tensor eye_(at::Tensor tensor);

/// A convolution's weight that hands on as many channels as it can. 3 to 5 dims.
at::Tensor dirac_(at::Tensor tensor);

}  // namespace tessera::init
