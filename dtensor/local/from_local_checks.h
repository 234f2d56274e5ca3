#pragma once
// Checks that the ranks' local tensors form one DTensor. All ranks must call them; they throw on every rank or on none.

#include <vector>

#include "dtensor/spec/dtensor_spec.h"

namespace tessera {

/// Returns whether all ranks of the mesh have the same `values`, in the same number.
bool same_on_all_ranks(std::vector<int64_t> values, const DeviceMesh& mesh);

/// Throws ValueError, naming `where`, if dtypes or numbers of dims differ between ranks.
void check_kind_across_ranks(const at::Tensor& local, const DeviceMesh& mesh, const char* where);

/// Names for error messages: the call, and how to set the global sizes.
struct SizedBy {
  const char* where;
  const char* remedy;  // continued by ", the global sizes"
};

/// Throws ValueError if ranks disagree about the global `shape`, or one has other local sizes than `spec`.
void check_sizes_across_ranks(const at::Tensor& local, const std::vector<int64_t>& shape, const DTensorSpec& spec,
                              const SizedBy& by);

/// Throws ValueError if a copy along a replicated axis differs from the first one.
void check_copies_across_ranks(const at::Tensor& local, const DTensorSpec& spec, const char* where);

}  // namespace tessera
