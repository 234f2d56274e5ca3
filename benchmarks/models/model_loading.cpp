// Speed of from_pretrained compared with reading the file into new memory, with both in the page cache.
//
//   <files>/<parameters>/load           MB/s of the file, in one process
//   <files>/<parameters>/read           MB/s of plain reads of 4 MB
//   <files>/<parameters>/load_over_read their ratio
//
// Files and parameters are float32 or bfloat16. Both alternate; medians of the rounds. TMPDIR selects the disk.

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/measure.h"
#include "checkpoint/io/file_io.h"
#include "models/pretrained.h"
#include "testing/temp_folder.h"

namespace tessera {
namespace {

constexpr uint64_t kReadBytes = 4 << 20;

/// Returns the config of a model of about this size: 34 MB per layer in float32.
models::DecoderConfig config_of(int64_t megabytes, at::ScalarType dtype) {
  const auto layer = static_cast<int64_t>(34 * c10::elementSize(dtype) / sizeof(float));
  return {.vocab_size = 8000,
          .hidden_size = 1024,
          .intermediate_size = 1500,
          .num_hidden_layers = std::max<int64_t>(1, megabytes / layer),
          .num_attention_heads = 16,
          .num_key_value_heads = 16,
          .head_dim = 64,
          .max_position_embeddings = 2048,
          .attention_scale = 0.125,
          .tie_word_embeddings = true,
          .dtype = dtype};
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

double read_us(const std::string& path) {
  const double start = wall_us();
  const auto file = dcp::File::open(path);
  const auto bytes = file.size();
  const auto memory = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  for (uint64_t offset = 0; offset < bytes; offset += kReadBytes) {
    file.read(memory.mutable_data_ptr<uint8_t>() + offset, std::min(kReadBytes, bytes - offset), offset);
  }
  return wall_us() - start;
}

double load_us(const std::string& folder, at::ScalarType dtype) {
  const double start = wall_us();
  const auto model = models::from_pretrained(folder, {.dtype = dtype});
  return wall_us() - start;
}

void measure(int64_t megabytes, at::ScalarType files, at::ScalarType parameters, const BenchmarkOptions& options) {
  const testing::TempFolder folder;
  {
    models::Decoder model(config_of(megabytes, files));
    model->to(files);
    models::save_pretrained(model, folder.path("model"));
  }
  std::string path;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path("model"))) {
    path = entry.path().extension() == ".safetensors" ? entry.path().string() : path;
  }
  const auto bytes = static_cast<double>(std::filesystem::file_size(path));
  std::vector<double> loads, reads;
  for (int round = 0; round <= options.rounds; ++round) {
    loads.push_back(load_us(folder.path("model"), parameters));
    reads.push_back(read_us(path));
  }
  loads.erase(loads.begin());  // the first, which may wait for the disk
  reads.erase(reads.begin());
  const auto prefix = fmt::format("{}/{}", c10::toString(files), c10::toString(parameters));
  const double load = bytes / median(loads), read = bytes / median(reads);
  print_result(prefix + "/load", load, "MB/s", {}, options.json);
  print_result(prefix + "/read", read, "MB/s", {}, options.json);
  print_result(prefix + "/load_over_read", load / read, "x", {}, options.json);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;
  int64_t megabytes = 500;
  return benchmark_main(
      argc, argv,
      {.name = "model_loading",
       .description = "How fast from_pretrained reads a folder, beside reading its file.",
       .rounds = 7,
       .add_options =
           [&](CLI::App& app) {
             app.add_option("--megabytes", megabytes, "About the size of the file")->check(CLI::Range(1, 100'000));
           },
       .run =
           [&](const BenchmarkOptions& options) {
             measure(megabytes, at::kFloat, at::kFloat, options);
             measure(megabytes, at::kBFloat16, at::kBFloat16, options);
             measure(megabytes, at::kBFloat16, at::kFloat, options);
           }});
}
