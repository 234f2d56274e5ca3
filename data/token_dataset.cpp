#include "data/token_dataset.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "data/sample_index.h"
#include "data/token_file.h"
#include "device_mesh/rank_agreement.h"

namespace tessera::data {

namespace {

constexpr int64_t kIgnored = -100;  // label that does not count

void check_options(const TokenDatasetOptions& options) {
  TESSERA_CHECK(ValueError, !options.sources.empty(), "TokenDataset: sources is empty");
  TESSERA_CHECK(ValueError, options.sequence_length >= 2,
                "TokenDataset: sequence_length is {}, must be 2 or more, so that a token predicts one",
                options.sequence_length);
  TESSERA_CHECK(ValueError, options.vocab_size >= 0, "TokenDataset: vocab_size is {}, must be 0 or more",
                options.vocab_size);
  TESSERA_CHECK(ValueError, options.threads >= 0, "TokenDataset: threads is {}, must be 0 or more", options.threads);
  TESSERA_CHECK(ValueError, options.pad_id >= 0 && (options.vocab_size == 0 || options.pad_id < options.vocab_size),
                "TokenDataset: pad_id is {}, must be an id of the vocabulary", options.pad_id);
  TESSERA_CHECK(
      ValueError,
      !options.eos_id || (*options.eos_id >= 0 && (options.vocab_size == 0 || *options.eos_id < options.vocab_size)),
      "TokenDataset: eos_id is {}, must be an id of the vocabulary", *options.eos_id);
  for (size_t i = 0; i < options.sources.size(); ++i) {
    const auto& source = options.sources[i];
    TESSERA_CHECK(ValueError, std::isfinite(source.weight) && source.weight > 0,
                  "TokenDataset: sources[{}].weight is {}, must be more than 0", i, source.weight);
    const bool is_text =
        std::holds_alternative<TextFiles>(source.source) || std::holds_alternative<JsonLines>(source.source);
    TESSERA_CHECK(
        ValueError, source.cache.empty() || is_text,
        "TokenDataset: sources[{}].cache: only TextFiles and JsonLines have one: a token file has no room for "
        "what counts in chats",
        i);
  }
}

class SourceOpener {
 public:
  SourceOpener(const TokenDatasetOptions& options, const DataSource& source) : options_(options), source_(source) {}

  Documents operator()(const TextFiles& texts) const { return open_texts(texts); }
  Documents operator()(const JsonLines& lines) const { return open_texts(lines); }
  Documents operator()(const Chats& chats) const { return tokenize(chats, tokenizer(), tokenize_options()); }
  Documents operator()(const TokenFile& file) const { return open_token_file(file.prefix); }
  Documents operator()(const RawTokens& raw) const { return open_raw_tokens(raw.path, raw.dtype, options_.eos_id); }

 private:
  template <class Texts>
  Documents open_texts(const Texts& texts) const {
    return source_.cache.empty() ? tokenize(texts, tokenizer(), tokenize_options())
                                 : tokenize_cached(texts, tokenizer(), tokenize_options(), source_.cache);
  }

  const Tokenizer& tokenizer() const {
    TESSERA_CHECK(ValueError, options_.tokenizer, "TokenDataset: texts and chats need options.tokenizer");
    return *options_.tokenizer;
  }

  TokenizeOptions tokenize_options() const {
    return {.add_special_tokens = options_.add_special_tokens,
            .eos_id = options_.eos_id,
            .vocab_size = options_.vocab_size,
            .threads = options_.threads};
  }

