#pragma once
// Converts text to token ids and back with Hugging Face's tokenizer.json files, like Python's `tokenizers`.
//
//   const auto tokenizer = Tokenizer::from_file("llama/tokenizer.json");
//   const auto ids = tokenizer.encode("Hello, world");                   // {128000, 9906, 11, 1917}
//   tokenizer.decode(ids, {.skip_special_tokens = true});                // "Hello, world"
//
//   auto stream = tokenizer.decode_stream();                             // while a model generates
//   for (const int32_t id : generated) std::cout << stream.put(id);
//   std::cout << stream.finish();
//
// A text passes through these parts of the file in order. Any type that is not listed is an error that names it:
//
//   added_tokens     matched first; those with "normalized" are matched after the normalizer
//   normalizer       NFC, NFD, NFKC, NFKD, Lowercase, Strip, StripAccents, Prepend, Replace, ByteLevel, Sequence
//   pre_tokenizer    ByteLevel, Split, Whitespace, WhitespaceSplit, Digits, Punctuation, Metaspace, Sequence
//   model            BPE, without dropout
//   post_processor   TemplateProcessing, ByteLevel, Sequence
//   decoder          ByteLevel, ByteFallback, Fuse, Strip, Replace, Metaspace, Sequence
//
// "truncation" and "padding" must be null; batching is done elsewhere.
//
// Texts may be any bytes. Invalid UTF-8 is read as U+FFFD, as in Python's bytes.decode(errors="replace"). Character
// properties come from the installed PCRE2 and utf8proc (Unicode 14 and 15 in Debian 12). Python's `tokenizers` uses
// newer tables for patterns, and older ones (about Unicode 9) for normalizers and Punctuation. Ids may differ for
// characters that were added in between.
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
  /// Adds the post_processor's tokens, such as one for the start of the text.
  bool add_special_tokens = true;
};

struct DecodeOptions {
  /// Omits added tokens that are "special".
  bool skip_special_tokens = true;
};

class DecodeStream;

/// Immutable tokenizer handle, cheap to copy. Threads may share it. It caches words' ids, 4 MiB per thread.
class Tokenizer {
 public:
  /// Reads a tokenizer.json. Throws ValueError, with the place in the file, if it is damaged or inconsistent, and
  /// NotImplementedError for unsupported features.
  static Tokenizer from_file(const std::string& path);
  /// Reads the contents of a tokenizer.json; `name` is its name in errors.
  static Tokenizer from_json(std::string_view json, const std::string& name = "tokenizer");

  /// Returns the ids of a text, which must be smaller than 2 GiB.
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options = {}) const;
  /// Returns the ids of each text, using this number of threads; 0 means one per core.
  std::vector<std::vector<int32_t>> encode_batch(const std::vector<std::string_view>& texts, int threads = 0,
                                                 const EncodeOptions& options = {}) const;

  /// Returns the text of `ids`. Skips ids without a token, like Python.
  std::string decode(const std::vector<int32_t>& ids, const DecodeOptions& options = {}) const;
  /// Starts decoding ids one by one.
  DecodeStream decode_stream(const DecodeOptions& options = {}) const;

  std::optional<int32_t> token_to_id(std::string_view token) const;
  std::optional<std::string> id_to_token(int32_t id) const;
  /// Returns the number of tokens, including added ones. The largest id may be larger, because files may skip ids.
  size_t vocab_size() const;

 private:
  friend class DecodeStream;
  class Impl;

  explicit Tokenizer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

  std::shared_ptr<const Impl> impl_;
};

/// Decodes ids one by one. The results of put() and finish() together equal decode() of all ids. They are UTF-8, and
/// are returned as soon as no further id can change them. Thread safety: one thread at a time.
class DecodeStream {
 public:
  ~DecodeStream();
  DecodeStream(DecodeStream&&) noexcept;
  DecodeStream& operator=(DecodeStream&&) noexcept;

  /// Returns the text that `id` completes, or "".
  std::string put(int32_t id);
  /// Returns the remaining text after the last id, and resets the stream.
  std::string finish();

 private:
  friend class Tokenizer;
  class Impl;

  explicit DecodeStream(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
