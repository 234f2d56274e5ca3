#include "fully_shard/layout/gather_tag.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "fully_shard/layout/param_layout.h"

namespace tessera {

namespace {

// Exclusive limit of a digit: float8 (e5m2) represents no larger integers exactly, and parameters may have any dtype.
constexpr int64_t kDigit = 8;
static_assert(kTagNumel <= kSlotAlignment);

}  // namespace

void write_tag(const at::Tensor& flat_shard, const GatherTag& tag) {
  if (!flat_shard.device().is_cpu()) {
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  std::array<int64_t, kTagNumel> digits{};
  int64_t rest = tag.unit;
  for (int64_t i = 0; i < kUnitDigits; ++i, rest /= kDigit) {
    digits[static_cast<size_t>(i)] = rest % kDigit;
  }
  digits.back() = static_cast<int64_t>(tag.fault);
  flat_shard.narrow(0, flat_shard.numel() - kSlotAlignment, kTagNumel)
      .copy_(at::from_blob(digits.data(), {kTagNumel}, at::kLong));
}

GatherTag read_tag(const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto numbers = from.narrow(0, 0, kTagNumel).to(at::kLong);
  const auto* const digits = numbers.const_data_ptr<int64_t>();
  int64_t unit = 0;
  for (int64_t i = kUnitDigits; i-- > 0;) {
    unit = unit * kDigit + digits[i];
  }
  const auto fault = std::clamp<int64_t>(digits[kUnitDigits], 0, kShardFaultCount - 1);
  return {.unit = unit, .fault = static_cast<ShardFault>(fault)};
}

void check_unit_count(size_t units, const std::string& api, const std::string& label) {
  TESSERA_CHECK(StateError, units <= size_t{kMaxUnits},
                "{0}: {1} and the modules in it are {2} units, of at most {3}; make larger units, or pass a list of "
                "modules to one call of {0}, which makes them one unit",
                api, label, units, kMaxUnits);
}

}  // namespace tessera
