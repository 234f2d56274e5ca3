#include "text/pre_tokenizer.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "text/pattern.h"
#include "text/unicode.h"

namespace tessera::text {

namespace {

/// Treatment of the parts that a pattern matches.
enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

Behavior parse_behavior(const JsonView& json) {
  constexpr std::pair<const char*, Behavior> kBehaviors[] = {{"Removed", Behavior::kRemoved},
                                                             {"Isolated", Behavior::kIsolated},
                                                             {"MergedWithPrevious", Behavior::kMergedWithPrevious},
                                                             {"MergedWithNext", Behavior::kMergedWithNext},
                                                             {"Contiguous", Behavior::kContiguous}};
  for (const auto& [name, behavior] : kBehaviors) {
    if (json.as_string() == name) {
      return behavior;
    }
  }
  throw ValueError(fmt::format("{}: is {}, must be Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous",
                               json.path(), shown(json.value())));
}

/// Combines the parts of a piece, matches and the text between them, into pieces.
class Splits {
 public:
  Splits(const Piece& piece, Behavior behavior, PieceSink& sink) : piece_(piece), behavior_(behavior), sink_(sink) {}

  void add(Range part, bool is_match) {
    switch (behavior_) {
      case Behavior::kRemoved:
        if (!is_match) {
          give(part);
        }
        break;
      case Behavior::kIsolated:
        give(part);
        break;
      case Behavior::kContiguous:
        join_if(is_match == previous_is_match_, part);
        break;
      case Behavior::kMergedWithPrevious:
        join_if(is_match && !previous_is_match_, part);
        break;
      case Behavior::kMergedWithNext:
        // The pending part is a match.
        join_if(!is_match, part);
        if (!is_match) {
          finish();
        }
        break;
    }
    previous_is_match_ = is_match;
  }

  /// Emits the last piece.
  void finish() {
    if (held_) {
      give(*held_);
      held_.reset();
    }
  }

 private:
  void join_if(bool joins, Range part) {
    if (joins && held_) {
      held_->end = part.end;
      return;
    }
    finish();
    held_ = part;
  }

  void give(Range part) {
    if (part.begin < part.end) {
      sink_.take({piece_.text.substr(part.begin, part.end - part.begin), piece_.at_start && part.begin == 0});
    }
  }

  const Piece& piece_;
  Behavior behavior_;
  PieceSink& sink_;
  std::optional<Range> held_;
  bool previous_is_match_ = false;
};

void split_by_pattern(const Piece& piece, const Pattern& pattern, bool invert, Behavior behavior, PieceSink& sink) {
  Splits splits(piece, behavior, sink);
  size_t done = 0;
  pattern.for_each_match(piece.text, [&](Range match) {
    if (done < match.begin) {
      splits.add({done, match.begin}, invert);
    }
    splits.add(match, !invert);
    done = match.end;
  });
  if (done < piece.text.size()) {
    splits.add({done, piece.text.size()}, invert);
  }
  splits.finish();
}

template <class IsMatch>
void split_by_character(const Piece& piece, IsMatch is_match, Behavior behavior, PieceSink& sink) {
  Splits splits(piece, behavior, sink);
  size_t done = 0;
  for_each_character(piece.text, [&](char32_t character, size_t offset, size_t bytes) {
    if (!is_match(character)) {
      return;
    }
    if (done < offset) {
      splits.add({done, offset}, false);
    }
    splits.add({offset, offset + bytes}, true);
    done = offset + bytes;
  });
  if (done < piece.text.size()) {
    splits.add({done, piece.text.size()}, false);
  }
  splits.finish();
}

PreTokenizer make_split(Pattern pattern, bool invert, Behavior behavior) {
  return [=, pattern = std::move(pattern)](const Piece& piece, PieceSink& sink) {
    split_by_pattern(piece, pattern, invert, behavior, sink);
  };
}

PreTokenizer make_split(bool (*is_match)(char32_t), Behavior behavior) {
  return [=](const Piece& piece, PieceSink& sink) { split_by_character(piece, is_match, behavior, sink); };
}

class ByteLevelStep {
 public:
  struct Options {
    bool add_prefix_space = false;
    bool use_regex = true;
    /// Whether to write visible characters instead of bytes.
    bool maps = false;
  };

  ByteLevelStep(Options options, const std::string& place)
      : options_(options),
        words_(Pattern::regex(
            pcre2_syntax(R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)", place),
            place)) {}

  void operator()(const Piece& piece, PieceSink& sink) const {
    std::string prefixed;
    Piece whole = piece;
    if (options_.add_prefix_space && piece.text[0] != ' ') {
      prefixed.reserve(piece.text.size() + 1);
      prefixed += ' ';
      prefixed += piece.text;
      whole.text = prefixed;
    }
    MappingSink mapping(sink);
    PieceSink& words = options_.maps ? mapping : sink;
    if (options_.use_regex) {
      split_by_pattern(whole, words_, false, Behavior::kIsolated, words);
    } else {
      words.take(whole);
    }
  }

 private:
  class MappingSink : public PieceSink {
   public:
    explicit MappingSink(PieceSink& sink) : sink_(sink) {}
    void take(const Piece& piece) override {
      mapped_.clear();
      append_byte_characters(mapped_, piece.text);
      sink_.take({mapped_, piece.at_start});
    }

