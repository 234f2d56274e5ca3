#pragma once
// Token files of Megatron-LM: <prefix>.bin has the ids of all documents, <prefix>.idx where each begins.
//
//   TokenFileWriter writer("wiki_text_document", {.vocab_size = 128256});
//   for (const auto& ids : documents) writer.add(ids);
//   writer.finish();                                   // data::TokenFile{"wiki_text_document"} is a source now
//
// <prefix>.idx, little-endian, for n sequences: "MMIDIDX\0\0", uint64 version 1, uint8 dtype, uint64 n, uint64 d, n x
// int32 lengths in tokens, n x int64 places in .bin in bytes, d x int64 first sequences of documents, the last one n.
// Dtypes are 1 uint8, 4 int32, 5 int64, 8 uint16; others are no token ids. Errors of files are ValueErrors.
//
// Thread safety: one thread at a time for a writer. Source: megatron/core/datasets/indexed_dataset.py.

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/documents.h"

namespace tessera::data {

struct TokenFileOptions {
  int64_t vocab_size = 0;  // ids are below; fewer than 65500 are written as uint16, more as int32, as Megatron does
};

/// Writes documents one by one. The files get their names in finish(), the .idx last: until then there are none.
class TokenFileWriter {
 public:
  TokenFileWriter(std::string prefix, const TokenFileOptions& options);
  ~TokenFileWriter();  // removes what is not finished
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  /// Adds a document. Throws ValueError if it has no ids, more than 2^31 - 1, or one that is not in the vocabulary.
  void add(const std::vector<int32_t>& ids);
  void finish();

 private:
  void write_index(const std::string& path) const;

  std::string prefix_;
  std::string unfinished_;  // prefix of the files being written
  int64_t vocab_size_;
  TokenDtype dtype_;
  std::ofstream bin_;
  std::vector<int32_t> lengths_;
};

/// Contents of an .idx.
struct TokenIndex {
  TokenDtype dtype = TokenDtype::Int32;
  std::vector<int64_t> starts = {};  // see DocumentParts

  int64_t bytes_of_bin() const { return starts.back() * static_cast<int64_t>(bytes_of(dtype)); }
};

/// Reads the content of an .idx; `name` stands for it in errors. Sequences must follow each other in the .bin.
TokenIndex parse_token_index(std::string_view bytes, const std::string& name);

/// Maps a token file.
Documents open_token_file(const std::string& prefix);

/// Maps ids without a header, as numpy's tofile() writes them. Without eos_id, the file is one document, else each id
/// of it ends one.
Documents open_raw_tokens(const std::string& path, TokenDtype dtype, std::optional<int32_t> eos_id);

}  // namespace tessera::data
