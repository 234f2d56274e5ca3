#include "text/post_processor.h"

#include "base/error.h"

namespace tessera::text {

PostProcessor::PostProcessor(const JsonView& json) {
  for (const auto& step : steps_of(json, "processors")) {
    const auto& type = step.at("type").as_string();
    if (type == "TemplateProcessing") {
      TESSERA_CHECK(NotImplementedError, items_.empty(), "{}: a second TemplateProcessing, one is supported",
                    step.path());
      read_template(step);
    } else if (type != "ByteLevel") {  // which only changes offsets
      refuse_type(step, "TemplateProcessing, ByteLevel, Sequence");
    }
  }
}

void PostProcessor::read_template(const JsonView& json) {
  const auto special_tokens = json.at("special_tokens");
  for (const auto& piece : json.at("single").elements()) {
    const bool is_text = piece.has("Sequence");
    const auto content = piece.at(is_text ? "Sequence" : "SpecialToken");
    const auto id = content.at("id");
    Item item{.ids = {}, .is_text = is_text};
    if (is_text) {
      TESSERA_CHECK(ValueError, id.as_string() == "A", "{}: is {}, must be \"A\", the only text", id.path(),
                    shown(id.value()));
    } else {
      for (const auto& special : special_tokens.at(id.as_string().c_str()).at("ids").elements()) {
        item.ids.push_back(special.as_id());
      }
    }
    items_.push_back(std::move(item));
  }
}

std::vector<int32_t> PostProcessor::apply(std::vector<int32_t> ids, bool add_special_tokens) const {
  if (items_.empty()) {
    return ids;
  }
  std::vector<int32_t> all;
  for (const auto& item : items_) {
    const auto& from = item.is_text ? ids : item.ids;
    if (item.is_text || add_special_tokens) {
      all.insert(all.end(), from.begin(), from.end());
    }
  }
  return all;
}

}  // namespace tessera::text
