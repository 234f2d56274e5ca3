// Where a shard's random numbers come from, against loops in ATen's order: which number each element of a whole tensor
// gets, and that a shard gets those of its elements.

#include "cuda/draw_tile.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <cmath>
#include <map>
#include <vector>

#include "cuda/draw_table.h"
#include "tests/cuda/shard_of_view.h"
#include "third_party/catch2/catch.h"

namespace tessera::cuda {
namespace {

constexpr GpuSize kSmallGpu{.multiprocessors = 2, .threads_each = 512};  // 1024 threads at most

ShardOfWhole all_of(int64_t numel) {
  return {.sizes = {numel}, .whole_strides = {1}, .local_strides = {1}, .whole_numel = numel};
}

/// ATen's loop over one piece: elements → places.
std::map<int64_t, DrawPlace> places_in_a_grid_stride_loop(int64_t numel, const GpuSize& gpu, const DrawSource& source) {
  const int64_t blocks = std::min((numel + 255) / 256, gpu.multiprocessors * (gpu.threads_each / 256));
  const int64_t threads = blocks * 256, stride = threads * source.width;
  const int64_t rounded = ((numel - 1) / stride + 1) * stride;
  std::map<int64_t, DrawPlace> places;
  for (int64_t thread = 0; thread < threads; ++thread) {
    uint64_t offset = source.offset;
    for (int64_t first = thread; first < rounded; first += stride) {
      for (int lane = 0; lane < source.width; ++lane) {
        if (first + threads * lane < numel) {
          places[first + threads * lane] = {static_cast<uint64_t>(thread), offset, lane};
        }
      }
      offset += 4;
    }
  }
  return places;
}

/// A number that tells its place.
double number_at(uint64_t seed, const DrawPlace& place) {
  return static_cast<double>(seed + 7 * place.sequence + 1'000'003 * place.offset) + 0.125 * place.lane;
}

/// Philox4x32-10 (Salmon et al., SC 2011), as cuRAND counts: draws in the low words, sequences in the high ones.
std::array<uint32_t, 4> philox(uint64_t seed, const DrawPlace& place) {
  const uint64_t draw = place.offset / 4;
  std::array<uint32_t, 4> counter = {static_cast<uint32_t>(draw), static_cast<uint32_t>(draw >> 32),
                                     static_cast<uint32_t>(place.sequence),
                                     static_cast<uint32_t>(place.sequence >> 32)};
  auto low_key = static_cast<uint32_t>(seed), high_key = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0], b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ low_key, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ high_key, static_cast<uint32_t>(a)};
    low_key += 0x9E3779B9;
    high_key += 0xBB67AE85;
  }
  return counter;
}

/// cuRAND's number over (0, 1] from 32 bits.
double uniform_of(uint32_t bits) {
  return std::ldexp(bits, -32) + std::ldexp(1, -33);
}

double philox_uniform(uint64_t seed, const DrawPlace& place) {
  return uniform_of(philox(seed, place)[static_cast<size_t>(place.lane)]);
}

/// Box and Muller's pair from two numbers: the sine first.
double philox_normal(uint64_t seed, const DrawPlace& place) {
  const auto bits = philox(seed, place);
  const size_t pair = static_cast<size_t>(place.lane) / 2 * 2;
  const double radius = std::sqrt(-2 * std::log(uniform_of(bits[pair])));
  const double angle = 2 * std::acos(-1.0) * uniform_of(bits[pair + 1]);
  return radius * (place.lane % 2 == 0 ? std::sin(angle) : std::cos(angle));
}

struct Unchanged {
  double operator()(double drawn) const { return drawn; }
};

/// The shard as kThreads threads of a launch write it.
template <typename Draw = decltype(number_at)>
at::Tensor drawn(const ShardOfWhole& shard, const GpuSize& gpu, const DrawSource& source, at::Tensor local,
                 const Draw& draw = number_at) {
  constexpr int64_t kThreads = 96;
  const auto table = draw_table(shard, gpu, source);
  REQUIRE(table.has_value());
  for (int64_t thread = 0; thread < kThreads; ++thread) {
    draw_elements(*table, thread, kThreads, local.mutable_data_ptr<double>(), draw, Unchanged());
  }
  return local;
}

}  // namespace

