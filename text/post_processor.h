#pragma once
// What is put around the ids of a text.

#include <cstdint>
#include <vector>

#include "text/json_view.h"

namespace tessera::text {

/// An immutable template of ids.
class PostProcessor {
 public:
  /// Reads the "post_processor" of a file. Throws NotImplementedError for types other than TemplateProcessing,
  /// ByteLevel and Sequence.
  explicit PostProcessor(const JsonView& json);

  /// Puts the template's ids, if these are wanted, around those of a text.
  std::vector<int32_t> apply(std::vector<int32_t> ids, bool add_special_tokens) const;

 private:
  /// Ids, or a place of the text's.
  struct Item {
    std::vector<int32_t> ids;
    bool is_text = false;
  };

  void read_template(const JsonView& json);

  std::vector<Item> items_;  // none: the text's ids as they are
};

}  // namespace tessera::text
