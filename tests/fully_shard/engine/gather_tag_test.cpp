#include "fully_shard/layout/gather_tag.h"

#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include "base/error.h"
#include "fully_shard/layout/param_layout.h"
#include "third_party/catch2/catch.h"

namespace tessera {

TEST_CASE("a gather's tag is read as it was written, in all dtypes of numbers and for all units") {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kFloat8_e4m3fn, at::kFloat8_e5m2,
                           at::kByte, at::kChar, at::kLong, at::kComplexFloat}) {
    for (const int64_t unit : {0, 1, 7, 8, 17, 63, 64, 100, 4095, 4096, 65537, (1 << 18) - 1}) {
      const GatherTag tag{.unit = unit, .fault = ShardFault::MaybeChanged};
      const auto flat = at::zeros({3 * kSlotAlignment}, dtype);
      write_tag(flat, tag);
      INFO(c10::toString(dtype) << ", unit " << unit);
      CHECK(read_tag(flat.narrow(0, 2 * kSlotAlignment, kSlotAlignment)) == tag);
    }
  }
}

TEST_CASE("a tree of more units than a tag can tell apart is refused") {
  CHECK_NOTHROW(check_unit_count(1 << 18, "fully_shard", "Net"));
  CHECK_THROWS_AS(check_unit_count((1 << 18) + 1, "fully_shard", "Net"), StateError);
  CHECK_THROWS_WITH(check_unit_count((1 << 18) + 1, "fully_shard", "Net"),
                    "fully_shard: Net and the modules in it are 262145 units, of at most 262144; make larger units, or "
                    "pass a list of modules to one call of fully_shard, which makes them one unit");
}

}  // namespace tessera
