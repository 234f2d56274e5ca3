// Chats as transformers' apply_chat_template has them.
//
//   CHAT_TEMPLATES=<folder> ./bazelw run //tests/text:chat_template_test -- '[.published]'
//
// The folder has published templates, named as the peer says.

#include "text/chat_template.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "testing/expect.h"
#include "testing/peer_python.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using nlohmann::json;

json read_json(const std::string& path) {
  return json::parse(read_file(path));
}

std::vector<ChatMessage> read_messages(const json& list) {
  std::vector<ChatMessage> messages;
  for (const auto& message : list) {
    messages.push_back({message["role"], message["content"]});
  }
  return messages;
}

std::optional<std::string> text_or_null(const json& value) {
  return value.is_null() ? std::nullopt : std::optional(value.get<std::string>());
}

/// Returns the text, nothing if the chat is refused.
std::optional<std::string> render_or_refuse(const ChatTemplate& chat_template, const std::vector<ChatMessage>& messages,
                                            bool add_generation_prompt) {
  try {
    return chat_template.render(messages, {.add_generation_prompt = add_generation_prompt, .date = "1 Jan 2030"}).text;
  } catch (const ValueError&) {
    return std::nullopt;
  }
}

/// Reads templates.json: a template that is recognised, or named.
std::vector<ChatTemplate> read_templates(const std::string& path) {
  std::vector<ChatTemplate> templates;
  for (const auto& item : read_json(path)) {
    const auto name = item[0].get<std::string>();
    const ChatTokens tokens{.bos = text_or_null(item[2]).value_or(""), .eos = text_or_null(item[3]).value_or("")};
    templates.push_back(item[1].is_null() ? ChatTemplate::named(name, tokens)
                                          : ChatTemplate::from_jinja(item[1].get<std::string>(), name, tokens));
    CHECK(templates.back().name() == name);
  }
  return templates;
}

void check_rendered_chats(const TempFolder& folder) {
  const auto templates = read_templates(folder.path("templates.json"));
  int rendered = 0, refused = 0;
  for (const auto& item : read_json(folder.path("cases.json"))) {
    const auto& chat_template = templates[item[0].get<size_t>()];
    INFO(chat_template.name() << " " << item.dump());
    const auto expected = text_or_null(item[3]);
    CHECK(render_or_refuse(chat_template, read_messages(item[1]), item[2].get<bool>()) == expected);
    ++(expected ? rendered : refused);
  }
  CHECK(rendered > 2500);
  CHECK(refused > 500);
}

void check_encoded_chats(const TempFolder& folder) {
  const auto tokenizer = Tokenizer::from_file(folder.path("tokenizer.json"));
  const auto chat_template = ChatTemplate::named("chatml");
  int assistant = 0;
  for (const auto& item : read_json(folder.path("masks.json"))) {
    INFO(item.dump());
    const auto encoded = encode_chat(tokenizer, chat_template.render(read_messages(item[0])));
    CHECK(encoded.ids == item[1].get<std::vector<int32_t>>());
    CHECK(encoded.is_assistant == item[2].get<std::vector<uint8_t>>());
    assistant += static_cast<int>(std::count(encoded.is_assistant.begin(), encoded.is_assistant.end(), 1));
  }
  CHECK(assistant > 1000);
}

/// Compares with transformers; `published` is a folder for the peer, or "".
void check_with_peer(const std::string& published) {
  const TempFolder folder;
  if (run_peer_python("sys", "tests/text/chat_template_peer.py", folder.path() + " " + published)) {
    check_rendered_chats(folder);
    check_encoded_chats(folder);
  }
}

std::vector<std::string> answers(const RenderedChat& chat) {
  std::vector<std::string> texts;
  texts.reserve(chat.assistant.size());
  for (const auto& range : chat.assistant) {
    texts.push_back(chat.text.substr(range.begin, range.end - range.begin));
  }
  return texts;
}

const std::vector<ChatMessage> kTwoTurns = {{"user", "a"}, {"assistant", " b "}, {"user", "c"}, {"assistant", "d"}};

}  // namespace

TEST_CASE("chats, their ids and the assistant's among them are those of transformers") {
  check_with_peer("");
}

TEST_CASE("published templates are recognised, and render as transformers renders them", "[.published]") {
  const char* folder = std::getenv("CHAT_TEMPLATES");
  REQUIRE(folder);
  check_with_peer(folder);
}

