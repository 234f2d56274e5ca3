#pragma once
// Token files of Megatron-LM: <prefix>.bin contains the ids of all documents, <prefix>.idx their start positions.
//
//   TokenFileWriter writer("wiki_text_document", {.vocab_size = 128256});
//   for (const auto& ids : documents) writer.add(ids);
//   writer.finish();                                   // now data::TokenFile{"wiki_text_document"} is a valid source
//
// Format of <prefix>.idx, little-endian, for n sequences: "MMIDIDX\0\0", uint64 version 1, uint8 dtype, uint64 n,
// uint64 d, n x int32 lengths in tokens, n x int64 offsets in .bin in bytes, d x int64 first sequence of each document,
// with n as the last entry. Dtypes are 1 uint8, 4 int32, 5 int64, 8 uint16; others are not token ids. File errors are
// ValueErrors.
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
  int64_t vocab_size = 0;  // exclusive limit of ids; below 65500, ids are uint16, otherwise int32, as in Megatron
};

/// Writes documents one by one. finish() renames the files to their final names, the .idx last.
class TokenFileWriter {
 public:
  TokenFileWriter(std::string prefix, const TokenFileOptions& options);
  ~TokenFileWriter();  // removes unfinished files
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  /// Adds a document. Throws ValueError if it is empty, has more than 2^31 - 1 ids, or an id outside the vocabulary.
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

/// Contents of an .idx file.
struct TokenIndex {
  TokenDtype dtype = TokenDtype::Int32;
  std::vector<int64_t> starts = {};  // see DocumentParts

  int64_t bytes_of_bin() const { return starts.back() * static_cast<int64_t>(bytes_of(dtype)); }
};

/// Parses an .idx file; `name` is its name in errors. Sequences must be consecutive in the .bin file.
TokenIndex parse_token_index(std::string_view bytes, const std::string& name);

/// Maps a token file.
Documents open_token_file(const std::string& prefix);

/// Maps ids without a header, as written by numpy's tofile(). Each eos_id ends a document; without eos_id, the file is
/// one document.
Documents open_raw_tokens(const std::string& path, TokenDtype dtype, std::optional<int32_t> eos_id);

}  // namespace tessera::data
