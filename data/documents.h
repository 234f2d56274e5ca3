#pragma once
// Consecutive documents as token ids, in memory or in a mapped file. Independent of libtorch.
// Thread safety: values; any number of threads may read them.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera::data {

/// Dtypes of token ids in files.
enum class TokenDtype { UInt8, UInt16, UInt32, Int32, Int64 };

size_t bytes_of(TokenDtype dtype);

/// File and line of a document; lines start at 1.
struct DocumentOrigin {
  uint32_t file = 0;  // index in DocumentParts::files
  uint32_t line = 0;  // 0 for a whole file
};

struct DocumentParts {
  std::vector<std::string> files = {};          // source files
  std::shared_ptr<const void> owner = nullptr;  // owns the memory of `ids`
  const void* ids = nullptr;                    // may be unaligned
  TokenDtype dtype = TokenDtype::Int32;
  std::vector<int64_t> starts = {0};         // first token of each document, then the number of tokens
  std::vector<uint8_t> counts = {};          // per token, whether it counts for the loss; empty: all do
  std::vector<DocumentOrigin> origins = {};  // per document; empty: documents are identified by index
};

class Documents {
 public:
  /// Takes documents and drops empty ones. Throws ValueError, with the files, if none is left.
  explicit Documents(DocumentParts parts);

  int64_t num_documents() const { return static_cast<int64_t>(parts_.starts.size()) - 1; }
  int64_t num_tokens() const { return parts_.starts.back(); }
  const std::vector<int64_t>& starts() const { return parts_.starts; }
  /// Returns the document's place for messages: "books.jsonl:12", or "wiki.bin, document 7" (counted from 0).
  std::string place(int64_t document) const;

  /// Copies the ids of tokens [begin, end).
  void copy_ids(int64_t begin, int64_t end, int64_t* ids) const;
  bool counts(int64_t token) const { return parts_.counts.empty() || parts_.counts[static_cast<size_t>(token)] != 0; }

  /// Throws ValueError, with the place, unless all ids are in [0, vocab_size).
  void check_ids(int64_t vocab_size) const;
  /// Returns "812 tokens of 7 documents, XXH3 0123456789abcdef". The hash covers all lengths and evenly spaced ids (all
  /// of them up to a million).
  std::string fingerprint() const;

 private:
  DocumentParts parts_;
};

}  // namespace tessera::data
