// What the engine may do in a step beside the model's own work: in instructions, since times of so little vary more
// than they are. A change that makes a unit dearer fails here; one that makes it cheaper may lower the limit.

#include "testing/callgrind.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("the instructions of a unit's step beyond the plain model's stay within a limit") {
  const auto counts = run_probe("tests/fully_shard/engine_cost_probe");
  if (counts.empty()) {
    return;  // it said why
  }
  constexpr int kUnits = 16 + 1;  // blocks, and the root
  const double beyond = (counts.at("sharded") - counts.at("plain")) / kUnits;
  INFO("a unit of 12 parameters: " << beyond << " instructions beyond the plain model's step of "
                                   << counts.at("plain"));
  CHECK(beyond > 0);
  // As counted with g++ 12 -O2 and libtorch 2.15.0, and a fortieth: what malloc finds in the heap moves it by 1,500.
  CHECK(beyond <= 100600);

  const double few = counts.at("parts 400") / 400, many = counts.at("parts 1600") / 1600;
  INFO("to find a parameter in a unit: " << few << " instructions of 400, " << many << " of 1600");
  CHECK(many > 0);
  CHECK(many < 1.2 * few);  // a search in a sorted list grows as well, a little; what is squared has 4 times
}

}  // namespace tessera::testing
