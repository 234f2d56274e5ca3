// Which family a step of a random program is drawn from.

#include "tests/dtensor/random_program_ops.h"

#include "dtensor/dtensor.h"

namespace tessera {

at::Tensor random_program::beside(const at::Tensor& plain, const at::Tensor& other) {
  if (!is_dtensor(other)) {
    return plain;
  }
  return from_local(plain, device_mesh(other), Placements(placements(other).size(), Replicate()));
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
