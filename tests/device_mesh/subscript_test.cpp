// Compiled as C++23. That the same is an error before is in tests/install/install_test.sh.

#include <string>

#include "device_mesh/device_mesh.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

// clang-tidy reads this with a clang that lacks it; any other compiler has to take it.
#if defined(__cpp_multidimensional_subscript) || !defined(__clang__)

namespace tessera {

TEST_CASE("several names in brackets without braces give the sub-mesh of all of them, in order") {
  run_ranks(4, [](int) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 1, 2}, {"pp", "dp", "tp"});
    const std::string pp = "pp";
    TESSERA_EXPECT((mesh["pp", "dp", "tp"] == mesh));
    TESSERA_EXPECT((mesh[pp, "tp"] == mesh[{"pp", "tp"}]));
    TESSERA_EXPECT((mesh["tp", pp] == mesh[{"tp", "pp"}]));
    TESSERA_EXPECT((mesh["tp"].axis_names() == std::vector<std::string>{"tp"}));
    expect_throws<KeyError>([&] { mesh["pp", "td"]; }, "has no axis \"td\"");
  });
}

}  // namespace tessera

#endif
