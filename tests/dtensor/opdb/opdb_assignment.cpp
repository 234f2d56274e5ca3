#include "tests/dtensor/opdb/opdb_assignment.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <random>

#include "base/error.h"
#include "tests/dtensor/from_term.h"

namespace tessera {

namespace {

constexpr size_t kMaxAssignments = 24;

constexpr ReduceOp kReductions[] = {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min};

/// Whether values of this dtype can be partial without rounding.
bool can_be_partial(ReduceOp reduction, at::ScalarType dtype, const std::vector<int64_t>& mesh) {
  const bool is_complex = c10::isComplexType(dtype);
  if (reduction == ReduceOp::Max || reduction == ReduceOp::Min) {
    return dtype != at::kBool && !is_complex;
  }
  if (reduction == ReduceOp::Avg) {
    const auto is_exact = [](int64_t size) { return std::has_single_bit(static_cast<uint64_t>(size)); };
    return (is_complex || c10::isFloatingType(dtype)) && std::all_of(mesh.begin(), mesh.end(), is_exact);
  }
  return dtype != at::kBool;
}

/// What a tensor may be on an axis. One reduction a tensor: ranks cannot take the greatest of sums, and the reverse.
std::vector<Placement> axis_choices(const at::Tensor& tensor, ReduceOp reduction, const std::vector<int64_t>& mesh) {
  std::vector<Placement> result{Replicate()};
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    result.emplace_back(Shard(dim));
  }
  if (can_be_partial(reduction, tensor.scalar_type(), mesh)) {
    result.emplace_back(Partial(reduction));
  }
  return result;
}

Assignment draw_assignment(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& mesh,
                           std::mt19937& random) {
  Assignment result;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto reduction = kReductions[random() % 2 == 0 ? 0 : random() % std::size(kReductions)];
    const auto options = axis_choices(tensors[i], reduction, mesh);
    Placements placements;
    for (size_t axis = 0; axis < mesh.size(); ++axis) {
      placements.push_back(options[random() % options.size()]);
    }
    result.label += fmt::format("{}{}:{}", i == 0 ? "" : " ", i, to_string(placements));
    result.placements[i] = placements;
  }
  return result;
}

/// The part that the rank at `coordinate` of `size` has: 2t, -t, 0, ... of a sum, n*t, 0, ... of an average, -t, -1, 1,
/// ... of a product, and all but the last less than the greatest or more than the least.
at::Tensor part(const at::Tensor& whole, ReduceOp reduction, int64_t coordinate, int64_t size) {
  const bool is_last = coordinate == size - 1;
  switch (reduction) {
    case ReduceOp::Sum: {
      const auto rest = coordinate == 0 ? whole : at::zeros_like(whole);
      const auto own = coordinate == 0 ? whole + whole : coordinate == 1 ? -whole : rest;
      return at::where(at::isfinite(whole + whole), own, rest);
    }
    case ReduceOp::Avg: {
      const auto scaled = whole * size;
      const auto own = coordinate == 0 ? scaled : at::zeros_like(whole);
      return at::where(at::isfinite(scaled), own, whole);
    }
    case ReduceOp::Product:
      return coordinate == 0 ? -whole : at::full_like(whole, coordinate == 1 ? -1 : 1);
    case ReduceOp::Max:
      return is_last ? whole : at::where(whole > 0, whole - 1, whole);
    case ReduceOp::Min:
      return is_last ? whole : at::where(whole < 0, whole + 1, whole);
  }
  TESSERA_ASSERT(false, "no such reduction");
}

}  // namespace

std::vector<Assignment> assignments(const OpdbCase& test) {
  const auto tensors = test.tensors();
  std::vector<Assignment> singles, together;
  int64_t max_dim = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    max_dim = std::max(max_dim, tensors[i].dim());
    for (int64_t dim = 0; dim < tensors[i].dim(); ++dim) {
      singles.push_back({fmt::format("{}S{}", i, dim), {{i, {Shard(dim)}}}});
    }
  }
  for (int64_t dim = 0; dim < max_dim; ++dim) {
    Assignment all{fmt::format("*S{}", dim), {}};
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].dim() > dim) {
        all.placements[i] = {Shard(dim)};
      }
    }
    if (all.placements.size() > 1) {
      together.push_back(std::move(all));
    }
  }
  std::vector<Assignment> result{{"R", {}}};
  const size_t room = kMaxAssignments - 1 - together.size();
  const size_t taken = std::min(room, singles.size());
  for (size_t k = 0; k < taken; ++k) {
    result.push_back(singles[k * singles.size() / taken]);
  }
  result.insert(result.end(), together.begin(), together.end());
  return result;
}

std::vector<Assignment> drawn_assignments(const OpdbCase& test, const std::vector<int64_t>& mesh, int count) {
  std::seed_seq seed(test.id.begin(), test.id.end());
  std::mt19937 random(seed);
  const auto tensors = test.tensors();
  std::vector<Assignment> result;
  for (int i = 0; i < count; ++i) {
    result.push_back(draw_assignment(tensors, mesh, random));
  }
  return result;
}

at::Tensor place_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements) {
  auto term = tensor;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].is_partial() && mesh.shape()[axis] > 1) {
      term = part(term, placements[axis].reduce_op(), mesh.coordinate()[axis], mesh.shape()[axis]);
    }
  }
  return from_term(term, mesh, placements);
}

}  // namespace tessera
