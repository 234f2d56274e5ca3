#pragma once
// The families of ops that random programs draw from; internal to random_program_ops.cpp and its like.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <vector>

#include "tests/dtensor/random_program/random_program.h"

namespace tessera::random_program {

/// What a drawing function needs: random numbers, and which values there are.
struct Scene {
  Draws& draws;
  const Tensors& values;

  /// A floating value of at least `min_dims` dims.
  std::optional<size_t> value(int64_t min_dims = 0, int64_t max_dims = 9) {
    return one_that(
        [=](const at::Tensor& v) { return v.is_floating_point() && v.dim() >= min_dims && v.dim() <= max_dims; });
  }
  /// One that is not floating: an argmax, a comparison.
  std::optional<size_t> whole_numbers() {
    return one_that([](const at::Tensor& v) { return !v.is_floating_point(); });
  }
  int64_t dim_of(size_t value) { return draws.below(values[value].dim()); }
  std::vector<int64_t> some_dims_of(size_t value) {
    std::vector<int64_t> dims;
    for (int64_t dim = 0; dim < values[value].dim(); ++dim) {
      if (draws.one_in(2)) {
        dims.push_back(dim);
      }
    }
    return dims;
  }

 private:
  template <class Predicate>
  std::optional<size_t> one_that(Predicate fits) {
    std::vector<size_t> fitting;
    for (size_t i = 0; i < values.size(); ++i) {
      if (fits(values[i])) {
        fitting.push_back(i);
      }
    }
    return fitting.empty() ? std::nullopt : std::optional(draws.of(fitting));
  }
};

using DrawFunction = std::optional<Step> (*)(Scene&);
using Read = const Tensors&;

struct OfOne {
  const char* name;
  at::Tensor (*run)(const at::Tensor&);
};
/// One of `ops` on `value`; none if there is no value.
std::optional<Step> draw_of_one(Scene& scene, std::optional<size_t> value, const std::vector<OfOne>& ops);

struct AlongDim {
  const char* name;
  at::Tensor (*run)(const at::Tensor&, int64_t dim);
};
/// One of `ops` along a dim that is not empty.
std::optional<Step> draw_along_dim(Scene& scene, const std::vector<AlongDim>& ops);

/// A plain tensor as the DTensor that goes with `other`, if that is one.
at::Tensor beside(const at::Tensor& plain, const at::Tensor& other);

// Element by element, in random_program_pointwise.cpp.
std::optional<Step> unary(Scene& scene);
std::optional<Step> binary(Scene& scene);
std::optional<Step> of_whole_numbers(Scene& scene);

// In random_program_reductions.cpp.
std::optional<Step> reduction(Scene& scene);
std::optional<Step> whole_reduction(Scene& scene);
std::optional<Step> along_dim(Scene& scene);

// Views and what moves elements, in random_program_shapes.cpp.
std::optional<Step> slicing(Scene& scene);
std::optional<Step> reshaping(Scene& scene);
std::optional<Step> permuting(Scene& scene);
std::optional<Step> rearranging(Scene& scene);
std::optional<Step> indexing(Scene& scene);

// In random_program_layers.cpp.
std::optional<Step> multiplying(Scene& scene);
std::optional<Step> normalizing(Scene& scene);
std::optional<Step> layer(Scene& scene);
std::optional<Step> loss(Scene& scene);

}  // namespace tessera::random_program
