#pragma once
// Checks that the ranks' local tensors form one DTensor. Each is collective and throws on every rank or on none.

#include <vector>

#include "dtensor/spec/dtensor_spec.h"

namespace tessera {

/// Whether all ranks of the mesh hold the same `values`, of which there are equally many on each.
bool same_on_all_ranks(std::vector<int64_t> values, const DeviceMesh& mesh);

/// Throws ValueError that names `where` if the ranks' tensors differ in dtype or number of dims.
void check_kind_across_ranks(const at::Tensor& local, const DeviceMesh& mesh, const char* where);

/// As errors name the call that took the local tensors, and what of its options the global sizes follow from.
struct SizedBy {
  const char* where;
  const char* remedy;  // goes on with ", the global sizes"
};

/// Throws ValueError if the ranks disagree about the global `shape`, or one holds other local sizes than `spec` says.
void check_sizes_across_ranks(const at::Tensor& local, const std::vector<int64_t>& shape, const DTensorSpec& spec,
                              const SizedBy& by);

/// Throws ValueError if a rank's copy along a replicated axis differs from the first one's.
void check_copies_across_ranks(const at::Tensor& local, const DTensorSpec& spec, const char* where);

}  // namespace tessera
