// libFuzzer on everything that is parsed from files, and on what is done with it before a byte of a tensor is read:
// nothing but CheckpointError may get out.
//
//   ./bazelw run --config=fuzz //tests/checkpoint:fuzz_headers -- -max_total_time=600        # needs clang

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/shard_slice.h"

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

/// A manifest whose content is `text` and whose checksum holds, so that what comes behind it is reached; "" for no
/// JSON.
std::string with_checksum(std::string_view text) {
  const auto content = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (content.is_discarded()) {
    return "";
  }
  const auto canonical = content.dump();
  return fmt::format(R"({{"tessera_checkpoint":1,"checksum":"{:016x}","content":{}}})",
                     hash_bytes(canonical.data(), canonical.size()), canonical);
}

/// As a load does: each tensor's blocks against its sizes, of which the first block says how many dims there are, and
/// what is read of blocks that fit. `size`: of each dim.
void use_blocks(const std::string& key, const std::vector<CheckedBlock>& blocks, int64_t size) {
  std::vector<ShardSlice> slices;
  for (const auto& block : blocks) {
    slices.push_back(block.slice);
  }
  const Sizes tensor(slices.empty() ? 0 : slices[0].sizes.size(), size);
  const std::string file = "f";
  survive([&] {
    check_cover(key, tensor, slices, [&](size_t) -> const std::string& { return file; });
    for (const ShardSlice& slice : slices) {
      extent(slice, tensor);
      split_slice(slice, 1 + size / 2);
      for_each_run(slice, tensor, [](const Run&) {});
    }
  });
}

/// The first byte says which parser gets the rest.
void parse(std::string_view input) {
  const std::string_view text = input.substr(1);
  switch (input[0] % 6) {
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
    case 4:
      // The second byte is the size of each dim.
      survive([&] {
        const auto manifest = parse_manifest(with_checksum(text.substr(text.empty() ? 0 : 1)), "f");
        for (const auto& [name, file] : manifest.files) {
          for (const auto& [key, blocks] : file.tensors) {
            use_blocks(key, blocks, text[0] & 15);
          }
        }
      });
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
