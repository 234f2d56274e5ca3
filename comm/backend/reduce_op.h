#pragma once
// Reductions of collectives.

#include <fmt/format.h>

#include <cstdint>
#include <string_view>

namespace tessera {

/// Reduction in the order of the ranks, ((r0 + r1) + r2) + .... Results are equal on all ranks, in all runs and on all
/// backends but two: "hierarchical" first adds each host's ranks, and NCCL has its own order, which depends on sizes
/// and links. bfloat16 and float16 accumulate in float32 and round once at the end; in those two they also round in
/// between. Avg divides the sum by the number of ranks and needs a floating or complex dtype. For bool, Sum and Max are
/// "or", Product and Min are "and". Min and Max propagate NaN.
enum class ReduceOp : uint8_t { Sum, Avg, Min, Max, Product };

constexpr std::string_view name(ReduceOp op) {
  constexpr std::string_view names[] = {"Sum", "Avg", "Min", "Max", "Product"};
  return names[static_cast<uint8_t>(op)];
}

}  // namespace tessera

template <>
struct fmt::formatter<tessera::ReduceOp> : fmt::formatter<std::string_view> {
  auto format(tessera::ReduceOp op, fmt::format_context& context) const {
    return fmt::formatter<std::string_view>::format(tessera::name(op), context);
  }
};
