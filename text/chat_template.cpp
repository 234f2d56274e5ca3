#define XXH_INLINE_ALL
#include "text/chat_template.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "text/json_view.h"
#include "text/unicode.h"

namespace tessera {

namespace {

using Messages = std::vector<ChatMessage>;

/// Returns whether Python's str.strip() removes the character.
bool is_python_space(char32_t character) {
  return text::is_whitespace(character) || (character >= 0x1C && character <= 0x1F);
}

std::string stripped(std::string_view text) {
  size_t begin = text.size(), end = 0;
  text::for_each_character(text, [&](char32_t character, size_t at, size_t bytes) {
    if (!is_python_space(character)) {
      begin = std::min(begin, at);
      end = at + bytes;
    }
  });
  return begin < end ? std::string(text.substr(begin, end - begin)) : std::string();
}

std::string_view without_leading_newlines(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of('\n'), text.size()));
}

std::string_view without_trailing_newlines(std::string_view text) {
  return text.substr(0, text.find_last_not_of('\n') + 1);  // npos + 1 is 0
}

/// State of a chat being rendered.
struct ChatWriter {
  std::string bos;
  std::string eos;
  RenderOptions options;
  RenderedChat chat = {};

  void write(std::string_view text) { chat.text += text; }
  void write_answer(std::string_view text) {
    chat.assistant.push_back({chat.text.size(), chat.text.size() + text.size()});
    chat.text += text;
  }
};

/// Returns the first message's content if it is a system message.
const std::string* system_message(const Messages& messages) {
  return messages[0].role == "system" ? &messages[0].content : nullptr;
}

/// Calls write(message, index) for each message after the optional system message; user and assistant must alternate.
template <class Write>
void for_each_turn(const Messages& messages, Write write) {
  const size_t first = system_message(messages) ? 1 : 0;
  for (size_t i = first; i < messages.size(); ++i) {
    const char* const expected = (i - first) % 2 == 0 ? "user" : "assistant";
    TESSERA_CHECK(ValueError, messages[i].role == expected,
                  "messages[{}].role: is \"{}\", must be \"{}\": this template takes an optional system message, then "
                  "user and assistant in turns",
                  i, messages[i].role, expected);
    write(messages[i], i - first);
  }
}

void write_llama2(ChatWriter& writer, const Messages& messages) {
  const auto* const system = system_message(messages);
  for_each_turn(messages, [&](const ChatMessage& message, size_t index) {
    if (message.role == "assistant") {
      writer.write_answer(" " + stripped(message.content) + " " + writer.eos);
      return;
    }
    const auto content =
        index == 0 && system ? "<<SYS>>\n" + *system + "\n<</SYS>>\n\n" + message.content : message.content;
    writer.write(writer.bos + "[INST] " + stripped(content) + " [/INST]");
  });
}

void write_llama3_turn(ChatWriter& writer, const ChatMessage& message) {
  writer.write("<|start_header_id|>" + message.role + "<|end_header_id|>\n\n");
  const auto content = stripped(message.content) + "<|eot_id|>";
  message.role == "assistant" ? writer.write_answer(content) : writer.write(content);
}

void write_llama3_prompt(ChatWriter& writer) {
  if (writer.options.add_generation_prompt) {
    writer.write("<|start_header_id|>assistant<|end_header_id|>\n\n");
  }
}

void write_llama3(ChatWriter& writer, const Messages& messages) {
  writer.write(writer.bos);
  for (const auto& message : messages) {
    write_llama3_turn(writer, message);
  }
  write_llama3_prompt(writer);
}

void write_llama31(ChatWriter& writer, const Messages& messages) {
  const auto* const system = system_message(messages);
  writer.write(writer.bos);
  writer.write("<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: " +
               writer.options.date + "\n\n" + (system ? stripped(*system) : "") + "<|eot_id|>");
  for (size_t i = system ? 1 : 0; i < messages.size(); ++i) {
    write_llama3_turn(writer, messages[i]);
  }
  write_llama3_prompt(writer);
}

/// Writes the first templates of Mistral 7B; `after` follows each answer.
void write_old_mistral(ChatWriter& writer, const Messages& messages, std::string_view after) {
  TESSERA_CHECK(ValueError, !system_message(messages), "messages[0].role: this template takes no system message");
  writer.write(writer.bos);
  for_each_turn(messages, [&](const ChatMessage& message, size_t) {
    if (message.role == "user") {
      writer.write("[INST] " + message.content + " [/INST]");
    } else {
      writer.write_answer(message.content + writer.eos);
      writer.write(after);
    }
  });
}

void write_mistral_v01(ChatWriter& writer, const Messages& messages) {
  write_old_mistral(writer, messages, " ");
}

