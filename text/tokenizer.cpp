#include "text/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/decoder.h"
#include "text/json_view.h"
#include "text/normalizer.h"
#include "text/post_processor.h"
#include "text/pre_tokenizer.h"
#include "text/unicode.h"

namespace tessera {

namespace {

using nlohmann::json;
using text::JsonView;

/// Returns a null view if there is no such member.
JsonView member(const JsonView& file, const char* key) {
  static const json kNull;
  return file.has(key) ? file.at(key) : JsonView(kNull, file.path() + "." + key);
}

}  // namespace

class Tokenizer::Impl {
 public:
  explicit Impl(const JsonView& file)
      : normalizers_(text::parse_normalizers(member(file, "normalizer"))),
        pre_tokenizers_(text::parse_pre_tokenizers(member(file, "pre_tokenizer"))),
        model_(file.at("model"), pre_tokenizers_.gives_bytes),
        post_processor_(member(file, "post_processor")),
        decoders_(text::parse_decoders(member(file, "decoder"))) {
    for (const char* key : {"truncation", "padding"}) {
      TESSERA_CHECK(NotImplementedError, !file.has(key), "{}.{}: must be null: it is not supported", file.path(), key);
    }
    if (file.has("added_tokens")) {
      read_added_tokens(file.at("added_tokens"));
    }
    raw_finder_.finish();
    normalized_finder_.finish();
  }

  std::vector<int32_t> encode(std::string_view given, const EncodeOptions& options) const {
    TESSERA_CHECK(ValueError, given.size() <= std::numeric_limits<int32_t>::max(),
                  "Tokenizer::encode: a text of {} bytes, must be less than 2 GiB: encode parts of it", given.size());
    std::string repaired;
    if (text::valid_utf8_prefix(given) < given.size()) {
      if (text::append_repaired(repaired, given) > 0) {
        repaired += text::kReplacement;
      }
      given = repaired;
    }
    auto state = borrow_state();
    std::vector<int32_t> ids;
    ids.reserve(given.size() / 4 + 8);
    encode_text(given, *state, ids);
    return_state(std::move(state));
    return post_processor_.apply(std::move(ids), options.add_special_tokens);
  }

  /// Returns null if no token has this id.
  const std::string* token_text(int32_t id) const {
    const auto found = added_texts_.find(id);
    return found == added_texts_.end() ? nullptr : &found->second;
  }

  std::optional<std::string_view> token(int32_t id) const {
    if (const auto* added = token_text(id)) {
      return *added;
    }
    const auto found = model_.tokens().find(id);
    return found == model_.tokens().end() ? std::nullopt : std::optional(found->second);
  }

  std::optional<int32_t> token_to_id(std::string_view token) const {
    const auto found = added_ids_.find(std::string(token));
    return found == added_ids_.end() ? model_.token_to_id(token) : std::optional(found->second);
  }

  bool is_special(std::string_view token) const {
    return special_tokens_.find(std::string(token)) != special_tokens_.end();
  }

  size_t vocab_size() const {
    return model_.tokens().size() +
           static_cast<size_t>(std::count_if(added_ids_.begin(), added_ids_.end(),
                                             [&](const auto& added) { return !model_.token_to_id(added.first); }));
  }

  const std::vector<text::MakeDecodeStep>& decoders() const { return decoders_; }

 private:
  using State = std::unique_ptr<text::BpeState>;

  /// Passes the words of a text to the model.
  class ModelSink : public text::PieceSink {
   public:
    ModelSink(const text::BpeModel& model, text::BpeState& state, std::vector<int32_t>& ids)
        : model_(model), state_(state), ids_(ids) {}
    void take(const text::Piece& piece) override { model_.encode(piece.text, state_, ids_); }

   private:
    const text::BpeModel& model_;
    text::BpeState& state_;
    std::vector<int32_t>& ids_;
  };

  void read_added_tokens(const JsonView& list) {
    auto next_id = static_cast<int32_t>(model_.tokens().size());
    for (const auto& element : list.elements()) {
      const auto token = text::parse_added_token(element);
      if (token.content.empty()) {
        continue;
      }
      // Python assigns ids by this rule, regardless of the file.
      const auto known = token_to_id(token.content);
      TESSERA_CHECK(ValueError, token.id == known.value_or(next_id), "{}.id: is {}, must be {}, {}", element.path(),
                    token.id, known.value_or(next_id),
                    known ? "which the token has already" : "the next after the vocabulary and the tokens before");
      TESSERA_CHECK(ValueError, known || !this->token(token.id), "{}.id: {} is the id of \"{}\" already",
                    element.path(), token.id, this->token(token.id).value_or(""));
      next_id += known ? 0 : 1;
      add_token(token);
    }
  }

  void add_token(const text::AddedToken& token) {
    text::Normalized content{token.content, true};
    if (token.normalized) {
      normalize(content);
    }
    added_ids_.emplace(token.content, token.id);
    added_texts_.emplace(token.id, content.text);
    if (token.special) {
      special_tokens_.insert(token.content);
    }
    (token.normalized ? normalized_finder_ : raw_finder_).add(token, content.text);
  }

  void normalize(text::Normalized& part) const {
    for (const auto& normalizer : normalizers_) {
      normalizer(part);
    }
  }