   private:
    PieceSink& sink_;
    std::string mapped_;
  };

  Options options_;
  Pattern words_;
};

class MetaspaceStep {
 public:
  explicit MetaspaceStep(const JsonView& json)
      : replacement_(json.at("replacement").as_character()),
        replacement_text_(json.at("replacement").as_string()),
        splits_(json.bool_or("split", true)) {
    const std::string scheme = json.has("prepend_scheme") ? json.at("prepend_scheme").as_string() : "always";
    TESSERA_CHECK(ValueError, scheme == "always" || scheme == "first" || scheme == "never",
                  "{}.prepend_scheme: is \"{}\", must be always, first or never", json.path(), scheme);
    const bool adds = json.bool_or("add_prefix_space", true);
    TESSERA_CHECK(ValueError, adds || scheme == "never",
                  "{}.add_prefix_space: is false, which prepend_scheme \"{}\" contradicts", json.path(), scheme);
    prepends_ = scheme != "never";
    only_at_start_ = scheme == "first";
  }

  void operator()(const Piece& piece, PieceSink& sink) const {
    std::string text;
    const bool is_there = piece.text[0] == ' ' || piece.text.substr(0, replacement_text_.size()) == replacement_text_;
    if (prepends_ && !is_there && (piece.at_start || !only_at_start_)) {
      text += replacement_text_;
    }
    for (const char byte : piece.text) {
      byte == ' ' ? text += replacement_text_ : text += byte;
    }
    const Piece whole{text, piece.at_start};
    if (splits_) {
      split_by_character(
          whole, [&](char32_t character) { return character == replacement_; }, Behavior::kMergedWithNext, sink);
    } else {
      sink.take(whole);
    }
  }

 private:
  char32_t replacement_;
  std::string replacement_text_;
  bool splits_;
  bool prepends_ = true;
  bool only_at_start_ = false;
};

PreTokenizer make_whitespace_split(const std::string& place) {
  // Rust's \w, and its \s.
  const std::string word = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200C}\x{200D})", space = R"(\t-\r\x{85}\p{Z})";
  return make_split(Pattern::regex("[" + word + "]+|[^" + word + space + "]+", place), /*invert=*/true,
                    Behavior::kRemoved);
}

/// Parses one step; `maps` is for ByteLevel.
PreTokenizer parse_pre_tokenizer(const JsonView& json, bool maps) {
  const auto& type = json.at("type").as_string();
  if (type == "ByteLevel") {
    return ByteLevelStep({.add_prefix_space = json.at("add_prefix_space").as_bool(),
                          .use_regex = json.bool_or("use_regex", true),
                          .maps = maps},
                         json.path());
  }
  if (type == "Split") {
    return make_split(Pattern::parse(json.at("pattern")), json.at("invert").as_bool(),
                      parse_behavior(json.at("behavior")));
  }
  if (type == "Whitespace") {
    return make_whitespace_split(json.path());
  }
  if (type == "WhitespaceSplit") {
    return make_split(is_whitespace, Behavior::kRemoved);
  }
  if (type == "Digits") {
    return make_split(is_numeric, json.at("individual_digits").as_bool() ? Behavior::kIsolated : Behavior::kContiguous);
  }
  if (type == "Punctuation") {
    return make_split(is_punctuation, json.has("behavior") ? parse_behavior(json.at("behavior")) : Behavior::kIsolated);
  }
  if (type == "Metaspace") {
    return MetaspaceStep(json);
  }
  refuse_type(json, "ByteLevel, Split, Whitespace, WhitespaceSplit, Digits, Punctuation, Metaspace, Sequence");
}

/// Step in a sequence, which splits its input for the following steps.
class StepsFrom : public PieceSink {
 public:
  StepsFrom(const PreTokenizers& pre_tokenizers, size_t index, PieceSink& last)
      : step_(pre_tokenizers.steps[index]), last_(last) {
    if (index + 1 < pre_tokenizers.steps.size()) {
      rest_ = std::make_unique<StepsFrom>(pre_tokenizers, index + 1, last);
    }
  }
  void take(const Piece& piece) override { step_(piece, rest_ ? *rest_ : last_); }

 private:
  const PreTokenizer& step_;
  PieceSink& last_;
  std::unique_ptr<StepsFrom> rest_;
};

}  // namespace

PreTokenizers parse_pre_tokenizers(const JsonView& json) {
  const auto steps = steps_of(json, "pretokenizers");
  PreTokenizers result;
  for (size_t i = 0; i < steps.size(); ++i) {
    const bool is_last = i + 1 == steps.size();
    result.steps.push_back(parse_pre_tokenizer(steps[i], /*maps=*/!is_last));
    result.gives_bytes = is_last && steps[i].at("type").as_string() == "ByteLevel";
  }
  return result;
}

void pre_tokenize(const PreTokenizers& pre_tokenizers, const Piece& piece, PieceSink& sink) {
  if (pre_tokenizers.steps.empty()) {
    sink.take(piece);
  } else {
    StepsFrom(pre_tokenizers, 0, sink).take(piece);
  }
}

}  // namespace tessera::text
