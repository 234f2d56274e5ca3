#include "text/decoder.h"

#include <cstdint>
#include <cstdlib>
#include <utility>

#include "base/error.h"
#include "text/pattern.h"
#include "text/unicode.h"

namespace tessera::text {

namespace {

/// Step that processes whole tokens.
class WholeTokenStep : public DecodeStep {
 public:
  explicit WholeTokenStep(DecodeStep& next) : next_(next) {}
  void take(std::string_view part) override { token_ += part; }
  void end_token() override {
    take_whole(token_);
    token_.clear();
  }
  void finish() override { next_.finish(); }

 protected:
  virtual void take_whole(const std::string& token) = 0;

  void give(std::string_view token) {
    next_.take(token);
    next_.end_token();
  }

  DecodeStep& next_;

 private:
  std::string token_;
};

/// Joins all tokens into one, of the bytes that their characters represent.
class ByteLevelDecoder : public WholeTokenStep {
 public:
  using WholeTokenStep::WholeTokenStep;
  void finish() override {
    if (!bytes_.empty()) {
      next_.take(kReplacement);
      bytes_.clear();
    }
    next_.end_token();
    next_.finish();
  }

 protected:
  void take_whole(const std::string& token) override {
    if (!append_bytes_of_characters(bytes_, token)) {
      bytes_ += token;
    }
    std::string text;
    const size_t rest = append_repaired(text, bytes_);
    bytes_.erase(0, bytes_.size() - rest);
    next_.take(text);
  }

 private:
  std::string bytes_;  // start of an incomplete character
};

/// Turns consecutive tokens <0x00> to <0xFF> into text, or into as many U+FFFD if they are not valid UTF-8.
class ByteFallbackDecoder : public WholeTokenStep {
 public:
  using WholeTokenStep::WholeTokenStep;
  void finish() override {
    give_bytes();
    next_.finish();
  }

 protected:
  void take_whole(const std::string& token) override {
    const bool is_byte = token.size() == 6 && token.starts_with("<0x") && token[5] == '>' &&
                         std::isxdigit(static_cast<unsigned char>(token[3])) != 0 &&
                         std::isxdigit(static_cast<unsigned char>(token[4])) != 0;
    if (is_byte) {
      bytes_ += static_cast<char>(std::strtol(token.c_str() + 3, nullptr, 16));
      return;
    }
    give_bytes();
    give(token);
  }

 private:
  void give_bytes() {
    const std::string bytes = std::move(bytes_);
    bytes_.clear();
    if (valid_utf8_prefix(bytes) < bytes.size()) {
      for (size_t i = 0; i < bytes.size(); ++i) {
        give(kReplacement);
      }
    } else if (!bytes.empty()) {
      give(bytes);
    }
  }

  std::string bytes_;
};

class ReplaceDecoder : public WholeTokenStep {
 public:
  ReplaceDecoder(DecodeStep& next, Pattern pattern, std::string content)
      : WholeTokenStep(next), pattern_(std::move(pattern)), content_(std::move(content)) {}

 protected:
  void take_whole(const std::string& token) override { give(pattern_.replaced(token, content_)); }

 private:
  Pattern pattern_;
  std::string content_;
};

class FuseDecoder : public DecodeStep {
 public:
  explicit FuseDecoder(DecodeStep& next) : next_(next) {}
  void take(std::string_view part) override { next_.take(part); }
  void end_token() override {}
  void finish() override {
    next_.end_token();
    next_.finish();
  }

 private:
  DecodeStep& next_;
};

/// Strips up to the given numbers of a character from each token's start and end.
class StripDecoder : public DecodeStep {
 public:
  StripDecoder(DecodeStep& next, char32_t content, int32_t start, int32_t stop)
      : next_(next), content_(content), start_(start), stop_(stop), start_left_(start) {}

  void take(std::string_view part) override {
    std::string out;
    for_each_character(part, [&](char32_t character, size_t offset, size_t bytes) {
      if (character != content_) {
        start_left_ = 0;
        give_held(out);
        out += part.substr(offset, bytes);
      } else if (start_left_ > 0) {
        --start_left_;
      } else if (held_ < stop_) {
        ++held_;
      } else {
        append_utf8(out, content_);
      }
    });
    next_.take(out);
  }
  void end_token() override {
    start_left_ = start_;
    held_ = 0;
    next_.end_token();
  }
  void finish() override { next_.finish(); }

