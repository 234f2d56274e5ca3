#pragma once
// Chats as text, as the chat templates of well-known models write them, without Jinja.
//
//   const auto chat = ChatTemplate::from_folder("Qwen3-8B");
//   const auto prompt = chat.render({{"user", "Hi"}}, {.add_generation_prompt = true});   // to generate an answer
//   const auto whole = chat.render({{"user", "Hi"}, {"assistant", "Hello!"}});            // to learn one
//   const auto ids = encode_chat(tokenizer, whole);       // ids.is_assistant says which tokens the loss is of
//
//   named                       published with                form
//   llama2                      Llama 2 chat                  <s>[INST] Hi [/INST] Hello! </s>
//   llama3                      Llama 3 instruct              <|start_header_id|>user<|end_header_id|> ... <|eot_id|>
//   llama3.1                    Llama 3.1, 3.2, 3.3 instruct  as llama3, after a system message with dates
//   mistral-v0.1, mistral-v0.2  Mistral 7B instruct of 2023   <s>[INST] Hi [/INST]Hello!</s>
//   mistral-v1                  Mistral 7B instruct of 2024   <s> [INST] Hi [/INST] Hello!</s>
//   mistral-v3                  Mistral Large 2407            <s>[INST] Hi[/INST] Hello!</s>
//   mistral-v3-tekken           Mistral Nemo                  <s>[INST]Hi[/INST]Hello!</s>
//   chatml                      OpenHermes and many others    <|im_start|>user\nHi<|im_end|>\n
//   qwen2, qwen2.5, qwen3       Qwen2, Qwen2.5, Qwen3         as chatml, with a system message or thoughts
//   gemma2, gemma3              Gemma 2, Gemma 3              <start_of_turn>user\nHi<end_of_turn>\n
//
// A folder's template is recognised by the hash of its text, and a changed one is refused, with NotImplementedError:
// then name one that it equals for plain chats. Messages are texts; readers of chats refuse tools and images.
//
// Thread safety: values. Source: transformers' apply_chat_template, which renders the same bytes.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace tessera {

struct ChatMessage {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

struct RenderOptions {
  /// Ends with the start of an answer, if the template has one.
  bool add_generation_prompt = false;
  /// Today's date in llama3.1's system message; transformers takes the day of the call for Llama 3.2.
  std::string date = "26 Jul 2024";
};

struct RenderedChat {
  struct Range {
    size_t begin = 0;
    size_t end = 0;
    bool operator==(const Range&) const = default;
  };

  std::string text;
  /// The assistant's answers, in bytes of `text`, each with the token that ends it.
  std::vector<Range> assistant;
};

/// Tokens that templates put around chats. Defaults: those of the models named above.
struct ChatTokens {
  std::optional<std::string> bos = std::nullopt;
  std::optional<std::string> eos = std::nullopt;
};

class ChatTemplate {
 public:
  /// Reads chat_template.jinja, or else the "chat_template" of tokenizer_config.json, and the tokens there.
  static ChatTemplate from_folder(const std::string& folder);
  /// Reads the content of a tokenizer_config.json; `name` stands for it in errors.
  static ChatTemplate from_json(std::string_view json, const std::string& name = "tokenizer_config");
  /// Recognises a template.
  static ChatTemplate from_jinja(std::string_view jinja, const std::string& name = "chat_template",
                                 const ChatTokens& tokens = {});
  /// Throws KeyError for a name that is not in the table above.
  static ChatTemplate named(const std::string& name, const ChatTokens& tokens = {});

  std::string name() const;

  /// Throws ValueError for a chat without messages, other roles, an order of roles that the template refuses or does
  /// not write, and what is not UTF-8.
  RenderedChat render(const std::vector<ChatMessage>& messages, const RenderOptions& options = {}) const;

 private:
  ChatTemplate(size_t kind, ChatTokens tokens) : kind_(kind), tokens_(std::move(tokens)) {}

  size_t kind_;  // in the table of kinds
  ChatTokens tokens_;
};

struct EncodedChat {
  std::vector<int32_t> ids;
  std::vector<uint8_t> is_assistant = {};  // by token
};

/// Returns the ids of the whole text, without those that a post-processor adds. A token that an answer begins within,
/// as a newline may be one with the header's, is the assistant's.
EncodedChat encode_chat(const Tokenizer& tokenizer, const RenderedChat& chat);

}  // namespace tessera
