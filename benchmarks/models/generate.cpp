// Generation speed of a decoder compared with Python's transformers, which also makes the model, a Llama with 100
// million parameters. Needs PEER_PYTHON.
//
//   <dtype>/batch_<n>/tessera            tokens/s over all texts, prompts included; one thread
//   <dtype>/batch_<n>/python             the same with transformers' generate
//   <dtype>/batch_<n>/ratio              tessera / python
//
// Both alternate, and the fastest round counts. In float32, both must generate the same tokens. In bfloat16, rounding
// decides between tokens with nearly equal probability.

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "benchmarks/measure.h"
#include "models/generate.h"
#include "models/pretrained.h"
#include "testing/temp_folder.h"

namespace tessera {
namespace {

constexpr const char* kPeer = "benchmarks/peers/generate_peer.py";
constexpr int64_t kPromptTokens = 64;
constexpr int64_t kNewTokens = 64;

/// The prompts of the peer.
std::vector<std::vector<int32_t>> make_prompts(int64_t batch) {
  std::vector<std::vector<int32_t>> prompts(static_cast<size_t>(batch));
  for (int64_t i = 0; i < batch * kPromptTokens; ++i) {
    prompts[static_cast<size_t>(i / kPromptTokens)].push_back(static_cast<int32_t>((i * 7919 + 13) % 32000));
  }
  return prompts;
}

double measure_ours(models::Decoder& model, int64_t batch, std::optional<double> peer_sum) {
  const auto prompts = make_prompts(batch);
  models::generate(model, prompts, {.max_new_tokens = 2});
  const double start = wall_us();
  const auto texts = models::generate(model, prompts, {.max_new_tokens = kNewTokens});
  const double seconds = (wall_us() - start) / 1e6;
  int64_t sum = 0;
  for (const auto& text : texts) {
    for (const int32_t token : text) {
      sum += token;
    }
  }
  TESSERA_ASSERT(!peer_sum || static_cast<double>(sum) == *peer_sum,
                 "other tokens than Python's: their sum is {}, not {}", sum, *peer_sum);
  return static_cast<double>(batch * kNewTokens) / seconds;
}

void compare(const std::string& folder, at::ScalarType dtype, const BenchmarkOptions& options) {
  auto model = models::from_pretrained(folder, {.dtype = dtype});
  const std::string name = dtype == at::kFloat ? "float32" : "bfloat16";
  for (const int64_t batch : {1, 8}) {
    double ours = 0, theirs = 0;
    for (int round = 0; round < options.rounds; ++round) {
      const auto peer =
          run_peer(kPeer, fmt::format("measure {} {} {} {} {}", folder, name, batch, kPromptTokens, kNewTokens));
      theirs = std::max(theirs, peer.at("speed"));
      const auto sum = dtype == at::kFloat ? std::optional(peer.at("sum")) : std::nullopt;
      ours = std::max(ours, measure_ours(model, batch, sum));
    }
    const auto prefix = fmt::format("{}/batch_{}", name, batch);
    print_result(prefix + "/tessera", ours, "tokens/s", {}, options.json);
    print_result(prefix + "/python", theirs, "tokens/s", {}, options.json);
    print_result(prefix + "/ratio", ours / theirs, "x", {}, options.json);
  }
}

void run(const BenchmarkOptions& options) {
  const testing::TempFolder folder;
  const auto made = run_peer(kPeer, "make " + folder.path());
  TESSERA_CHECK(
      StateError, !made.empty(),
      "PEER_PYTHON is not set: this benchmark needs a Python with transformers, such as @peer_python//:python");
  compare(folder.path(), at::kFloat, options);
  compare(folder.path(), at::kBFloat16, options);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::benchmark_main(
      argc, argv,
      {.name = "generate",
       .description = "How fast a decoder generates beside transformers. PEER_PYTHON names a Python that has it.",
       .rounds = 3,
       .run = tessera::run});
}
