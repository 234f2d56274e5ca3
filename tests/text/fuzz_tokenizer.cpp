// libFuzzer on files and texts: nothing but Error may get out, and a stream of ids must decode as all of them do.
//
//   ./bazelw run --config=fuzz //tests/text:fuzz_tokenizer -- -max_total_time=600        # needs clang

#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"
#include "text/tokenizer.h"

namespace {

using tessera::Tokenizer;

void use(const Tokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.encode(text);
  auto stream = tokenizer.decode_stream();
  std::string streamed;
  for (const int32_t id : ids) {
    streamed += stream.put(id);
  }
  streamed += stream.finish();
  if (streamed != tokenizer.decode(ids)) {
    __builtin_trap();
  }
  tokenizer.encode_batch({text, text}, 2);
}

}  // namespace

/// The first line is the file, the rest the text.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t line = input.find('\n');
  if (line != std::string_view::npos) {
    try {
      use(Tokenizer::from_json(input.substr(0, line)), input.substr(line + 1));
    } catch (const tessera::Error&) {
      return 0;
    }
  }
  return 0;
}