 private:
  void give_held(std::string& out) {
    for (; held_ > 0; --held_) {
      append_utf8(out, content_);
    }
  }

  DecodeStep& next_;
  char32_t content_;
  int32_t start_;
  int32_t stop_;
  int32_t start_left_;
  int32_t held_ = 0;  // number of characters that may be the token's last
};

class MetaspaceDecoder : public DecodeStep {
 public:
  MetaspaceDecoder(DecodeStep& next, char32_t replacement, bool drops_first)
      : next_(next), replacement_(replacement), drops_first_(drops_first) {}

  void take(std::string_view part) override {
    std::string out;
    for_each_character(part, [&](char32_t character, size_t offset, size_t bytes) {
      if (character != replacement_) {
        out += part.substr(offset, bytes);
      } else if (!drops_first_ || !is_first_) {
        out += ' ';
      }
    });
    next_.take(out);
  }
  void end_token() override {
    is_first_ = false;
    next_.end_token();
  }
  void finish() override {
    is_first_ = true;
    next_.finish();
  }

 private:
  DecodeStep& next_;
  char32_t replacement_;
  bool drops_first_;
  bool is_first_ = true;
};

MakeDecodeStep parse_decoder(const JsonView& json) {
  const auto& type = json.at("type").as_string();
  if (type == "ByteLevel") {
    return [](DecodeStep& next) { return std::make_unique<ByteLevelDecoder>(next); };
  }
  if (type == "ByteFallback") {
    return [](DecodeStep& next) { return std::make_unique<ByteFallbackDecoder>(next); };
  }
  if (type == "Fuse") {
    return [](DecodeStep& next) { return std::make_unique<FuseDecoder>(next); };
  }
  if (type == "Replace") {
    return [pattern = Pattern::parse(json.at("pattern")), content = json.at("content").as_string()](DecodeStep& next) {
      return std::make_unique<ReplaceDecoder>(next, pattern, content);
    };
  }
  if (type == "Strip") {
    return [content = json.at("content").as_character(), start = json.at("start").as_id(),
            stop = json.at("stop").as_id()](DecodeStep& next) {
      return std::make_unique<StripDecoder>(next, content, start, stop);
    };
  }
  if (type == "Metaspace") {
    const bool prepends = json.bool_or("add_prefix_space", true) &&
                          !(json.has("prepend_scheme") && json.at("prepend_scheme").as_string() == "never");
    return [replacement = json.at("replacement").as_character(), prepends](DecodeStep& next) {
      return std::make_unique<MetaspaceDecoder>(next, replacement, prepends);
    };
  }
  refuse_type(json, "ByteLevel, ByteFallback, Fuse, Strip, Replace, Metaspace, Sequence");
}

}  // namespace

std::vector<MakeDecodeStep> parse_decoders(const JsonView& json) {
  std::vector<MakeDecodeStep> steps;
  for (const auto& step : steps_of(json, "decoders")) {
    steps.push_back(parse_decoder(step));
  }
  return steps;
}

class Decoding::End : public DecodeStep {
 public:
  explicit End(bool spaces) : spaces_(spaces) {}
  void take(std::string_view part) override {
    if (owes_space_) {
      text_ += ' ';
      owes_space_ = false;
    }
    text_ += part;
  }
  void end_token() override { owes_space_ = spaces_; }
  void finish() override { owes_space_ = false; }
  std::string text() { return std::exchange(text_, {}); }

 private:
  bool spaces_;
  bool owes_space_ = false;
  std::string text_;
};

Decoding::Decoding(const std::vector<MakeDecodeStep>& make_steps)
    : end_(std::make_unique<End>(/*spaces=*/make_steps.empty())), first_(end_.get()) {
  for (auto make = make_steps.rbegin(); make != make_steps.rend(); ++make) {
    steps_.push_back((*make)(*first_));
    first_ = steps_.back().get();
  }
}

Decoding::~Decoding() = default;
Decoding::Decoding(Decoding&&) noexcept = default;
Decoding& Decoding::operator=(Decoding&&) noexcept = default;

void Decoding::take(std::string_view token) {
  first_->take(token);
  first_->end_token();
}

void Decoding::finish() {
  first_->finish();
}

std::string Decoding::text() {
  return end_->text();
}

}  // namespace tessera::text