void write_mistral_v02(ChatWriter& writer, const Messages& messages) {
  write_old_mistral(writer, messages, "");
}

void write_mistral_v1(ChatWriter& writer, const Messages& messages) {
  const auto* const system = system_message(messages);
  writer.write(writer.bos);
  for_each_turn(messages, [&](const ChatMessage& message, size_t index) {
    if (message.role == "user") {
      writer.write(" [INST] " + (index == 0 && system ? *system + "\n\n" : "") + message.content + " [/INST]");
    } else {
      writer.write_answer(" " + message.content + writer.eos);
    }
  });
}

/// Writes the system message into the last message if that is the user's, and otherwise omits it, as the template does.
template <class WriteAnswer>
void write_mistral_v3_form(ChatWriter& writer, const Messages& messages, const std::string& before,
                           WriteAnswer write_answer) {
  const auto* const system = system_message(messages);
  const size_t last = messages.size() - (system ? 2 : 1);
  writer.write(writer.bos);
  for_each_turn(messages, [&](const ChatMessage& message, size_t index) {
    if (message.role == "user") {
      writer.write(before + (index == last && system ? *system + "\n\n" : "") + message.content + "[/INST]");
    } else {
      write_answer(message.content);
    }
  });
}

void write_mistral_v3(ChatWriter& writer, const Messages& messages) {
  write_mistral_v3_form(writer, messages, "[INST] ",
                        [&](const std::string& content) { writer.write_answer(" " + stripped(content) + writer.eos); });
}

void write_mistral_v3_tekken(ChatWriter& writer, const Messages& messages) {
  write_mistral_v3_form(writer, messages, "[INST]",
                        [&](const std::string& content) { writer.write_answer(content + writer.eos); });
}

void write_chatml_turn(ChatWriter& writer, const std::string& role, const std::string& content) {
  writer.write("<|im_start|>" + role + "\n");
  role == "assistant" ? writer.write_answer(content + "<|im_end|>") : writer.write(content + "<|im_end|>");
  writer.write("\n");
}

void write_chatml_prompt(ChatWriter& writer) {
  if (writer.options.add_generation_prompt) {
    writer.write("<|im_start|>assistant\n");
  }
}

void write_chatml(ChatWriter& writer, const Messages& messages) {
  for (const auto& message : messages) {
    write_chatml_turn(writer, message.role, message.content);
  }
  write_chatml_prompt(writer);
}

void write_qwen2(ChatWriter& writer, const Messages& messages) {
  if (!system_message(messages)) {
    write_chatml_turn(writer, "system", "You are a helpful assistant.");
  }
  write_chatml(writer, messages);
}