  const TokenDatasetOptions& options_;
  const DataSource& source_;
};

void check_lengths(const Documents& documents, int64_t sequence_length) {
  const auto& starts = documents.starts();
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    TESSERA_CHECK(
        ValueError, starts[i + 1] - starts[i] <= sequence_length,
        "{}: has {} tokens, more than the {} of sequence_length; LongDocuments::Cut takes the first ones, and "
        "Fill::Pack all of them",
        documents.place(static_cast<int64_t>(i)), starts[i + 1] - starts[i], sequence_length);
  }
}

Documents open_source(const TokenDatasetOptions& options, const DataSource& source) {
  auto documents = std::visit(SourceOpener(options, source), source.source);
  if (options.vocab_size > 0) {
    documents.check_ids(options.vocab_size);
  }
  if (options.fill == Fill::Pad && options.long_documents == LongDocuments::Refuse) {
    check_lengths(documents, options.sequence_length);
  }
  return documents;
}

/// Row of a batch.
struct Row {
  int64_t* ids;
  int64_t* labels;
  int64_t* segment_ids;
};

/// Writes parts of documents, each as a segment. The rest of the row already is padding; only its segment is set here.
void fill_row(const Documents& documents, const std::vector<TokenRange>& ranges, int64_t length, const Row& row) {
  int64_t at = 0, segment = 0;
  for (const auto& range : ranges) {
    documents.copy_ids(range.begin, range.end, row.ids + at);
    for (int64_t token = range.begin; token < range.end; ++token, ++at) {
      row.labels[at] = token > range.begin && documents.counts(token) ? row.ids[at] : kIgnored;
      row.segment_ids[at] = segment;
    }
    ++segment;
  }
  std::fill(row.segment_ids + at, row.segment_ids + length, segment);
}

template <class Value>
const Value& value_of(const dcp::StateDict& state, const std::string& name) {
  const auto found = state.find(name);
  TESSERA_CHECK(KeyError, found != state.end(), "TokenDataset::load_state_dict: the state has no \"{}\"", name);
  const auto* value = std::get_if<Value>(&found->second);
  TESSERA_CHECK(ValueError, value, "TokenDataset::load_state_dict: \"{}\" is of another type", name);
  return *value;
}

}  // namespace

class TokenDataset::Impl {
 public:
  explicit Impl(TokenDatasetOptions options) : options_(std::move(options)) {
    check_options(options_);
    for (const auto& source : options_.sources) {
      documents_.push_back(open_source(options_, source));
      weights_.push_back(source.weight);
    }
    // The sources have been read, so this is no longer needed.
    options_.tokenizer.reset();
    options_.mesh.reset();
  }

  const TokenDatasetOptions& options() const { return options_; }
  const std::vector<Documents>& documents() const { return documents_; }

  int64_t num_samples(const Documents& documents) const {
    return options_.fill == Fill::Pack ? num_packed_samples(documents.starts(), options_.sequence_length)
                                       : documents.num_documents();
  }

  void fill(int64_t sample, const Row& row) const {
    const auto turn = turn_of(sample, weights_);
    const auto& documents = documents_[static_cast<size_t>(turn.source)];
    const int64_t size = num_samples(documents);
    int64_t index = turn.index % size;
    if (options_.shuffle) {
      index = permuted(index, size, permutation_key(options_.seed, turn.source, turn.index / size));
    }
    fill_row(documents, ranges(documents, index), options_.sequence_length, row);
  }

  /// Returns everything that determines a sample, except the seed.
  std::string fingerprint() const {
    auto text =
        fmt::format("samples of {} tokens, {}, {}", options_.sequence_length,
                    options_.fill == Fill::Pack ? "packed" : "padded", options_.shuffle ? "shuffled" : "in order");
    for (size_t i = 0; i < documents_.size(); ++i) {
      text += fmt::format("; weight {}: {}", weights_[i], documents_[i].fingerprint());
    }
    return text;
  }

 private:
  std::vector<TokenRange> ranges(const Documents& documents, int64_t index) const {
    const auto& starts = documents.starts();
    if (options_.fill == Fill::Pack) {
      return packed_sample(starts, options_.sequence_length, index);
    }
    const int64_t begin = starts[static_cast<size_t>(index)], end = starts[static_cast<size_t>(index) + 1];
    return {{begin, std::min(end, begin + options_.sequence_length)}};
  }

  TokenDatasetOptions options_;
  std::vector<Documents> documents_;
  std::vector<double> weights_;
};

