#pragma once
// Token files of Megatron-LM: <prefix>.bin has the ids of all documents, <prefix>.idx where each begins.
//
//   TokenFileWriter writer("wiki_text_document", {.vocab_size = 128256});
//   for (const auto& ids : documents) writer.add(ids);
//   writer.finish();                                   // data::TokenFile{"wiki_text_document"} is a source now
//
// <prefix>.idx, little-endian, for n sequences: "MMIDIDX\0\0", uint64 version 1, uint8 dtype, uint64 n, uint64 d, n x
// int32 lengths in tokens, n x int64 places in .bin in bytes, d x int64 first sequences of documents, the last one n.
// Errors of files are ValueError with the path.
// Thread safety: one thread at a time for a writer. Source: megatron/core/datasets/indexed_dataset.py.

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace tessera::data {

/// Dtypes of ids in files.
enum class TokenDtype { UInt8, UInt16, UInt32, Int32, Int64 };

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
  std::string prefix_;
  std::string unfinished_;  // prefix of files being written
  int64_t vocab_size_;
  std::ofstream bin_;
  std::vector<int32_t> lengths_;
  bool is_finished_ = false;
};

}  // namespace tessera::data