void write_qwen25(ChatWriter& writer, const Messages& messages) {
  if (!system_message(messages)) {
    write_chatml_turn(writer, "system", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.");
  }
  write_chatml(writer, messages);
}

/// Returns the index of the last user message that is not a tool response, or else of the last message.
size_t last_query(const Messages& messages) {
  for (size_t i = messages.size(); i-- > 0;) {
    const auto& content = messages[i].content;
    if (messages[i].role == "user" &&
        !(content.starts_with("<tool_response>") && content.ends_with("</tool_response>"))) {
      return i;
    }
  }
  return messages.size() - 1;
}

/// Returns an answer in Qwen3's format: without thoughts in earlier answers, with (possibly empty) thoughts in the
/// last.
std::string qwen3_answer(const Messages& messages, size_t index) {
  constexpr std::string_view kThink = "<think>", kEnd = "</think>";
  const std::string_view whole = messages[index].content;
  std::string_view content = whole, thoughts;
  if (const size_t end = whole.find(kEnd); end != std::string_view::npos) {
    content = without_leading_newlines(whole.substr(whole.rfind(kEnd) + kEnd.size()));
    thoughts = without_trailing_newlines(whole.substr(0, end));
    const size_t begin = thoughts.rfind(kThink);
    thoughts =
        without_leading_newlines(begin == std::string_view::npos ? thoughts : thoughts.substr(begin + kThink.size()));
  }
  const bool is_last = index + 1 == messages.size();
  if (index <= last_query(messages) || (!is_last && thoughts.empty())) {
    return std::string(content);
  }
  return fmt::format("<think>\n{}\n</think>\n\n{}", without_leading_newlines(without_trailing_newlines(thoughts)),
                     without_leading_newlines(content));
}

void write_qwen3(ChatWriter& writer, const Messages& messages) {
  for (size_t i = 0; i < messages.size(); ++i) {
    const bool is_answer = messages[i].role == "assistant";
    write_chatml_turn(writer, messages[i].role, is_answer ? qwen3_answer(messages, i) : messages[i].content);
  }
  write_chatml_prompt(writer);
}

void write_gemma(ChatWriter& writer, const Messages& messages, const std::string& before) {
  writer.write(writer.bos);
  for_each_turn(messages, [&](const ChatMessage& message, size_t index) {
    const auto content = stripped(message.content) + "<end_of_turn>";
    if (message.role == "user") {
      writer.write("<start_of_turn>user\n" + (index == 0 ? before : "") + content);
    } else {
      writer.write("<start_of_turn>model\n");
      writer.write_answer(content);
    }
    writer.write("\n");
  });
  if (writer.options.add_generation_prompt) {
    writer.write("<start_of_turn>model\n");
  }
}

void write_gemma2(ChatWriter& writer, const Messages& messages) {
  TESSERA_CHECK(ValueError, !system_message(messages), "messages[0].role: this template takes no system message");
  write_gemma(writer, messages, "");
}

void write_gemma3(ChatWriter& writer, const Messages& messages) {
  const auto* const system = system_message(messages);
  write_gemma(writer, messages, system ? *system + "\n\n" : "");
}

struct ChatKind {
  const char* name;
  const char* bos;
  const char* eos;
  void (*write)(ChatWriter&, const Messages&);
  std::array<uint64_t, 2> hashes;  // template_hash() of published texts; 0: no second one
};

constexpr std::array kKinds = {
    ChatKind{"llama2", "<s>", "</s>", write_llama2, {0xcb7c5112dfc4a3b0}},
    ChatKind{"llama3", "<|begin_of_text|>", "<|eot_id|>", write_llama3, {0x9799ad6e2dea0594}},
    ChatKind{"llama3.1", "<|begin_of_text|>", "<|eot_id|>", write_llama31, {0xda8ae4616203881a, 0xba28f0d41aa45594}},
    ChatKind{"mistral-v0.1", "<s>", "</s>", write_mistral_v01, {0xb7f52373b11c60d7}},
    ChatKind{"mistral-v0.2", "<s>", "</s>", write_mistral_v02, {0xa5d004210ebce758}},
    ChatKind{"mistral-v1", "<s>", "</s>", write_mistral_v1, {0xfa42ef759a4066ef}},
    ChatKind{"mistral-v3", "<s>", "</s>", write_mistral_v3, {0xda83cc145815d4a5}},
    ChatKind{"mistral-v3-tekken", "<s>", "</s>", write_mistral_v3_tekken, {0xa5438a4278f4c2ee}},
    ChatKind{"chatml", "", "<|im_end|>", write_chatml, {0xa04f41d813a07b13}},
    ChatKind{"qwen2", "", "<|im_end|>", write_qwen2, {0xd5d943bd0bd9082f, 0x1dc335944ecff1a0}},
    ChatKind{"qwen2.5", "", "<|im_end|>", write_qwen25, {0xf9a29021c9d093ad}},
    ChatKind{"qwen3", "", "<|im_end|>", write_qwen3, {0x5a33498785c53d45, 0x4372a702009a6e39}},
    ChatKind{"gemma2", "<bos>", "<eos>", write_gemma2, {0x2c2e86beabccd2a4}},
    ChatKind{"gemma3", "<bos>", "<eos>", write_gemma3, {0xd9c620dcaf86f38d, 0xc8e457151b225c66}},
};

/// Returns XXH3 of the text. Normalizes "\n" escapes to newlines in Jinja's strings, as some copies have, and omits a
/// last newline, which Jinja drops.
uint64_t template_hash(std::string_view jinja) {
  std::string text;
  for (size_t i = 0; i < jinja.size(); ++i) {
    const bool is_escape = jinja.substr(i, 2) == "\\n";
    text += is_escape ? '\n' : jinja[i];
    i += is_escape ? 1 : 0;
  }
  if (text.ends_with('\n')) {
    text.pop_back();
  }
  return XXH3_64bits(text.data(), text.size());
}

std::vector<std::string> kind_names() {
  std::vector<std::string> names;
  std::ranges::transform(kKinds, std::back_inserter(names), [](const ChatKind& kind) { return kind.name; });
  return names;
}

/// Returns a token of a tokenizer_config.json, which is a string or an object; "" if there is none.
std::string chat_token(const text::JsonView& config, const char* key) {
  if (!config.has(key)) {
    return "";
  }
  const auto token = config.at(key);
  return token.value().is_object() ? token.at("content").as_string() : token.as_string();
}

ChatTokens chat_tokens(const text::JsonView& config) {
  return {.bos = chat_token(config, "bos_token"), .eos = chat_token(config, "eos_token")};
}

/// Returns the text of "chat_template", which may be a list of named templates.
const std::string& jinja_of(const text::JsonView& config) {
  TESSERA_CHECK(ValueError, config.has("chat_template"),
                "{}: has no \"chat_template\"; name one of {}, by ChatTemplate::named(\"chatml\") for instance",
                config.path(), fmt::join(kind_names(), ", "));
  const auto given = config.at("chat_template");
  if (!given.value().is_array()) {
    return given.as_string();
  }
  for (const auto& element : given.elements()) {
    if (element.at("name").as_string() == "default") {
      return element.at("template").as_string();
    }
  }
  throw ValueError(fmt::format("{}: none of its templates is named \"default\"", given.path()));
}

void check_message(const ChatMessage& message, size_t index) {
  TESSERA_CHECK(ValueError, message.role == "system" || message.role == "user" || message.role == "assistant",
                "messages[{}].role: is \"{}\", must be \"system\", \"user\" or \"assistant\"", index, message.role);
  TESSERA_CHECK(ValueError, text::valid_utf8_prefix(message.content) == message.content.size(),
                "messages[{}].content: is not UTF-8 from byte {} on", index, text::valid_utf8_prefix(message.content));
}

}  // namespace

