// Tokenization speed compared with Python's `tokenizers`, which also trains the tokenizers. Needs PEER_PYTHON.
//
//   <name>/load_ms                       reading tokenizer.json
//   <name>/<threads>/tessera             MB/s of a batch, with a tokenizer that has seen no word yet
//   <name>/<threads>/python              the same there: encode_batch or encode_batch_fast, whichever is faster
//   <name>/<threads>/ratio               tessera / python
//   <name>/decode                        MB/s of the text
//
// Both alternate, and the fastest round counts. Texts are 4 MB of Python and C++ sources.

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "benchmarks/measure.h"
#include "testing/temp_folder.h"
#include "text/tokenizer.h"

namespace tessera {
namespace {

constexpr const char* kPeer = "benchmarks/peers/tokenizer_peer.py";
constexpr int kMegabytes = 4;

std::vector<std::string_view> read_texts(const std::string& content) {
  std::vector<std::string_view> texts;
  for (size_t at = 0; at < content.size();) {
    int32_t length = 0;
    std::memcpy(&length, content.data() + at, sizeof length);
    at += sizeof length;
    texts.push_back(std::string_view(content).substr(at, static_cast<size_t>(length)));
    at += static_cast<size_t>(length);
  }
  return texts;
}

/// Speeds of one tokenizer, by number of threads: the best of the rounds.
struct Speeds {
  double load_ms = 1e30;
  double decode = 0;
  std::map<int, double> ours;
  std::map<int, double> peer;
};

void measure_ours(const std::string& file, const std::vector<std::string_view>& texts, int threads, double peer_ids,
                  Speeds& speeds) {
  const double start = wall_us();
  const auto tokenizer = Tokenizer::from_file(file);
  const double loaded = wall_us();
  const auto ids = tokenizer.encode_batch(texts, threads);
  const double encoded = wall_us();
  size_t bytes = 0, count = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    bytes += texts[i].size();
    count += ids[i].size();
  }
  TESSERA_ASSERT(static_cast<double>(count) == peer_ids, "{}: {} ids, Python has {}", file, count, peer_ids);
  speeds.load_ms = std::min(speeds.load_ms, (loaded - start) / 1e3);
  speeds.ours[threads] = std::max(speeds.ours[threads], static_cast<double>(bytes) / (encoded - loaded));
  const double before = wall_us();
  size_t decoded = 0;
  for (const auto& text_ids : ids) {
    decoded += tokenizer.decode(text_ids).size();
  }
  speeds.decode = std::max(speeds.decode, static_cast<double>(decoded) / (wall_us() - before));
}

void run(const BenchmarkOptions& options) {
  const testing::TempFolder folder;
  const auto vocabularies = run_peer(kPeer, fmt::format("make {} {}", folder.path(), kMegabytes));
  TESSERA_CHECK(
      StateError, !vocabularies.empty(),
      "PEER_PYTHON is not set: this benchmark needs a Python with `tokenizers`, such as @peer_python//:python");
  const auto content = testing::read_file(folder.path("texts"));
  const auto texts = read_texts(content);
  for (const auto& [name, size] : vocabularies) {
    Speeds speeds;
    for (int round = 0; round < options.rounds; ++round) {
      for (const int threads : {1, 2}) {
        const auto peer = run_peer(kPeer, fmt::format("measure {} {} {}", folder.path(), name, threads));
        speeds.peer[threads] = std::max(speeds.peer[threads], peer.at("speed"));
        measure_ours(folder.path(name + ".json"), texts, threads, peer.at("ids"), speeds);
      }
    }
    print_result(name + "/load_ms", speeds.load_ms, "ms", {}, options.json);
    print_result(name + "/decode", speeds.decode, "MB/s", {}, options.json);
    for (const int threads : {1, 2}) {
      const auto prefix = fmt::format("{}/{}", name, threads);
      print_result(prefix + "/tessera", speeds.ours[threads], "MB/s", {}, options.json);
      print_result(prefix + "/python", speeds.peer[threads], "MB/s", {}, options.json);
      print_result(prefix + "/ratio", speeds.ours[threads] / speeds.peer[threads], "x", {}, options.json);
    }
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::benchmark_main(
      argc, argv,
      {.name = "tokenizer",
       .description = "How fast texts become ids beside Python's `tokenizers`. PEER_PYTHON names a Python that has it.",
       .rounds = 5,
       .run = tessera::run});
}
