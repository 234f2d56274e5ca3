#include "examples/training/layout_independent_option.h"

#include <CLI/CLI.hpp>
#include <bit>

#include "base/error.h"

namespace tessera::examples {

void add_layout_independent_option(CLI::App& app, int64_t& parts, const std::string& group) {
  app.add_option("--layout-independent", parts,
                 "compute each batch in so many parts, a power of two, and add their gradients in one\n"
                 "order: the run has the same bits on all numbers of ranks up to this one; 0: it has not")
      ->capture_default_str()
      ->group(group)
      ->type_name("PARTS");
}

void check_layout_independent_option(int64_t parts, const BatchLayout& layout) {
  if (parts == 0) {
    return;
  }
  const auto ranks = static_cast<uint64_t>(layout.data_ranks);
  TESSERA_CHECK(ValueError,
                parts > 0 && std::has_single_bit(static_cast<uint64_t>(parts)) &&
                    static_cast<uint64_t>(parts) >= std::bit_ceil(ranks),
                "--layout-independent {}: must be a power of two, for {} ranks at least {}", parts, ranks,
                std::bit_ceil(ranks));
  TESSERA_CHECK(ValueError, layout.batch % parts == 0,
                "--batch {}: must be a multiple of --layout-independent {}, so that parts are equal", layout.batch,
                parts);
  TESSERA_CHECK(ValueError, layout.tp == 1 || std::has_single_bit(ranks),
                "--layout-independent {}: beside --tp {}, the ranks that see own data must be a power of two, not {}",
                parts, layout.tp, ranks);
  TESSERA_CHECK(ValueError, layout.accumulate == 1,
                "--accumulate {}: --layout-independent {} makes a pass for each of its parts; leave one of them out",
                layout.accumulate, parts);
}

}  // namespace tessera::examples