ChatTemplate ChatTemplate::named(const std::string& name, const ChatTokens& tokens) {
  const auto* const kind = std::ranges::find_if(kKinds, [&](const ChatKind& one) { return one.name == name; });
  TESSERA_CHECK(KeyError, kind != kKinds.end(), "ChatTemplate::named(\"{}\"): known are {}", name,
                fmt::join(kind_names(), ", "));
  return {static_cast<size_t>(kind - kKinds.begin()),
          {.bos = tokens.bos.value_or(kind->bos), .eos = tokens.eos.value_or(kind->eos)}};
}

ChatTemplate ChatTemplate::from_jinja(std::string_view jinja, const std::string& name, const ChatTokens& tokens) {
  const uint64_t hash = template_hash(jinja);
  for (const auto& kind : kKinds) {
    if (std::ranges::count(kind.hashes, hash) > 0) {
      return named(kind.name, tokens);
    }
  }
  throw NotImplementedError(
      fmt::format("{}: this chat template is not known (its XXH3 is {:016x}). Known are the published ones of {}. If "
                  "one of them writes plain chats as this one does, name it: ChatTemplate::named(\"chatml\")",
                  name, hash, fmt::join(kind_names(), ", ")));
}

ChatTemplate ChatTemplate::from_json(std::string_view json, const std::string& name) {
  const auto parsed = text::parse_json(json, name);
  const text::JsonView config(parsed, name);
  return from_jinja(jinja_of(config), name + ".chat_template", chat_tokens(config));
}

ChatTemplate ChatTemplate::from_folder(const std::string& folder) {
  const auto config_path = folder + "/tokenizer_config.json", jinja_path = folder + "/chat_template.jinja";
  if (!std::filesystem::exists(jinja_path)) {
    return from_json(text::read_file(config_path), config_path);
  }
  ChatTokens tokens;
  if (std::filesystem::exists(config_path)) {
    const auto parsed = text::parse_json(text::read_file(config_path), config_path);
    tokens = chat_tokens(text::JsonView(parsed, config_path));
  }
  return from_jinja(text::read_file(jinja_path), jinja_path, tokens);
}

std::string ChatTemplate::name() const {
  return kKinds[kind_].name;
}

RenderedChat ChatTemplate::render(const std::vector<ChatMessage>& messages, const RenderOptions& options) const {
  TESSERA_CHECK(ValueError, !messages.empty(), "messages: there are none");
  for (size_t i = 0; i < messages.size(); ++i) {
    check_message(messages[i], i);
  }
  ChatWriter writer{.bos = *tokens_.bos, .eos = *tokens_.eos, .options = options};
  kKinds[kind_].write(writer, messages);
  return std::move(writer.chat);
}

EncodedChat encode_chat(const Tokenizer& tokenizer, const RenderedChat& chat) {
  const EncodeOptions as_is{.add_special_tokens = false};
  EncodedChat encoded{.ids = tokenizer.encode(chat.text, as_is)};
  encoded.is_assistant.resize(encoded.ids.size());
  // Returns how many ids cover the text up to `end`; a tokenizer does not report the positions of tokens.
  const auto tokens_before = [&](size_t end) {
    const auto ids = tokenizer.encode(std::string_view(chat.text).substr(0, end), as_is);
    return std::ranges::mismatch(ids, encoded.ids).in2 - encoded.ids.begin();
  };
  for (const auto& range : chat.assistant) {
    const auto begin = tokens_before(range.begin), end = tokens_before(range.end);
    std::fill(encoded.is_assistant.begin() + begin, encoded.is_assistant.begin() + std::max(begin, end), 1);
  }
  return encoded;
}

}  // namespace tessera
