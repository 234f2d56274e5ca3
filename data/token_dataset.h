#pragma once
// Batches of token ids from texts, chats and token files, the same on any number of ranks, resumable by few integers.
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
//   state.user.merge(dataset.state_dict());                                           // into a checkpoint and back
//   dcp::load(path, state);
//   dataset.load_state_dict(state.user);
//
// Global sample i, and so the batch of samples i to i + 63, depends on the data, the options and i alone. Within a
// source, samples come in a new order each epoch. Sources take turns by their weights; a small one has more epochs.
//
// Texts are tokenized when a dataset is opened, and held in memory at 4 bytes a token unless they have a cache file;
// token files are mapped, and must not change while they are open. Errors, ValueError unless another one is named, have
// the file and the line, document or byte. docs/data.md has formats and details.
// Thread safety: one thread at a time for next_batch and load_state_dict, any number for const functions.

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

/// Token ids without a header, as numpy's tofile() writes them. A document ends with each eos_id.
struct RawTokens {
  std::string path;
  TokenDtype dtype = TokenDtype::UInt16;
};

struct DataSource {
  std::variant<TextFiles, JsonLines, Chats, TokenFile, RawTokens> source;  // text_source.h has the first three
  double weight = 1;       // part of the samples, relative to other sources
  std::string cache = {};  // of TextFiles and JsonLines: prefix of a token file, written if there is none, then mapped
};

enum class Fill {
  Pack,  // documents one after the other, cut to samples; the end of the last sample is padding
  Pad,   // a document a sample
};

enum class LongDocuments { Refuse, Cut };

struct TokenDatasetOptions {
  std::vector<DataSource> sources = {};
  std::optional<Tokenizer> tokenizer = std::nullopt;  // of texts and chats
  bool add_special_tokens = true;                     // to texts, as in EncodeOptions; chats have their template's
  std::optional<int32_t> eos_id = std::nullopt;       // ends each document of texts
  int64_t vocab_size = 0;  // the model's; larger ids are refused, which reads token files whole. 0: not checked

  int64_t sequence_length = 0;
  Fill fill = Fill::Pack;
  LongDocuments long_documents = LongDocuments::Refuse;  // of Pad: those longer than sequence_length
  int32_t pad_id = 0;
  bool shuffle = true;
  uint64_t seed = 0;

  int threads = 0;                                // that tokenize; 0: one for each core
  std::optional<DeviceMesh> mesh = std::nullopt;  // ranks that open it together: an error is thrown on all or on none
};

/// Rows of a batch, int64 [samples, sequence_length] on the CPU.
struct Batch {
  at::Tensor ids;
  /// The ids where they count for the loss, else -100: for padding, for what an assistant did not write, and for the
  /// first token of each segment, which nothing predicts. Not shifted: the loss compares labels[i + 1] with logits[i].
  at::Tensor labels;
  /// 0, 1, ... along a row. Tokens attend to their own segment, a document's part in the row; padding is one too.
  at::Tensor segment_ids;
};

/// A rank among those that share a global batch: of data parallelism, not of tensor parallelism.
struct RankPart {
  int64_t rank = 0;
  int64_t ranks = 1;
};

class TokenDataset {
 public:
  /// Opens the sources. Collective on options.mesh, whose ranks must pass the same options and read the same data.
  explicit TokenDataset(TokenDatasetOptions options);

  /// Returns this rank's part of the next global batch, and moves on by all of it. Parts follow each other in the order
  /// of ranks, and differ by at most one sample. There must be a sample for each rank.
  Batch next_batch(int64_t global_batch, const RankPart& part = {});
  /// Returns samples first, first + 1, ..., first + count - 1.
  Batch samples(int64_t first, int64_t count) const;

  /// Returns the number of samples that next_batch has passed, over all ranks and epochs.
  int64_t next_sample() const { return next_sample_; }
  /// Returns the number of samples that contain each token of all sources once.
  int64_t samples_per_epoch() const;
  /// Returns the number of tokens of all sources.
  int64_t num_tokens() const;

  /// Returns "<prefix>.next_sample", ".seed" and ".fingerprint", for State::user of a checkpoint.
  dcp::StateDict state_dict(const std::string& prefix = "data") const;
  /// Continues from there, on any number of ranks, with batches of any size. Throws ValueError if the seed, the data or
  /// the options that decide what a sample is were others, KeyError if a name is missing.
  void load_state_dict(const dcp::StateDict& state, const std::string& prefix = "data");

 private:
  class Impl;
  std::shared_ptr<const Impl> impl_;
  std::string fingerprint_;
  int64_t next_sample_ = 0;
};

}  // namespace tessera::data
