#pragma once
// Texts and chats in files, as token ids. Without libtorch. Thread safety: free functions.

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "data/documents.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace tessera::data {

/// Documents of one file each. What is not UTF-8 counts as U+FFFD.
struct TextFiles {
  std::vector<std::string> paths;
};

/// JSON objects, one a line, that each have a document's text; empty lines are skipped. Must be UTF-8.
struct JsonLines {
  std::vector<std::string> paths;
  std::string key = "text";
};

/// JSON objects, one a line, that each have a list of {"role", "content"}. Only the assistant's answers count for the
/// loss, and there must be one.
struct Chats {
  std::vector<std::string> paths;
  ChatTemplate chat_template;
  std::string key = "messages";
};

struct TokenizeOptions {
  bool add_special_tokens = true;                // as in EncodeOptions; chats have their template's instead
  std::optional<int32_t> eos_id = std::nullopt;  // ends each text that does not end with it anyway; not chats
  int64_t vocab_size = 0;                        // of a cache's ids, if it is known: smaller ones take less room
  int threads = 0;                               // 0: one for each core
};

/// Reads and tokenizes. Throws ValueError with file and line, as "books.jsonl:12", for what is no JSON object of that
/// kind, and NotImplementedError for chats with more than texts, such as tools.
Documents tokenize(const TextFiles& source, const Tokenizer& tokenizer, const TokenizeOptions& options);
Documents tokenize(const JsonLines& source, const Tokenizer& tokenizer, const TokenizeOptions& options);
Documents tokenize(const Chats& source, const Tokenizer& tokenizer, const TokenizeOptions& options);

/// Maps the token file at `prefix`, made before from these texts, or else makes it. Throws ValueError if it was made
/// from other files, by another tokenizer or with other options, as far as a sample of all of them tells.
Documents tokenize_cached(const std::variant<TextFiles, JsonLines>& source, const Tokenizer& tokenizer,
                          const TokenizeOptions& options, const std::string& prefix);

}  // namespace tessera::data
