#pragma once
// JSON Lines, and chats in them. Without libtorch. Thread safety: free functions.

#include <cstdint>
#include <functional>
#include <istream>
#include <string>
#include <vector>

#include "text/chat_template.h"
#include "text/json_view.h"

namespace tessera::data {

/// Calls use(value, line) for each line that is not empty. `name` stands for the file in errors.
void for_each_json_line(std::istream& lines, const std::string& name,
                        const std::function<void(const text::JsonView& value, uint32_t line)>& use);

/// Returns the messages that a line has under `key`. Throws NotImplementedError for more than texts, such as tools.
std::vector<ChatMessage> read_chat(const text::JsonView& line, const std::string& key);

}  // namespace tessera::data
