#pragma once
// Documents as token ids, one after the other, in memory or in a mapped file. Without libtorch.
// Thread safety: values, which any number of threads may read.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera::data {

/// Dtypes of ids in files.
enum class TokenDtype { UInt8, UInt16, UInt32, Int32, Int64 };

size_t bytes_of(TokenDtype dtype);

/// Line of a file; the first is 1.
struct DocumentOrigin {
  uint32_t file = 0;  // in DocumentParts::files
  uint32_t line = 0;  // 0 for a whole file
};

struct DocumentParts {
  std::vector<std::string> files = {};          // that they were read from
  std::shared_ptr<const void> owner = nullptr;  // keeps `ids` where they are
  const void* ids = nullptr;                    // need not be aligned
  TokenDtype dtype = TokenDtype::Int32;
  std::vector<int64_t> starts = {0};         // first token of each document, and the number of tokens
  std::vector<uint8_t> counts = {};          // by token, whether the loss is of it; empty: of all
  std::vector<DocumentOrigin> origins = {};  // by document; empty: documents are counted
};

class Documents {
 public:
  /// Takes documents, and leaves out those without tokens. Throws ValueError, with the files, if none is left.
  explicit Documents(DocumentParts parts);

  int64_t num_documents() const { return static_cast<int64_t>(parts_.starts.size()) - 1; }
  int64_t num_tokens() const { return parts_.starts.back(); }
  const std::vector<int64_t>& starts() const { return parts_.starts; }
  /// Returns "books.jsonl:12", or "wiki.bin, document 7", where the first is 0.
  std::string place(int64_t document) const;

  /// Copies the ids of tokens begin, begin + 1, ..., end - 1.
  void copy_ids(int64_t begin, int64_t end, int64_t* ids) const;
  bool counts(int64_t token) const { return parts_.counts.empty() || parts_.counts[static_cast<size_t>(token)] != 0; }

  /// Throws ValueError, with the place, unless all ids are from 0 to vocab_size - 1.
  void check_ids(int64_t vocab_size) const;
  /// Returns "812 tokens of 7 documents, XXH3 0123456789abcdef", of all lengths and of ids that are spread evenly: all
  /// of them up to a million.
  std::string fingerprint() const;

 private:
  DocumentParts parts_;
};

}  // namespace tessera::data
