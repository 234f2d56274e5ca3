// What the model refuses. That it trains is shown wherever a test trains one.

#include "examples/gpt_model.h"

#include "base/error.h"
#include "third_party/catch2/catch.h"

namespace tessera::examples {
namespace {

TEST_CASE("heads that do not divide the dim are named") {
  for (const int64_t heads : {0, 3, -4}) {
    CHECK_THROWS_WITH(Gpt(GptConfig{.dim = 16, .heads = heads}, /*seed=*/1),
                      Catch::Matchers::ContainsSubstring("dim 16, heads " + std::to_string(heads)));
  }
  CHECK_THROWS_AS(Gpt(GptConfig{.dim = 0}, /*seed=*/1), ValueError);
  CHECK_NOTHROW(Gpt(GptConfig{.dim = 16, .layers = 1, .heads = 16}, /*seed=*/1));
}

}  // namespace
}  // namespace tessera::examples
