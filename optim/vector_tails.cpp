#include "optim/vector_tails.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "dtensor/local/dtensor_impl.h"

namespace tessera::optim {

namespace {

constexpr int64_t kVector = 64;  // elements: a multiple of every vector length

/// Returns this rank's elements, which are contiguous.
const at::Tensor& local_of(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return meta ? meta->local : tensor;
}

int64_t tail_length(const at::Tensor& tensor) {
  return local_of(tensor).numel() % kVector;
}

size_t tail_bytes(const at::Tensor& tensor) {
  return static_cast<size_t>(tail_length(tensor)) * local_of(tensor).element_size();
}

char* tail_of(const at::Tensor& tensor) {
  const at::Tensor& local = local_of(tensor);
  return static_cast<char*>(local.mutable_data_ptr()) + local.nbytes() - tail_bytes(tensor);
}

bool lie_alike(const at::Tensor& a, const at::Tensor& b) {
  const auto *of_a = dtensor_meta(a), *of_b = dtensor_meta(b);
  return (of_a == nullptr) == (of_b == nullptr) && local_of(a).strides() == local_of(b).strides() &&
         local_of(a).sizes() == local_of(b).sizes() &&
         (of_a == nullptr || of_a->spec->placements() == of_b->spec->placements());
}

bool has_tail(const std::vector<const VectorTails::TensorList*>& lists, size_t place) {
  const at::Tensor& first = (*lists[0])[place];
  return tail_length(first) > 0 && local_of(first).is_cpu() && local_of(first).is_non_overlapping_and_dense() &&
         std::ranges::all_of(lists,
                             [&](const auto* list) { return list->empty() || lie_alike(first, (*list)[place]); });
}

char* row_of(const at::Tensor& copies, size_t row) {
  return static_cast<char*>(copies.mutable_data_ptr()) + row * kVector * copies.element_size();
}

}  // namespace

VectorTails::VectorTails(const std::vector<const TensorList*>& lists, const TensorList& steps) : lists_(lists) {
  for (size_t place = 0; place < lists[0]->size(); ++place) {
    if (!has_tail(lists, place)) {
      continue;
    }
    const at::Tensor count = steps.empty() ? at::Tensor() : steps[place];
    auto group = std::ranges::find_if(groups_, [&](const Group& own) { return own.step_count.is_same(count); });
    if (group == groups_.end()) {
      group = groups_.insert(groups_.end(), {.step_count = count, .places = {}, .copies = {}});
    }
    group->places.push_back(place);
  }
  for (auto& group : groups_) {
    for (const auto* list : lists_) {
      if (list->empty()) {
        group.copies.emplace_back();
        continue;
      }
      const auto rows = static_cast<int64_t>(group.places.size());
      const at::Tensor copies = at::zeros({rows, kVector}, local_of((*list)[group.places[0]]).options());
      for (size_t row = 0; row < group.places.size(); ++row) {
        const at::Tensor& tensor = (*list)[group.places[row]];
        std::memcpy(row_of(copies, row), tail_of(tensor), tail_bytes(tensor));
      }
      group.copies.push_back(copies);
    }
  }
}

void VectorTails::step(
    const std::function<void(const std::vector<TensorList>& lists, const TensorList& steps)>& op) const {
  for (const auto& group : groups_) {
    std::vector<TensorList> lists;
    lists.reserve(group.copies.size());
    for (const auto& copies : group.copies) {
      lists.push_back(copies.defined() ? TensorList{copies} : TensorList());
    }
    op(lists, group.step_count.defined() ? TensorList{group.step_count} : TensorList());
    for (size_t list = 0; list < lists_.size(); ++list) {
      for (size_t row = 0; row < group.places.size() && list != 1 && group.copies[list].defined(); ++row) {
        const at::Tensor& tensor = (*lists_[list])[group.places[row]];
        std::memcpy(tail_of(tensor), row_of(group.copies[list], row), tail_bytes(tensor));
      }
    }
  }
}

}  // namespace tessera::optim
