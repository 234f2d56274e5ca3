#pragma once
// The reduction of a unit's gradients: copy-in of all gradients into one buffer, laid out as the flat shards
// are, one reduce-scatter with average, and each parameter's rows as views of the result.
//
// Beside the gradients each rank sends one flag a parameter: whether it has a gradient at all. Their sum tells
// every rank which parameters were used by some rank, so that a parameter that only some ranks used gets the
// average with zeros for the others, and one that none used keeps an undefined gradient (the optimizer then
// leaves it alone, as in one process). The collective's size never depends on what was used, so ranks that
// use different parameters cannot disagree on it (compare pytorch issue 170667).

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/process_group.h"
#include "fully_shard/param_layout.h"

namespace tessera {

struct GradientReduction {
  at::Device device;
  at::ScalarType reduce_dtype;
  at::ScalarType grad_dtype;  // of the result
  int64_t rank;               // in the group
};

/// `grads[i]`: the full gradient of parameter i, or undefined. Returns this rank's rows of the average, 1-D, as
/// views of one buffer; undefined where no rank has a gradient. Collective.
std::vector<at::Tensor> reduce_scatter_grads(std::vector<at::Tensor> grads, const ParamLayout& layout,
                                             const GradientReduction& options, const ProcessGroupPtr& group);

}  // namespace tessera
