#pragma once
// Text to token ids and back, by the tokenizer.json files of Hugging Face, as Python's `tokenizers` does.
//
//   const auto tokenizer = Tokenizer::from_file("llama/tokenizer.json");
//   const auto ids = tokenizer.encode("Hello, world");                   // {128000, 9906, 11, 1917}
//   tokenizer.decode(ids, {.skip_special_tokens = true});                // "Hello, world"
//
//   auto stream = tokenizer.decode_stream();                             // while a model generates
//   for (const int32_t id : generated) std::cout << stream.put(id);
//   std::cout << stream.finish();
//
// A text goes through the parts of the file in this order; a part of another type than these is an error that names it:
//
//   added_tokens     are found first, those with "normalized" after the normalizer
//   normalizer       NFC, NFD, NFKC, NFKD, Lowercase, Strip, StripAccents, Prepend, Replace, ByteLevel, Sequence
//   pre_tokenizer    ByteLevel, Split, Whitespace, WhitespaceSplit, Digits, Punctuation, Metaspace, Sequence
//   model            BPE, without dropout
//   post_processor   TemplateProcessing, ByteLevel, Sequence
//   decoder          ByteLevel, ByteFallback, Fuse, Strip, Replace, Metaspace, Sequence
//
// "truncation" and "padding" must be null: batches are made elsewhere.
//
// Texts are bytes of any kind. What is not UTF-8 counts as U+FFFD, as in Python's bytes.decode(errors="replace").
// Characters are what the Unicode of the installed PCRE2 and utf8proc says (14 and 15 in Debian 12). Python's
// `tokenizers` has newer tables for patterns, and older ones, of about Unicode 9, for normalizers and Punctuation:
// texts with a character between may have other ids there.
//
// No function here needs libtorch.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct EncodeOptions {
  /// Adds what the file's post_processor adds, such as a token for the start of the text.
  bool add_special_tokens = true;
};

struct DecodeOptions {
  /// Leaves out added tokens that are "special".
  bool skip_special_tokens = true;
};

class DecodeStream;

/// An immutable tokenizer, a handle that is cheap to copy. Threads may use one at the same time; for each of them it
/// keeps the ids of words, 4 MiB.
class Tokenizer {
 public:
  /// Reads a tokenizer.json. Throws ValueError, with the place in the file, if it is damaged or contradicts itself, and
  /// NotImplementedError if it has what is not supported.
  static Tokenizer from_file(const std::string& path);
  /// Reads the content of a tokenizer.json; `name` stands for it in errors.
  static Tokenizer from_json(std::string_view json, const std::string& name = "tokenizer");

  /// Returns the ids of a text of less than 2 GiB.
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options = {}) const;
  /// Returns the ids of each text, made by so many threads; 0 means one for each core.
  std::vector<std::vector<int32_t>> encode_batch(const std::vector<std::string_view>& texts, int threads = 0,
                                                 const EncodeOptions& options = {}) const;

  /// Returns the text of ids. Ids that no token has are left out, as in Python.
  std::string decode(const std::vector<int32_t>& ids, const DecodeOptions& options = {}) const;
  /// Starts to decode ids that come one by one.
  DecodeStream decode_stream(const DecodeOptions& options = {}) const;

  std::optional<int32_t> token_to_id(std::string_view token) const;
  std::optional<std::string> id_to_token(int32_t id) const;
  /// Returns how many tokens there are, with added ones. The largest id may be larger, as files may leave out ids.
  size_t vocab_size() const;

 private:
  friend class DecodeStream;
  class Impl;

  explicit Tokenizer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

  std::shared_ptr<const Impl> impl_;
};

/// Decodes ids that come one by one. All that put() and finish() return is, together, what decode() returns of all ids.
/// What they return is UTF-8, and comes as soon as no further id can change it. One thread at a time.
class DecodeStream {
 public:
  ~DecodeStream();
  DecodeStream(DecodeStream&&) noexcept;
  DecodeStream& operator=(DecodeStream&&) noexcept;

  /// Returns the text that has become complete with `id`, "" if there is none.
  std::string put(int32_t id);
  /// Returns what is left after the last id. The stream then starts anew.
  std::string finish();

 private:
  friend class Tokenizer;
  class Impl;

  explicit DecodeStream(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
