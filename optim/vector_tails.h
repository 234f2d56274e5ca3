#pragma once
// The last elements of a shard, stepped like all others.
//
// libtorch's fused kernels on the CPU compute what does not fill a vector by scalar code, which rounds otherwise, and
// where a shard ends depends on the number of ranks. So these elements are stepped as parts of full vectors too:
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

  /// `lists`: a parameter's tensors at the same place in each, or empty. `steps`: as many step counts, or none. Takes
  /// tensors on the CPU only.
  VectorTails(const std::vector<const TensorList*>& lists, const TensorList& steps);

  /// Steps the copies and writes them to where they come from, except for the second list, the gradients.
  void step(const std::function<void(const std::vector<TensorList>& lists, const TensorList& steps)>& op) const;

 private:
  /// Parameters with one step count.
  struct Group {
    at::Tensor step_count;
    std::vector<size_t> places;  // in the lists
    TensorList copies;           // one a list, [places, kVector]; undefined for an empty list
  };

  std::vector<const TensorList*> lists_;
  std::vector<Group> groups_;
};

}  // namespace tessera::optim
