#pragma once
// Adds special tokens around the ids of a text.

#include <cstdint>
#include <vector>

#include "text/json_view.h"

namespace tessera::text {

/// Immutable template of ids.
class PostProcessor {
 public:
  /// Reads the "post_processor" of a file. Throws NotImplementedError for types other than TemplateProcessing,
  /// ByteLevel and Sequence.
  explicit PostProcessor(const JsonView& json);

  /// Returns a text's ids, surrounded by the template's if `add_special_tokens`.
  std::vector<int32_t> apply(std::vector<int32_t> ids, bool add_special_tokens) const;

 private:
  /// Id, or the place of the text's ids.
  struct Item {
    std::vector<int32_t> ids;
    bool is_text = false;
  };

  void read_template(const JsonView& json);

  std::vector<Item> items_;  // empty: the text's ids are unchanged
};

}  // namespace tessera::text