TokenDataset::TokenDataset(TokenDatasetOptions options) {
  const auto mesh = options.mesh;
  const auto open = [&] {
    impl_ = std::make_shared<const Impl>(std::move(options));
    fingerprint_ = impl_->fingerprint();
    return std::vector{fmt::format("seed {}", impl_->options().seed), fingerprint_};
  };
  if (mesh) {
    check_ranks_agree({*mesh}, "TokenDataset", open);
  } else {
    open();
  }
}

Batch TokenDataset::samples(int64_t first, int64_t count) const {
  TESSERA_CHECK(ValueError, first >= 0 && count >= 1,
                "TokenDataset::samples(first={}, count={}): must be 0 or more, and "
                "1 or more",
                first, count);
  const auto& options = impl_->options();
  const int64_t length = options.sequence_length;
  const auto make = [&](int64_t value) { return at::full({count, length}, value, at::kLong); };
  Batch batch{.ids = make(options.pad_id), .labels = make(kIgnored), .segment_ids = make(0)};
  const Row rows{batch.ids.data_ptr<int64_t>(), batch.labels.data_ptr<int64_t>(),
                 batch.segment_ids.data_ptr<int64_t>()};
  for (int64_t i = 0; i < count; ++i) {
    impl_->fill(first + i, {rows.ids + i * length, rows.labels + i * length, rows.segment_ids + i * length});
  }
  return batch;
}

Batch TokenDataset::next_batch(int64_t global_batch, const RankPart& part) {
  TESSERA_CHECK(ValueError, part.rank >= 0 && part.rank < part.ranks,
                "TokenDataset::next_batch: rank {} of {} ranks, must be from 0 to {}", part.rank, part.ranks,
                part.ranks - 1);
  TESSERA_CHECK(ValueError, global_batch >= part.ranks,
                "TokenDataset::next_batch(global_batch={}): must have a sample for each of {} ranks", global_batch,
                part.ranks);
  const int64_t begin = global_batch * part.rank / part.ranks, end = global_batch * (part.rank + 1) / part.ranks;
  auto batch = samples(next_sample_ + begin, end - begin);
  next_sample_ += global_batch;
  return batch;
}

int64_t TokenDataset::samples_per_epoch() const {
  int64_t samples = 0;
  for (const auto& documents : impl_->documents()) {
    samples += impl_->num_samples(documents);
  }
  return samples;
}

int64_t TokenDataset::num_tokens() const {
  int64_t tokens = 0;
  for (const auto& documents : impl_->documents()) {
    tokens += documents.num_tokens();
  }
  return tokens;
}

dcp::StateDict TokenDataset::state_dict(const std::string& prefix) const {
  return {{prefix + ".next_sample", next_sample_},
          {prefix + ".seed", static_cast<int64_t>(impl_->options().seed)},
          {prefix + ".fingerprint", fingerprint_}};
}

void TokenDataset::load_state_dict(const dcp::StateDict& state, const std::string& prefix) {
  const auto next_sample = value_of<int64_t>(state, prefix + ".next_sample");
  const auto seed = static_cast<uint64_t>(value_of<int64_t>(state, prefix + ".seed"));
  const auto& fingerprint = value_of<std::string>(state, prefix + ".fingerprint");
  TESSERA_CHECK(ValueError, fingerprint == fingerprint_,
                "TokenDataset::load_state_dict: the state is of other data or options: \"{}\", these are \"{}\"",
                fingerprint, fingerprint_);
  TESSERA_CHECK(ValueError, seed == impl_->options().seed,
                "TokenDataset::load_state_dict: the state is of seed {}, this dataset has seed {}", seed,
                impl_->options().seed);
  TESSERA_CHECK(ValueError, next_sample >= 0,
                "TokenDataset::load_state_dict: \"{}.next_sample\" is {}, must be 0 or more", prefix, next_sample);
  next_sample_ = next_sample;
}

}  // namespace tessera::data
