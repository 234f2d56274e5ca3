// What each thread of the copy kernel does, run by loops in place of a GPU, against ATen.

#include "cuda/strided_copy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <random>

#include "fully_shard/layout/block_copy.h"
#include "fully_shard/layout/param_layout.h"
#include "third_party/catch2/catch.h"

namespace tessera::cuda {
namespace {

template <typename To, typename From = To>
void copy_on_cpu(const CopyTable& table, int threads) {
  for (int64_t tile = 0; tile < table.tiles(); ++tile) {
    for (int thread = 0; thread < threads; ++thread) {
      copy_table_tile<To, From>(table, tile, thread, threads);
    }
  }
}

template <typename T>
T* data_of(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

TEST_CASE("the tiles of the header's example") {
  CopyTable table;
  float x[1];
  table.add({.to = x, .from = x, .to_stride = 10000, .from_stride = 10000, .rows = 2, .cols = 10000}, 4, 4);
  table.add({.to = x, .from = x, .to_stride = 3000, .from_stride = 3000, .rows = 5, .cols = 3000}, 4, 4);
  CHECK(table.tiles() == 7);
  const auto check = [&](int64_t tile, int owner, CopyTile expected) {
    CAPTURE(tile);
    CHECK(find_owner(table.first_tile, table.count, tile) == owner);
    const CopyTile part = locate_tile(table.copies[owner], tile - table.first_tile[owner]);
    CHECK(part.row == expected.row);
    CHECK(part.col == expected.col);
    CHECK(part.rows == expected.rows);
    CHECK(part.cols == expected.cols);
  };
  check(0, 0, {0, 0, 1, 8192});
  check(1, 0, {0, 8192, 1, 1808});
  check(2, 0, {1, 0, 1, 8192});
  check(3, 0, {1, 8192, 1, 1808});
  check(4, 1, {0, 0, 2, 3000});
  check(5, 1, {2, 0, 2, 3000});
  check(6, 1, {4, 0, 1, 3000});
}

TEST_CASE("the tiles of a copy cover each element once, and none is too large") {
  const int64_t sizes[] = {0, 1, 2, 3, 7, 4095, 4096, 4097, 8191, 8192, 8193, 16384, 20000};
  for (const int64_t rows : {0, 1, 2, 3, 5, 8192, 8200}) {
    for (const int64_t cols : sizes) {
      if (rows > 100 && cols > 7) {
        continue;
      }
      CAPTURE(rows, cols);
      const StridedCopy copy{.rows = rows, .cols = cols};
      std::vector<int> seen(rows * cols, 0);
      for (int64_t tile = 0; tile < num_tiles(copy); ++tile) {
        const CopyTile part = locate_tile(copy, tile);
        REQUIRE(part.rows > 0);
        REQUIRE(part.cols > 0);
        REQUIRE(int64_t{part.rows} * part.cols <= kTileNumel);
        for (int64_t row = part.row; row < part.row + part.rows; ++row) {
          for (int64_t col = part.col; col < part.col + part.cols; ++col) {
            ++seen.at(row * cols + col);
          }
        }
      }
      CHECK(std::ranges::all_of(seen, [](int count) { return count == 1; }));
    }
  }
}

TEST_CASE("copies without tiles own none") {
  CopyTable table;
  float x[4];
  const StridedCopy none{.to = x, .from = x, .rows = 0, .cols = 4}, one{.to = x, .from = x, .rows = 1, .cols = 4};
  for (const auto& copy : {none, none, one, none, one, none}) {
    table.add(copy, 4, 4);
  }
  CHECK(table.tiles() == 2);
  CHECK(find_owner(table.first_tile, table.count, 0) == 2);
  CHECK(find_owner(table.first_tile, table.count, 1) == 4);
  while (!table.full()) {
    table.add(one, 4, 4);
  }
  CHECK(table.tiles() == 60);
  CHECK(find_owner(table.first_tile, table.count, 59) == 63);
  CopyTable empty;
  CHECK(empty.tiles() == 0);
}

TEST_CASE("wide accesses only where every one is aligned") {
  alignas(16) char to[64], from[64];
  const StridedCopy copy{.to = to, .from = from, .to_stride = 8, .from_stride = 16, .rows = 2, .cols = 8};
  const auto change = [&](auto member, auto value) {
    StridedCopy changed = copy;
    changed.*member = value;
    return changed;
  };
  CHECK(wide_access(4, 4) == 4);
  CHECK(wide_access(2, 4) == 4);
  CHECK(wide_access(4, 2) == 4);
  CHECK(wide_access(2, 2) == 8);
  CHECK(wide_access(1, 1) == 16);
  CHECK(allows_width(copy, 4, 4, 4));
  CHECK(allows_width(copy, 8, 2, 2));
  CHECK_FALSE(allows_width(change(&StridedCopy::to, static_cast<void*>(to + 4)), 4, 4, 4));
  CHECK_FALSE(allows_width(change(&StridedCopy::from, static_cast<const void*>(from + 8)), 4, 4, 4));
  CHECK(allows_width(change(&StridedCopy::from, static_cast<const void*>(from + 8)), 4, 4, 2));
  CHECK(allows_width(change(&StridedCopy::from, static_cast<const void*>(nullptr)), 4, 4, 4));
  CHECK_FALSE(allows_width(change(&StridedCopy::to_stride, int64_t{9}), 4, 4, 4));
  CHECK_FALSE(allows_width(change(&StridedCopy::from_stride, int64_t{18}), 4, 4, 4));
  CHECK_FALSE(allows_width(change(&StridedCopy::cols, int64_t{6}), 4, 4, 4));
  StridedCopy one_row = change(&StridedCopy::from_stride, int64_t{17});
  one_row.rows = 1;
  CHECK(allows_width(one_row, 4, 4, 4));
}

/// A table of random copies between two flat tensors, ATen's result of it, and the emulated kernel's.
template <typename To, typename From>
void check_random_copies(uint64_t seed, at::ScalarType to_dtype, at::ScalarType from_dtype) {
  CAPTURE(seed, to_dtype, from_dtype);
  std::mt19937_64 random(seed);
  const auto number = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const auto from = at::randn({200000}).mul_(100).to(from_dtype);
  const auto expected = at::full({200000}, 7, to_dtype), actual = expected.clone();
  CopyTable table;
  int64_t begin = 0;
  for (int i = 0; i < 12; ++i) {
    const bool aligned = number(0, 1) == 1;
    const int64_t unit = aligned ? 16 : 1, cols = number(0, i % 4 == 0 ? 20000 / unit : 40 / unit) * unit;
    const int64_t rows = cols > 8192 ? number(0, 2) : number(0, 30), stride = cols + number(0, 2) * unit;
    begin = (begin + unit - 1) / unit * unit;
    if (begin + rows * stride > 200000) {
      break;
    }
    const int64_t from_begin = number(0, (200000 - rows * stride) / unit) * unit;
    const bool zeros = number(0, 5) == 0;
    table.add({.to = data_of<To>(actual) + begin,
               .from = zeros ? nullptr : data_of<From>(from) + from_begin,
               .to_stride = stride,
               .from_stride = stride,
               .rows = rows,
               .cols = cols},
              sizeof(To), sizeof(From));
    const auto target = expected.as_strided({rows, cols}, {stride, 1}, begin);
    zeros ? target.zero_() : target.copy_(from.as_strided({rows, cols}, {stride, 1}, from_begin));
    begin += rows * stride;
  }
  copy_on_cpu<To, From>(table, static_cast<int>(number(1, 300)));
  CHECK(actual.equal(expected));
}

TEST_CASE("random copies and casts are ATen's, and nothing else is written") {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    check_random_copies<float, c10::BFloat16>(seed, at::kFloat, at::kBFloat16);
    check_random_copies<c10::BFloat16, float>(seed, at::kBFloat16, at::kFloat);
    check_random_copies<float, c10::Half>(seed, at::kFloat, at::kHalf);
    check_random_copies<c10::Half, float>(seed, at::kHalf, at::kFloat);
    check_random_copies<c10::Half, c10::BFloat16>(seed, at::kHalf, at::kBFloat16);
    check_random_copies<c10::BFloat16, c10::Half>(seed, at::kBFloat16, at::kHalf);
    check_random_copies<uint8_t, uint8_t>(seed, at::kByte, at::kByte);
    check_random_copies<uint16_t, uint16_t>(seed, at::kBFloat16, at::kBFloat16);
    check_random_copies<uint32_t, uint32_t>(seed, at::kFloat, at::kFloat);
    check_random_copies<uint64_t, uint64_t>(seed, at::kDouble, at::kDouble);
  }
}

StridedCopy out_of_flat(const BlockCopy& copy, const at::Tensor& param, const at::Tensor& flat) {
  return {.to = data_of<float>(param) + copy.param_offset,
          .from = data_of<c10::BFloat16>(flat) + copy.flat_offset,
          .to_stride = copy.param_stride,
          .from_stride = copy.flat_stride,
          .rows = copy.rows,
          .cols = copy.cols};
}

StridedCopy into_flat(const BlockCopy& copy, const at::Tensor& param, const at::Tensor& flat) {
  return {.to = data_of<c10::BFloat16>(flat) + copy.flat_offset,
          .from = data_of<float>(param) + copy.param_offset,
          .to_stride = copy.flat_stride,
          .from_stride = copy.param_stride,
          .rows = copy.rows,
          .cols = copy.cols};
}

TEST_CASE("a unit's copy-out and copy-in, on the dims and ranks of the engine, as its own copier does them") {
  const std::vector<std::vector<int64_t>> shapes{{5, 3}, {2}, {0, 4}, {6, 10, 16}, {1, 7}, {40, 300}};
  const std::vector<int64_t> dims{0, 0, 0, 1, 1, 1};
  for (int64_t ranks = 1; ranks <= 5; ++ranks) {
    CAPTURE(ranks);
    const auto layout = make_param_layout(shapes, ranks, dims);
    const int64_t rank_numel = layout.shard_numel + kSlotAlignment;
    const auto gathered = at::randn({ranks * rank_numel}).to(at::kBFloat16);
    const auto filled = at::full({ranks * rank_numel}, 3, at::kBFloat16), expected_filled = filled.clone();
    CopyTable out, in;
    BlockCopier copier;
    std::vector<at::Tensor> params, expected_params;
    for (size_t i = 0; i < shapes.size(); ++i) {
      params.push_back(at::full(shapes[i], 9.f));
      expected_params.push_back(params[i].clone());
      const auto copies = layout.copies(layout.slots[i], rank_numel);
      copier.from_flat(expected_params[i], gathered, copies);
      for (const auto& copy : copies) {
        out.add(out_of_flat(copy, params[i], gathered), sizeof(float), sizeof(c10::BFloat16));
      }
    }
    copier.run();
    copy_on_cpu<float, c10::BFloat16>(out, 256);
    for (size_t i = 0; i < shapes.size(); ++i) {
      CAPTURE(i);
      CHECK(params[i].equal(expected_params[i]));
      const auto copies = layout.copies(layout.slots[i], rank_numel);
      copier.to_flat(params[i], expected_filled, copies);
      for (const auto& copy : copies) {
        in.add(into_flat(copy, params[i], filled), sizeof(c10::BFloat16), sizeof(float));
      }
    }
    const auto unused = layout.unused(rank_numel);
    copier.zero(expected_filled, unused);
    copier.run();
    copy_on_cpu<c10::BFloat16, float>(in, 256);
    CopyTable zeros;
    for (const auto& range : unused) {
      zeros.add({.to = data_of<c10::BFloat16>(filled) + range.offset, .rows = 1, .cols = range.numel}, 2, 4);
    }
    copy_on_cpu<c10::BFloat16, float>(zeros, 256);
    CHECK(filled.equal(expected_filled));
  }
}

}  // namespace
}  // namespace tessera::cuda
