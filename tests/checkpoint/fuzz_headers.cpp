// libFuzzer on everything that is parsed from files: nothing but CheckpointError may get out.
//
//   ./bazelw run --config=fuzz //tests/checkpoint:fuzz_headers -- -max_total_time=600        # needs clang

#include <cstdint>
#include <string_view>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"

namespace {

using namespace tessera::dcp;

template <class Parse>
void survive(Parse parse) {
  try {
    parse();
  } catch (const tessera::CheckpointError&) {
    return;
  }
}

/// The first byte says which parser gets the rest.
void parse(std::string_view input) {
  const std::string_view text = input.substr(1);
  switch (input[0] % 5) {
    case 0:
      // The second byte is the length of the data, so that offsets can be right.
      survive([&] {
        parse_safetensors_header(text.substr(text.empty() ? 0 : 1),
                                 text.empty() ? 0 : static_cast<unsigned char>(text[0]), "f");
      });
      break;
    case 1:
      survive([&] { parse_header_length(text, text.size() + 1000, "f"); });
      break;
    case 2:
      survive([&] { parse_manifest(text, "f"); });
      break;
    case 3:
      survive([&] { parse_index(text, "f"); });
      break;
    default:
      survive([&] { parse_sharding_info(text, "f"); });
      survive([&] { parse_values(text, "f"); });
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 0) {
    parse({reinterpret_cast<const char*>(data), size});
  }
  return 0;
}
