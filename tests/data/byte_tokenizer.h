#pragma once
// A tokenizer whose ids are bytes: 65 is "A". 256 is "<|im_start|>", 257 "<|im_end|>", and 258 "<s>" comes first in
// what has special tokens.

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "testing/temp_folder.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

namespace tessera::testing {

inline Tokenizer byte_tokenizer() {
  using nlohmann::json;
  json vocabulary, added = json::array();
  for (int byte = 0; byte < 256; ++byte) {
    std::string character;
    text::append_utf8(character, text::byte_character(static_cast<unsigned char>(byte)));
    vocabulary[character] = byte;
  }
  for (const char* content : {"<|im_start|>", "<|im_end|>", "<s>"}) {
    added.push_back({{"id", 256 + added.size()},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const json start = {{"id", "<s>"}, {"ids", {258}}, {"tokens", {"<s>"}}};
  const json file = {
      {"added_tokens", added},
      {"pre_tokenizer",
       {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}}},
      {"post_processor",
       {{"type", "TemplateProcessing"},
        {"single", json::array({{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
                                {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}})},
        {"pair", json::array()},
        {"special_tokens", {{"<s>", start}}}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", json::array()}}}};
  return Tokenizer::from_json(file.dump());
}

/// Writes a file, and returns its path.
inline std::string write_file(const TempFolder& folder, const std::string& name, const std::string& content) {
  std::ofstream(folder.path(name), std::ios::binary) << content;
  return folder.path(name);
}

}  // namespace tessera::testing
