#include "examples/train_gpt/byte_data.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "base/error.h"

namespace tessera::examples {

namespace {

at::Tensor read_bytes(const std::string& path) {
  TESSERA_CHECK(ValueError, std::filesystem::is_regular_file(path),
                "--data {}: there is no such file; give the path of a text file", path);
  std::ifstream file(path, std::ios::binary);
  TESSERA_CHECK(ValueError, file.is_open(), "--data {}: {}", path, std::strerror(errno));
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
  at::Tensor bytes = at::empty({size}, at::kByte);
  if (size > 0) {
    file.read(reinterpret_cast<char*>(bytes.data_ptr<uint8_t>()), size);
  }
  TESSERA_CHECK(ValueError, file.good() && file.gcount() == size, "--data {}: read {} of {} bytes", path, file.gcount(),
                size);
  return bytes;
}

// SplitMix64's finalizer: maps neighboring inputs to unrelated numbers, the same on every machine.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

ByteData::ByteData(const std::string& path, int64_t context, uint64_t seed) : context_(context), seed_(seed) {
  const at::Tensor bytes = read_bytes(path);
  const int64_t size = bytes.numel();
  const int64_t block = 16 * (context + 1);
  TESSERA_CHECK(ValueError, size >= 10 * block,
                "--data {}: {} bytes are too few; a context of {} needs at least {} (or use a smaller --context)", path,
                size, context, 10 * block);
  hash_ = XXH3_64bits(bytes.const_data_ptr(), static_cast<size_t>(size));
  std::vector<at::Tensor> train;
  std::vector<at::Tensor> validation;
  for (int64_t begin = 0; begin < size; begin += block) {
    auto& part = begin / block % 10 == 9 ? validation : train;
    part.push_back(bytes.narrow(0, begin, std::min(block, size - begin)));
  }
  train_ = at::cat(train);
  validation_ = at::cat(validation);
}

std::string ByteData::fingerprint() const {
  return fmt::format("({} bytes, XXH3 {:016x})", train_bytes() + validation_bytes(), hash_);
}

Batch ByteData::gather(const at::Tensor& text, const std::vector<int64_t>& offsets) const {
  std::vector<at::Tensor> windows;
  windows.reserve(offsets.size());
  for (const int64_t offset : offsets) {
    windows.push_back(text.narrow(0, offset, context_ + 1));
  }
  const at::Tensor rows = at::stack(windows).to(at::kLong);
  return {.tokens = rows.narrow(1, 0, context_).contiguous(), .targets = rows.narrow(1, 1, context_).contiguous()};
}

Batch ByteData::train_batch(int64_t step, SampleRange range, int64_t global_batch) const {
  const auto choices = static_cast<uint64_t>(train_.numel() - context_);
  std::vector<int64_t> offsets;
  for (int64_t i = 0; i < range.count; ++i) {
    const auto sample = static_cast<uint64_t>(step * global_batch + range.first + i);
    offsets.push_back(static_cast<int64_t>(mix(mix(seed_) ^ sample) % choices));
  }
  return gather(train_, offsets);
}

Batch ByteData::validation_batch(SampleRange range, int64_t total) const {
  const int64_t last = validation_.numel() - context_ - 1;
  std::vector<int64_t> offsets;
  for (int64_t i = range.first; i < range.first + range.count; ++i) {
    offsets.push_back(total > 1 ? last * i / (total - 1) : 0);
  }
  return gather(validation_, offsets);
}

}  // namespace tessera::examples