TEST_CASE("what the assistant wrote is its answers with the tokens that end them") {
  const auto answers_of = [](const char* name) { return answers(ChatTemplate::named(name).render(kTwoTurns)); };
  using Texts = std::vector<std::string>;
  CHECK(answers_of("llama2") == Texts{" b </s>", " d </s>"});
  CHECK(answers_of("llama3") == Texts{"b<|eot_id|>", "d<|eot_id|>"});
  CHECK(answers_of("llama3.1") == Texts{"b<|eot_id|>", "d<|eot_id|>"});
  CHECK(answers_of("mistral-v0.1") == Texts{" b </s>", "d</s>"});
  CHECK(answers_of("mistral-v1") == Texts{"  b </s>", " d</s>"});
  CHECK(answers_of("mistral-v3") == Texts{" b</s>", " d</s>"});
  CHECK(answers_of("chatml") == Texts{" b <|im_end|>", "d<|im_end|>"});
  CHECK(answers_of("qwen3") == Texts{" b <|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"});
  CHECK(answers_of("gemma3") == Texts{"b<end_of_turn>", "d<end_of_turn>"});
  CHECK(answers(ChatTemplate::named("chatml").render({{"user", "a"}}, {.add_generation_prompt = true})).empty());
}

TEST_CASE("a folder's template comes from chat_template.jinja, or else from tokenizer_config.json") {
  const TempFolder folder;
  const std::string chatml =
      "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
      "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
  expect_throws<ValueError>([&] { ChatTemplate::from_folder(folder.path()); }, "tokenizer_config.json: cannot be read");
  const auto write = [&](const std::string& name, const std::string& content) {
    std::ofstream(folder.path(name)) << content;
  };
  write("tokenizer_config.json", json{{"chat_template", chatml}}.dump());
  CHECK(ChatTemplate::from_folder(folder.path()).name() == "chatml");
  write("tokenizer_config.json", json{{"chat_template", json::array({{{"name", "tool_use"}, {"template", "x"}},
                                                                     {{"name", "default"}, {"template", chatml}}})}}
                                     .dump());
  CHECK(ChatTemplate::from_folder(folder.path()).name() == "chatml");
  write("tokenizer_config.json", "{}");
  expect_throws<ValueError>([&] { ChatTemplate::from_folder(folder.path()); }, "has no \"chat_template\"; name one of");
  write("tokenizer_config.json", "{");
  expect_throws<ValueError>([&] { ChatTemplate::from_folder(folder.path()); }, "tokenizer_config.json: no valid JSON");
  write("tokenizer_config.json", R"({"chat_template": "x", "bos_token": {"content": "<b>"}, "eos_token": "<e>"})");
  write("chat_template.jinja", chatml + "\n");
  CHECK(ChatTemplate::from_folder(folder.path()).name() == "chatml");
  write("chat_template.jinja", chatml + " ");
  expect_throws<NotImplementedError>([&] { ChatTemplate::from_folder(folder.path()); },
                                     "chat_template.jinja: this chat template is not known");
}

TEST_CASE("the tokens of a config replace the models' own") {
  const auto chat = ChatTemplate::named("llama2", {.eos = "<e>"}).render({{"user", "a"}, {"assistant", "b"}});
  CHECK(chat.text == "<s>[INST] a [/INST] b <e>");
  expect_throws<ValueError>([] { ChatTemplate::from_json(R"({"chat_template": 5})"); },
                            "tokenizer_config.chat_template: is 5");
  expect_throws<NotImplementedError>([] { ChatTemplate::from_json(R"({"chat_template": "x"})"); },
                                     "ChatTemplate::named(\"chatml\")");
}

TEST_CASE("chats that are none are refused") {
  const auto chatml = ChatTemplate::named("chatml");
  expect_throws<ValueError>([&] { chatml.render({}); }, "messages: there are none");
  expect_throws<ValueError>(
      [&] {
        chatml.render({{"user", "a"}, {"tool", "b"}});
      },
      "messages[1].role: is \"tool\", must be \"system\", \"user\" or \"assistant\"");
  expect_throws<ValueError>(
      [&] {
        chatml.render({{"user", "a\xFF"}});
      },
      "messages[0].content: is not UTF-8 from byte 1 on");
  expect_throws<ValueError>(
      [] {
        ChatTemplate::named("llama2").render({{"user", "a"}, {"user", "b"}});
      },
      "messages[1].role: is \"user\", must be \"assistant\"");
  expect_throws<KeyError>([] { ChatTemplate::named("llama4"); }, "known are llama2, llama3,");
}

}  // namespace tessera::testing
