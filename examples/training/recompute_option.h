#pragma once
// The option of train_gpt and finetune that trades computation for memory.

#include <string>

#include "activation_checkpoint/checkpoint_options.h"

namespace CLI {
class App;
}

namespace tessera::examples {

/// Adds an option `name`, which may be followed by "selective", "full" (the default) or "none", to a group of a
/// program's options.
void add_recompute_option(CLI::App& app, const std::string& name, Recompute& recompute, const std::string& group);

}  // namespace tessera::examples
