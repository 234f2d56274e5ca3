#include "comm/backend_spec.h"

#include "base/error.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;

TEST_CASE("one backend, and one for each device") {
  CHECK(parse_backend("") == BackendSpec{.cpu = "", .cuda = "none"});
  CHECK(parse_backend("shm") == BackendSpec{.cpu = "shm", .cuda = "none"});
  CHECK(parse_backend("gloo") == BackendSpec{.cpu = "gloo", .cuda = "none"});
  CHECK(parse_backend("threads") == BackendSpec{.cpu = "threads", .cuda = "threads"});
  CHECK(parse_backend("cpu:threads") == BackendSpec{.cpu = "threads", .cuda = "none"});
  CHECK(parse_backend("fake") == BackendSpec{.cpu = "fake", .cuda = "fake"});
  CHECK(parse_backend("nccl") == BackendSpec{.cpu = "none", .cuda = "nccl"});
  CHECK(parse_backend("cuda:nccl") == BackendSpec{.cpu = "none", .cuda = "nccl"});
  CHECK(parse_backend("cpu:shm") == BackendSpec{.cpu = "shm", .cuda = "none"});
  CHECK(parse_backend("cpu:gloo,cuda:nccl") == BackendSpec{.cpu = "gloo", .cuda = "nccl"});
  CHECK(parse_backend("cuda:nccl,cpu:shm") == BackendSpec{.cpu = "shm", .cuda = "nccl"});
}

TEST_CASE("what is no backend is named, with what is allowed") {
  const auto message = [](const char* backend) {
    try {
      parse_backend(backend);
    } catch (const ValueError& failure) {
      return std::string(failure.what());
    }
    return std::string("no error");
  };
  CHECK_THAT(message("glue"), ContainsSubstring("backend \"glue\" is unknown; allowed are \"shm\", \"gloo\""));
  CHECK_THAT(message("none"), ContainsSubstring("\"none\" is unknown"));
  CHECK_THAT(message("gloo,nccl"), ContainsSubstring("\"gloo,nccl\" is unknown"));
  CHECK_THAT(message("cpu:nccl"), ContainsSubstring("\"cpu:nccl\" in backend \"cpu:nccl\"; a device and its backend"));
  CHECK_THAT(message("cuda:gloo"), ContainsSubstring("\"cuda:gloo\" in backend"));
  CHECK_THAT(message("cpu:fake,cuda:nccl"), ContainsSubstring("\"cpu:fake\" in backend"));
  CHECK_THAT(message("cpu:gloo,nccl"), ContainsSubstring("\"nccl\" in backend \"cpu:gloo,nccl\""));
  CHECK_THAT(message("cpu:gloo,"), ContainsSubstring("\"\" in backend \"cpu:gloo,\""));
  CHECK_THAT(message("cpu:gloo,cpu:shm"), ContainsSubstring("names cpu twice"));
  CHECK_THAT(message("xpu:nccl"), ContainsSubstring("\"xpu:nccl\" in backend"));
}

}  // namespace
}  // namespace tessera
