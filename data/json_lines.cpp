#include "data/json_lines.h"

#include <fmt/format.h>

#include "base/error.h"

namespace tessera::data {

void for_each_json_line(std::istream& lines, const std::string& name,
                        const std::function<void(const text::JsonView& value, uint32_t line)>& use) {
  std::string content;
  for (uint32_t line = 1; std::getline(lines, content); ++line) {
    if (content.find_first_not_of(" \t\r") == std::string::npos) {
      continue;
    }
    const auto place = fmt::format("{}:{}", name, line);
    const auto parsed = text::parse_json(content, place);
    use(text::JsonView(parsed, place), line);
  }
  TESSERA_CHECK(ValueError, !lines.bad(), "{}: reading failed", name);
}

std::vector<ChatMessage> read_chat(const text::JsonView& line, const std::string& key) {
  TESSERA_CHECK(NotImplementedError, !line.has("tools"), "{}.tools: chats with tools are not supported", line.path());
  std::vector<ChatMessage> messages;
  for (const auto& message : line.at(key.c_str()).elements()) {
    for (const auto& [name, value] : message.as_object()) {
      TESSERA_CHECK(NotImplementedError, value.is_null() || name == "role" || name == "content",
                    "{}.{}: is not supported; messages have \"role\" and \"content\"", message.path(), name);
    }
    messages.push_back({message.at("role").as_string(), message.at("content").as_string()});
  }
  return messages;
}

}  // namespace tessera::data
