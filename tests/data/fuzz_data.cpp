// libFuzzer on what files of data have: nothing but Error may get out.
//
//   ./bazelw run --config=fuzz //tests/data:fuzz_data -- -max_total_time=600        # needs clang

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

#include "base/error.h"
#include "data/json_lines.h"
#include "data/token_file.h"

namespace {

using tessera::text::JsonView;

void read_index(std::string_view bytes) {
  const auto index = tessera::data::parse_token_index(bytes, "fuzz.idx");
  for (size_t i = 0; i + 1 < index.starts.size(); ++i) {
    if (index.starts[i] < 0 || index.starts[i] > index.starts[i + 1]) {
      __builtin_trap();
    }
  }
}

void read_chats(std::string_view bytes, const tessera::ChatTemplate& chat_template) {
  std::istringstream lines{std::string(bytes)};
  tessera::data::for_each_json_line(lines, "fuzz.jsonl", [&](const JsonView& object, uint32_t) {
    const auto chat = chat_template.render(tessera::data::read_chat(object, "messages"));
    for (const auto& range : chat.assistant) {
      if (range.begin > range.end || range.end > chat.text.size()) {
        __builtin_trap();
      }
    }
  });
}

}  // namespace

/// The first byte says what the rest is: an .idx, or chats for one of four templates.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) {
    return 0;
  }
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const char* const names[] = {"chatml", "qwen3", "llama2", "gemma3"};
  try {
    if (data[0] % 8 < 4) {
      read_index(bytes);
    } else {
      read_chats(bytes, tessera::ChatTemplate::named(names[data[0] % 4]));
    }
  } catch (const tessera::Error&) {
    return 0;
  }
  return 0;
}