  void encode_text(std::string_view text, text::BpeState& state, std::vector<int32_t>& ids) const {
    for (const auto& part : raw_finder_.split(text)) {
      const auto content = text.substr(part.range.begin, part.range.end - part.range.begin);
      if (part.id) {
        ids.push_back(*part.id);
      } else if (normalizers_.empty()) {
        encode_normalized({content, part.range.begin == 0}, state, ids);
      } else {
        text::Normalized normalized{std::string(content), part.range.begin == 0};
        normalize(normalized);
        encode_normalized({normalized.text, normalized.at_start}, state, ids);
      }
    }
  }

  void encode_normalized(const text::Piece& piece, text::BpeState& state, std::vector<int32_t>& ids) const {
    ModelSink sink(model_, state, ids);
    for (const auto& part : normalized_finder_.split(piece.text)) {
      if (part.id) {
        ids.push_back(*part.id);
        continue;
      }
      const auto content = piece.text.substr(part.range.begin, part.range.end - part.range.begin);
      text::pre_tokenize(pre_tokenizers_, {content, piece.at_start && part.range.begin == 0}, sink);
    }
  }

  State borrow_state() const {
    const std::lock_guard lock(mutex_);
    if (states_.empty()) {
      return std::make_unique<text::BpeState>();
    }
    auto state = std::move(states_.back());
    states_.pop_back();
    return state;
  }

  void return_state(State state) const {
    const std::lock_guard lock(mutex_);
    states_.push_back(std::move(state));
  }

  std::vector<text::Normalizer> normalizers_;
  text::PreTokenizers pre_tokenizers_;
  text::BpeModel model_;
  text::PostProcessor post_processor_;
  std::vector<text::MakeDecodeStep> decoders_;
  std::unordered_map<std::string, int32_t> added_ids_;
  // Text for decoders: normalized, if the token is matched in normalized text.
  std::unordered_map<int32_t, std::string> added_texts_;
  std::unordered_set<std::string> special_tokens_;
  text::AddedTokenFinder raw_finder_;
  text::AddedTokenFinder normalized_finder_;

  // One per thread that has encoded at the same time.
  mutable std::mutex mutex_;
  mutable std::vector<State> states_;
};

class DecodeStream::Impl {
 public:
  Impl(std::shared_ptr<const Tokenizer::Impl> tokenizer, const DecodeOptions& options)
      : tokenizer_(std::move(tokenizer)), options_(options), decoding_(tokenizer_->decoders()) {}

  void put(int32_t id) {
    const auto token = tokenizer_->token(id);
    if (token && !(options_.skip_special_tokens && tokenizer_->is_special(*token))) {
      decoding_.take(*token);
    }
  }
  void finish() { decoding_.finish(); }
  std::string text() { return decoding_.text(); }

 private:
  std::shared_ptr<const Tokenizer::Impl> tokenizer_;
  DecodeOptions options_;
  text::Decoding decoding_;
};

Tokenizer Tokenizer::from_file(const std::string& path) {
  return from_json(text::read_file(path), path);
}

Tokenizer Tokenizer::from_json(std::string_view json, const std::string& name) {
  const auto parsed = text::parse_json(json, name);
  return Tokenizer(std::make_shared<const Impl>(JsonView(parsed, name)));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  return impl_->encode(text, options);
}

std::vector<std::vector<int32_t>> Tokenizer::encode_batch(const std::vector<std::string_view>& texts, int threads,
                                                          const EncodeOptions& options) const {
  TESSERA_CHECK(ValueError, threads >= 0, "Tokenizer::encode_batch(threads={}): must be 0 or more", threads);
  const size_t wanted = threads > 0 ? static_cast<size_t>(threads) : std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::vector<int32_t>> results(texts.size());
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    try {
      for (size_t i = next++; i < texts.size(); i = next++) {
        results[i] = encode(texts[i], options);
      }
    } catch (...) {
      next = texts.size();
      const std::lock_guard lock(mutex);
      error = error ? error : std::current_exception();
    }
  };
  std::vector<std::thread> workers;
  for (size_t i = 1; i < std::min(wanted, texts.size()); ++i) {
    workers.emplace_back(work);
  }
  work();
  for (auto& worker : workers) {
    worker.join();
  }
  if (error) {
    std::rethrow_exception(error);
  }
  return results;
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids, const DecodeOptions& options) const {
  DecodeStream::Impl stream(impl_, options);
  for (const int32_t id : ids) {
    stream.put(id);
  }
  stream.finish();
  return stream.text();
}

DecodeStream Tokenizer::decode_stream(const DecodeOptions& options) const {
  return DecodeStream(std::make_unique<DecodeStream::Impl>(impl_, options));
}

std::optional<int32_t> Tokenizer::token_to_id(std::string_view token) const {
  return impl_->token_to_id(token);
}

std::optional<std::string> Tokenizer::id_to_token(int32_t id) const {
  const auto token = impl_->token(id);
  return token ? std::optional(std::string(*token)) : std::nullopt;
}

size_t Tokenizer::vocab_size() const {
  return impl_->vocab_size();
}

DecodeStream::DecodeStream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DecodeStream::~DecodeStream() = default;
DecodeStream::DecodeStream(DecodeStream&&) noexcept = default;
DecodeStream& DecodeStream::operator=(DecodeStream&&) noexcept = default;

std::string DecodeStream::put(int32_t id) {
  impl_->put(id);
  return impl_->text();
}

std::string DecodeStream::finish() {
  impl_->finish();
  return impl_->text();
}

}  // namespace tessera
