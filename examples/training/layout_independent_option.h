#pragma once
// The option of train_gpt and finetune for the same bits on any number of ranks (docs/reliability.md).

#include <cstdint>
#include <string>

namespace CLI {
class App;
}

namespace tessera::examples {

/// Adds --layout-independent, the parts of a batch, as in LayoutIndependentOptions, to a group of a program's options.
void add_layout_independent_option(CLI::App& app, int64_t& parts, const std::string& group);

/// Values of a program's other options.
struct BatchLayout {
  int64_t batch = 0;
  int64_t accumulate = 1;
  int64_t data_ranks = 1;  // ranks with different data
  int64_t tp = 1;
};

/// Throws ValueError, naming the option that does not fit the others. `parts` may be 0 to not use it.
void check_layout_independent_option(int64_t parts, const BatchLayout& layout);

}  // namespace tessera::examples
