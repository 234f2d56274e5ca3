// libFuzzer on config.json: nothing but Error may get out, and what was read is written as what means the same.
//
//   ./bazelw run --config=fuzz //tests/models:fuzz_config -- -max_total_time=600        # needs clang

#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "models/decoder_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto config = tessera::models::parse_config(text, "config.json");
    auto again = tessera::models::parse_config(tessera::models::format_config(config), "again");
    again.other_keys = config.other_keys;  // has the name of an architecture, which is new
    if (again != config) {
      __builtin_trap();
    }
  } catch (const tessera::Error&) {
    return 0;
  }
  return 0;
}
