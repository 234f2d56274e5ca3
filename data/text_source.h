#pragma once
// Tokenizes texts and chats from files. Independent of libtorch. Thread safety: free functions.

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "data/documents.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace tessera::data {

/// Files with one document each. Invalid UTF-8 is read as U+FFFD.
struct TextFiles {
  std::vector<std::string> paths;
};

/// Files with one JSON object per line, each containing a document's text. Skips empty lines. Must be UTF-8.
struct JsonLines {
  std::vector<std::string> paths;
  std::string key = "text";
};

/// Files with one JSON object per line, each containing a list of {"role", "content"}. Only the assistant's answers
/// count for the loss; at least one is required.
struct Chats {
  std::vector<std::string> paths;
  ChatTemplate chat_template;
  std::string key = "messages";
};

struct TokenizeOptions {
  bool add_special_tokens = true;                // as in EncodeOptions; chats use their template's tokens instead
  std::optional<int32_t> eos_id = std::nullopt;  // appended to each text unless already its last token; not to chats
  int64_t vocab_size = 0;                        // if known, a small vocabulary makes the cache file smaller
  int threads = 0;                               // 0: one per core
};

/// Reads and tokenizes a source. Throws ValueError, with the place as "books.jsonl:12", for malformed objects, and
/// NotImplementedError for chats with content other than text, such as tools.
Documents tokenize(const TextFiles& source, const Tokenizer& tokenizer, const TokenizeOptions& options);
Documents tokenize(const JsonLines& source, const Tokenizer& tokenizer, const TokenizeOptions& options);
Documents tokenize(const Chats& source, const Tokenizer& tokenizer, const TokenizeOptions& options);

/// Maps the token file at `prefix` if it was already made from these texts; otherwise creates it. Throws ValueError if
/// it was made from other files, with another tokenizer, or with other options, as detected from a sample of them.
Documents tokenize_cached(const std::variant<TextFiles, JsonLines>& source, const Tokenizer& tokenizer,
                          const TokenizeOptions& options, const std::string& prefix);

}  // namespace tessera::data
