#include "examples/training/recompute_option.h"

#include <CLI/CLI.hpp>
#include <map>

namespace tessera::examples {

void add_recompute_option(CLI::App& app, const std::string& name, Recompute& recompute, const std::string& group) {
  std::map<std::string, Recompute> kinds;
  for (const auto kind : {Recompute::None, Recompute::Selective, Recompute::Full}) {
    kinds.emplace(to_string(kind), kind);
  }
  app.add_option_function<std::string>(
         name, [&recompute, kinds](const std::string& kind) { recompute = kinds.at(kind); },
         "keep less of each layer for backward, and compute it again: with 'selective', all but\n"
         "results of matrix products and attention; with 'full', all but the layer's input")
      ->check(CLI::IsMember(kinds).description(""))
      ->expected(0, 1)
      ->default_str("full")
      ->type_name("[KIND]")
      ->group(group);
}

}  // namespace tessera::examples