TEST_CASE("an element's number is the one that a grid-stride loop gives it") {
  for (const int width : {2, 4}) {
    for (const int64_t numel : {1, 255, 256, 257, 1024, 1025, 2048, 4096, 4097, 3 * 4096, 20'000}) {
      for (const GpuSize gpu : {kSmallGpu, GpuSize{.multiprocessors = 1, .threads_each = 1000}}) {
        CAPTURE(width, numel, gpu.multiprocessors);
        const DrawSource source{.item_bytes = 4, .width = width, .seed = 5, .offset = 12};
        const auto table = draw_table(all_of(numel), gpu, source);
        REQUIRE(table.has_value());
        const auto places = places_in_a_grid_stride_loop(numel, gpu, source);
        REQUIRE(places.size() == static_cast<size_t>(numel));
        uint64_t last = 0;
        for (const auto& [element, place] : places) {
          REQUIRE(draw_place(*table, element) == place);
          last = std::max(last, place.offset);
        }
        CHECK(offset_after(numel, gpu, source) == last + 4);
      }
    }
  }
}

// Printed by many a tutorial: torch.manual_seed(0), and torch.rand(10, device="cuda") twice, or torch.randn(12, ...).
TEST_CASE("the numbers are those that PyTorch prints on a GPU") {
  constexpr GpuSize gpu{.multiprocessors = 108, .threads_each = 2048};
  DrawSource source{.item_bytes = 4, .width = 4, .seed = 0, .offset = 0};
  const auto rand = [&](int64_t begin, int64_t end) {
    ShardOfWhole shard = all_of(10);
    shard.sizes = {end - begin};
    shard.whole_offset = begin;
    return drawn(shard, gpu, source, at::zeros({end - begin}, at::kDouble), philox_uniform);
  };
  const auto first = at::tensor({.3990, .5167, .0249, .9401, .9459, .7967, .4150, .8203, .2290, .9096}, at::kDouble);
  CHECK(rand(0, 10).allclose(first, 0, 6e-5));
  CHECK(rand(7, 10).allclose(first.slice(0, 7), 0, 6e-5));
  source.offset = offset_after(10, gpu, source);
  const auto second = at::tensor({.9722, .7910, .4690, .3300, .3345, .3783, .7640, .6405, .1103, .3594}, at::kDouble);
  CHECK(rand(0, 10).allclose(second, 0, 6e-5));
  source.offset = 0;
  const auto normal = at::tensor(
      {-.9247, -.4253, -2.6438, .1452, -.1209, -.5797, -.6229, -.3284, -1.0745, -.3631, -1.6711, 2.2655}, at::kDouble);
  CHECK(drawn(all_of(12), gpu, source, at::zeros({12}, at::kDouble), philox_normal).allclose(normal, 0, 6e-5));
}

TEST_CASE("a shard gets its elements of the whole tensor's numbers") {
  const DrawSource source{.item_bytes = 8, .width = 2, .seed = 1, .offset = 4};
  const auto whole = drawn(all_of(int64_t{5} * 30 * 41), kSmallGpu, source, at::empty({5, 30, 41}, at::kDouble));
  for (int64_t dim = 0; dim < 3; ++dim) {
    for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{{0, 2}, {2, 5}, {4, 5}, {3, 3}}) {
      CAPTURE(dim, begin, end);
      const auto part = whole.slice(dim, begin, end);
      const auto local = at::zeros(part.sizes(), at::kDouble);
      CHECK(drawn(shard_of_view(part, whole, local.strides()), kSmallGpu, source, local).equal(part));
      // Memory in another order of dims.
      const auto other = at::zeros({part.size(2), part.size(0), part.size(1)}, at::kDouble).permute({1, 2, 0});
      CHECK(drawn(shard_of_view(part, whole, other.strides()), kSmallGpu, source, other).equal(part));
    }
  }
}

TEST_CASE("dims that are one in both memories become one") {
  const DrawSource source{.item_bytes = 4, .width = 4};
  const auto rows = draw_table({.sizes = {3, 1, 5, 7},
                                .whole_strides = {35, 35, 7, 1},
                                .local_strides = {35, 999, 7, 1},
                                .whole_offset = 70,
                                .whole_numel = 350},
                               kSmallGpu, source);
  REQUIRE(rows.has_value());
  CHECK(rows->dims == 1);
  CHECK(rows->sizes[0] == 105);
  const auto columns =
      draw_table({.sizes = {3, 5, 2}, .whole_strides = {35, 7, 1}, .local_strides = {10, 2, 1}, .whole_numel = 105},
                 kSmallGpu, source);
  REQUIRE(columns.has_value());
  CHECK(columns->dims == 2);
  // Nine dims of which no two are one.
  std::vector<int64_t> strides;
  for (int64_t stride = 1 << 18; strides.size() < 9; stride /= 4) {
    strides.push_back(stride);
  }
  const ShardOfWhole many{.sizes = std::vector<int64_t>(9, 2),
                          .whole_strides = strides,
                          .local_strides = {256, 128, 64, 32, 16, 8, 4, 2, 1},
                          .whole_numel = 1 << 19};
  CHECK_FALSE(draw_table(many, kSmallGpu, source).has_value());
}

