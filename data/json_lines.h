#pragma once
// Reads JSON Lines, and chats stored in them. Independent of libtorch. Thread safety: free functions.

#include <cstdint>
#include <functional>
#include <istream>
#include <string>
#include <vector>

#include "text/chat_template.h"
#include "text/json_view.h"

namespace tessera::data {

/// Calls use(value, line) for each nonempty line. `name` is the file's name in errors.
void for_each_json_line(std::istream& lines, const std::string& name,
                        const std::function<void(const text::JsonView& value, uint32_t line)>& use);

/// Returns the messages under `key`. Throws NotImplementedError for content other than text, such as tools.
std::vector<ChatMessage> read_chat(const text::JsonView& line, const std::string& key);

}  // namespace tessera::data
