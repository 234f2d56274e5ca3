#pragma once
// Renders chats as text, like the chat templates of well-known models, without Jinja.
//
//   const auto chat = ChatTemplate::from_folder("Qwen3-8B");
//   const auto prompt = chat.render({{"user", "Hi"}}, {.add_generation_prompt = true});   // to generate an answer
//   const auto whole = chat.render({{"user", "Hi"}, {"assistant", "Hello!"}});            // to learn one
//   const auto ids = encode_chat(tokenizer, whole);       // ids.is_assistant marks the tokens that the loss counts
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
// A folder's template is recognized by the hash of its text. A modified template is refused with NotImplementedError;
// name one that renders plain chats equally instead. Messages are texts; readers of chats refuse tools and images.
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
  /// Appends the start of an answer, if the template has one.
  bool add_generation_prompt = false;
  /// Current date in llama3.1's system message. For Llama 3.2, transformers uses the day of the call.
  std::string date = "26 Jul 2024";
};

struct RenderedChat {
  struct Range {
    size_t begin = 0;
    size_t end = 0;
    bool operator==(const Range&) const = default;
  };

  std::string text;
  /// Byte ranges of the assistant's answers in `text`, each including its end token.
  std::vector<Range> assistant;
};

/// Special tokens of chat templates. The defaults are those of the models named above.
struct ChatTokens {
  std::optional<std::string> bos = std::nullopt;
  std::optional<std::string> eos = std::nullopt;
};

class ChatTemplate {
 public:
  /// Reads chat_template.jinja, or otherwise "chat_template" of tokenizer_config.json, and the tokens in the latter.
  static ChatTemplate from_folder(const std::string& folder);
  /// Reads the contents of a tokenizer_config.json; `name` is its name in errors.
  static ChatTemplate from_json(std::string_view json, const std::string& name = "tokenizer_config");
  /// Recognizes a Jinja template.
  static ChatTemplate from_jinja(std::string_view jinja, const std::string& name = "chat_template",
                                 const ChatTokens& tokens = {});
  /// Returns a template by name. Throws KeyError if the table above does not list it.
  static ChatTemplate named(const std::string& name, const ChatTokens& tokens = {});

  std::string name() const;

  /// Renders a chat. Throws ValueError for an empty chat, unknown roles, invalid UTF-8, and an order of roles that the
  /// template rejects or does not render.
  RenderedChat render(const std::vector<ChatMessage>& messages, const RenderOptions& options = {}) const;

 private:
  ChatTemplate(size_t kind, ChatTokens tokens) : kind_(kind), tokens_(std::move(tokens)) {}

  size_t kind_;  // index in the table of kinds
  ChatTokens tokens_;
};

struct EncodedChat {
  std::vector<int32_t> ids;
  std::vector<uint8_t> is_assistant = {};  // per token
};

/// Returns the ids of the whole text, without post-processor tokens. A token in which an answer begins, such as a
/// newline joined with the header's, belongs to the assistant.
EncodedChat encode_chat(const Tokenizer& tokenizer, const RenderedChat& chat);

}  // namespace tessera