TEST_CASE("an empty shard draws nothing, and the generator moves all the same") {
  const DrawSource source{.item_bytes = 4, .width = 4, .offset = 8};
  const auto table = draw_table({.sizes = {0, 4}, .whole_strides = {4, 1}, .local_strides = {4, 1}, .whole_numel = 12},
                                kSmallGpu, source);
  REQUIRE(table.has_value());
  CHECK(table->numel == 0);
  CHECK(offset_after(12, kSmallGpu, source) == 12);
  CHECK(offset_after(0, kSmallGpu, source) == 8);
}

TEST_CASE("a large tensor is cut where TensorIterator cuts it") {
  for (const auto& [numel, dtype] : std::vector<std::pair<int64_t, at::ScalarType>>{
           {(int64_t{1} << 31) - 1, at::kByte},
           {(int64_t{1} << 31), at::kByte},
           {(int64_t{1} << 29), at::kFloat},
           {3'000'000'001, at::kHalf},
           {1'600'000'003, at::kDouble},
       }) {
    CAPTURE(numel, dtype);
    const auto tensor = at::empty({numel}, at::dtype(dtype).device(at::kMeta));  // addresses count from null
    auto iterator = at::TensorIterator::borrowing_nullary_op(tensor);
    const auto item = static_cast<int64_t>(tensor.element_size());
    const auto pieces = draw_pieces(numel, item);
    size_t i = 0;
    for (auto& part : iterator.with_32bit_indexing()) {
      REQUIRE(i < pieces.size());
      CHECK(reinterpret_cast<intptr_t>(part.data_ptr(0)) == pieces[i].begin * item);
      CHECK(part.numel() == pieces[i].numel);
      ++i;
    }
    CHECK(i == pieces.size());
  }
}

TEST_CASE("each piece of a large tensor begins where the one before left the generator") {
  constexpr GpuSize gpu{.multiprocessors = 132, .threads_each = 2048};
  const DrawSource source{.item_bytes = 4, .width = 4, .offset = 20};
  const int64_t half = int64_t{1} << 29, a_draw = int64_t{132} * 2048 * 4;
  const auto offsets_of = [&](int64_t numel) { return 4 * static_cast<uint64_t>((numel + a_draw - 1) / a_draw); };
  const auto table = draw_table(all_of(2 * half), gpu, source);
  REQUIRE(table.has_value());
  REQUIRE(table->pieces == 2);
  const uint64_t first = 20 + offsets_of(2 * half);  // ATen counts the whole tensor, and then its pieces
  CHECK(draw_place(*table, 0) == DrawPlace{0, first, 0});
  CHECK(draw_place(*table, a_draw) == DrawPlace{0, first + 4, 0});
  CHECK(draw_place(*table, half) == DrawPlace{0, first + offsets_of(half), 0});
  CHECK(offset_after(2 * half, gpu, source) == first + 2 * offsets_of(half));
}

TEST_CASE("what becomes of a drawn number") {
  CHECK(NormalItem<float, float>{.mean = 0.5f, .deviation = 2}(0.25f) == 1.f);
  CHECK(UniformItem<double, double>{.from = -1, .to = 2, .range = 3}(0.5) == 0.5);
  CHECK(UniformItem<double, double>{.from = -1, .to = 2, .range = 3}(1.0) == -1);  // 1 is drawn, 0 is not
  const c10::BFloat16 from = -1, to = 2;
  CHECK(UniformItem<c10::BFloat16, float>{.from = from, .to = to, .range = 3}(0.9999f) == from);  // rounded to the end
  CHECK(BernoulliItem<bool, float>{.probability = 0.3f}(0.29f));
  CHECK_FALSE(BernoulliItem<bool, float>{.probability = 0.3f}(0.3f));
  CHECK(BernoulliItem<c10::Half, float>{.probability = 1}(0.5f) == c10::Half(1.f));
}

}  // namespace tessera::cuda
