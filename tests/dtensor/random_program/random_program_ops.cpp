// Which family a step of a random program is drawn from.

#include "tests/dtensor/random_program/random_program_ops.h"

#include "dtensor/dtensor.h"

namespace tessera {

at::Tensor random_program::beside(const at::Tensor& plain, const at::Tensor& other) {
  if (!is_dtensor(other)) {
    return plain;
  }
  return from_local(plain, device_mesh(other), Placements(placements(other).size(), Replicate()));
}

std::optional<Step> random_program::draw_of_one(Scene& scene, std::optional<size_t> value,
                                                const std::vector<OfOne>& ops) {
  if (!value) {
    return std::nullopt;
  }
  const auto& op = scene.draws.of(ops);
  return Step{fmt::format("v{}: {}", *value, op.name), {*value}, [run = op.run](Read x) { return run(x[0]); }};
}

std::optional<Step> random_program::draw_along_dim(Scene& scene, const std::vector<AlongDim>& ops) {
  const auto v = scene.value(1);
  if (!v) {
    return std::nullopt;
  }
  const auto& op = scene.draws.of(ops);
  const int64_t dim = scene.dim_of(*v);
  if (scene.values[*v].size(dim) == 0) {
    return std::nullopt;  // the gradient of parts of an empty dim is a plain tensor, and refused
  }
  return Step{
      fmt::format("v{}: {} of dim {}", *v, op.name, dim), {*v}, [run = op.run, dim](Read x) { return run(x[0], dim); }};
}

std::optional<Step> draw_step(Draws& draws, const Tensors& values) {
  using namespace random_program;
  static const std::vector<DrawFunction> families = {
      unary,       binary,   of_whole_numbers, reduction,   whole_reduction, along_dim, slicing,   reshaping, permuting,
      rearranging, indexing, multiplying,      normalizing, layer,           loss,      along_dim, binary};
  Scene scene{draws, values};
  return draws.of(families)(scene);
}

}  // namespace tessera
