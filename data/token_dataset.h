#pragma once
// Batches of token ids from texts, chats and token files. They are equal on any number of ranks, and resumable from a
// few integers.
//
//   data::TokenDataset dataset({.sources = {{.source = data::JsonLines{{"books.jsonl"}}, .weight = 0.7},
//                                           {.source = data::TokenFile{"wiki_text_document"}, .weight = 0.3}},
//                               .tokenizer = Tokenizer::from_file("llama/tokenizer.json"),
//                               .eos_id = 128001,
//                               .sequence_length = 2048,
//                               .seed = 1});
//   const auto batch = dataset.next_batch(64, {.rank = dp_rank, .ranks = dp_size});   // 64 samples over all ranks
//   const auto logits = model->forward(batch.ids, {.segment_ids = batch.segment_ids});
//   models::next_token_loss(logits, batch.labels).backward();
//   ...
//   state.user.merge(dataset.state_dict());                                           // save in a checkpoint
//   dcp::load(path, state);
//   dataset.load_state_dict(state.user);
//
// Global sample i, and therefore the batch of samples i to i + 63, depends only on the data, the options and i. Within
// a source, each epoch has a new sample order. Sources alternate by weight; a small source goes through more epochs.
//
// Texts are tokenized when the dataset is opened, and take 4 bytes per token in memory unless they have a cache file.
// Token files are mapped and must not change while open. Errors are ValueErrors unless noted, and name the file and the
// line, document or byte. docs/data.md describes formats and details.
// Thread safety: one thread at a time for next_batch and load_state_dict; any number for const functions.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "checkpoint/format/state.h"
#include "data/documents.h"
#include "data/text_source.h"
#include "device_mesh/device_mesh.h"
#include "text/tokenizer.h"

namespace tessera::data {

/// Megatron-LM's <prefix>.idx and <prefix>.bin; see token_file.h.
struct TokenFile {
  std::string prefix;
};

/// Token ids without a header, as written by numpy's tofile(). Each eos_id ends a document.
struct RawTokens {
  std::string path;
  TokenDtype dtype = TokenDtype::UInt16;
};

struct DataSource {
  std::variant<TextFiles, JsonLines, Chats, TokenFile, RawTokens> source;  // text_source.h has the first three
  double weight = 1;       // share of the samples, relative to other sources
  std::string cache = {};  // for TextFiles and JsonLines: prefix of a token file to map, created on first use
};

enum class Fill {
  Pack,  // concatenate documents and split them into samples; the end of the last sample is padding
  Pad,   // one document per sample
};

enum class LongDocuments { Refuse, Cut };

struct TokenDatasetOptions {
  std::vector<DataSource> sources = {};
  std::optional<Tokenizer> tokenizer = std::nullopt;  // for texts and chats
  bool add_special_tokens = true;                     // for texts, as in EncodeOptions; chats use their template's
  std::optional<int32_t> eos_id = std::nullopt;       // ends each text document
  int64_t vocab_size = 0;  // of the model; larger ids are an error, checked by reading whole token files. 0: no check

  int64_t sequence_length = 0;
  Fill fill = Fill::Pack;
  LongDocuments long_documents = LongDocuments::Refuse;  // with Pad: documents longer than sequence_length
  int32_t pad_id = 0;
  bool shuffle = true;
  uint64_t seed = 0;

  int threads = 0;                                // for tokenization; 0: one per core
  std::optional<DeviceMesh> mesh = std::nullopt;  // ranks that open it together: all throw an error, or none
};

/// Rows of a batch, int64 [samples, sequence_length] on the CPU.
struct Batch {
  at::Tensor ids;
  /// Ids that count for the loss, and -100 elsewhere. Padding, text not written by the assistant, and the first token
  /// of each segment, which nothing predicts, do not count. Not shifted: the loss compares labels[i + 1] with
  /// logits[i].
  at::Tensor labels;
  /// Numbers segments 0, 1, ... along a row: a document's part in the row, or padding. Tokens attend within a segment.
  at::Tensor segment_ids;
};

/// Place of a rank among the ranks that share a global batch (data-parallel, not tensor-parallel ranks).
struct RankPart {
  int64_t rank = 0;
  int64_t ranks = 1;
};

class TokenDataset {
 public:
  /// Opens the sources. Collective over options.mesh; all of its ranks pass the same options and read the same data.
  explicit TokenDataset(TokenDatasetOptions options);

  /// Returns this rank's part of the next global batch and advances past the whole batch. Parts are in rank order and
  /// differ by at most one sample. Every rank needs at least one sample.
  Batch next_batch(int64_t global_batch, const RankPart& part = {});
  /// Returns samples [first, first + count).
  Batch samples(int64_t first, int64_t count) const;

  /// Returns the number of samples that next_batch has passed over all ranks and epochs.
  int64_t next_sample() const { return next_sample_; }
  /// Returns the number of samples that cover each token of all sources once.
  int64_t samples_per_epoch() const;
  /// Returns the number of tokens in all sources.
  int64_t num_tokens() const;

  /// Returns "<prefix>.next_sample", ".seed" and ".fingerprint" for State::user of a checkpoint.
  dcp::StateDict state_dict(const std::string& prefix = "data") const;
  /// Resumes from a state_dict(), with any number of ranks and any batch size. Throws ValueError if the seed, the data,
  /// or options that determine the samples differ, and KeyError if a name is missing.
  void load_state_dict(const dcp::StateDict& state, const std::string& prefix = "data");

 private:
  class Impl;
  std::shared_ptr<const Impl> impl_;
  std::string fingerprint_;
  int64_t next_sample_ = 0;
};

}  // namespace tessera::data
