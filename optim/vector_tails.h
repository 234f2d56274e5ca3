#pragma once
// Steps the last elements of a shard with the same rounding as all others.
//
// libtorch's fused CPU kernels process elements that do not fill a vector with scalar code, which rounds differently.
// The position of these elements depends on the number of ranks, so they are stepped as parts of full vectors instead:
//
//   const VectorTails tails({&params, &grads, &averages, &squares}, steps);  // before the step
//   op(params, grads, averages, squares, steps);
//   tails.step([&](const auto& lists, const TensorList& steps) { op(lists[0], lists[1], lists[2], lists[3], steps); });

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera::optim {

class VectorTails {
 public:
  using TensorList = std::vector<at::Tensor>;

  /// `lists` holds one list per kind of tensor; a list may be empty. A parameter's tensors have the same index in each.
  /// `steps` has a count per parameter, or is empty. Takes CPU tensors only.
  VectorTails(const std::vector<const TensorList*>& lists, const TensorList& steps);

  /// Steps copies and writes them back, except for the second list, the gradients.
  void step(const std::function<void(const std::vector<TensorList>& lists, const TensorList& steps)>& op) const;

 private:
  /// Parameters with equal step counts.
  struct Group {
    at::Tensor step_count;
    std::vector<size_t> places;  // indices in the lists
    TensorList copies;           // per list, [places, kVector]; undefined for an empty list
  };

  std::vector<const TensorList*> lists_;
  std::vector<Group> groups_;
};

}  // namespace tessera::optim
