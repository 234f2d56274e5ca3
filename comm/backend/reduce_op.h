#pragma once
// How a reducing collective combines the values of the ranks.

#include <fmt/format.h>

#include <cstdint>
#include <string_view>

namespace tessera {

/// A reduction runs in the order of the ranks, ((r0 + r1) + r2) + ..., so that a result is the same on every rank, in
/// every run and on every backend, save two: a hierarchical group (comm/hierarchical_backend.h) adds up each host's
/// ranks first, and NCCL (comm/nccl/nccl_backend.h) has an order of its own, which depends on sizes and links. bfloat16
/// and float16 accumulate in float32 and round once, at the end; in those two they are rounded in between as well. Avg
/// divides the sum by the number of ranks and needs a floating or complex type. On bool, Sum and Max are "or", Product
/// and Min are "and". Min and Max hand a NaN on.
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
