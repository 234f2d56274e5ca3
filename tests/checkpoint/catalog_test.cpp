// Files and what lies in them, without ranks.

#include "checkpoint/checkpoint.h"
#include "checkpoint/file_io.h"
#include "checkpoint/safetensors.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "tests/checkpoint/layouts.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// A file as PyTorch's ranks write it: two floats of "w", from `offset` on.
void write_part(const std::string& path, int64_t offset) {
  const auto header = dcp::format_safetensors_header(
      {.entries = {{.key = "w", .dtype = c10::ScalarType::Float, .sizes = {2}, .begin = 0, .end = 8}},
       .metadata = {{"DCP_SHARDING_INFO", fmt::format(R"({{"w":{{"saved_offsets":[{}]}}}})", offset)}}});
  write_file(path, header + std::string(8, '\0'));
}

}  // namespace

TEST_CASE("parts of other tools that overlap and leave a gap, though they have as many elements as the tensor") {
  const TempFolder folder;
  const auto a = folder.path("a.safetensors"), b = folder.path("b.safetensors");
  dcp::State state{.model = {{"w", at::ones({4})}}};
  const auto load = [&] { dcp::load(folder.path(), state); };
  write_part(a, 2);
  write_part(b, 1);
  CHECK_THROWS_WITH(load(), a + ": the part [2:4] of tensor 'w' overlaps the part [1:3] in " + b);
  write_part(b, 4);
  CHECK_THROWS_WITH(load(), a + ": the parts of tensor 'w' have 4 elements, the tensor 6");
  expect_bit_equal(std::get<at::Tensor>(state.model["w"]), at::ones({4}));
  write_part(b, 0);
  load();
  expect_bit_equal(std::get<at::Tensor>(state.model["w"]), at::zeros({4}));
}

TEST_CASE("a tensor of a dtype that we do not know is refused when it is asked for, and no other in its file") {
  const TempFolder folder;
  const auto file = folder.path("a.safetensors");
  const std::string header =
      R"({"q":{"dtype":"F4","shape":[4],"data_offsets":[0,2]},"w":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})";
  write_file(file, std::string(1, static_cast<char>(header.size())) + std::string(7, '\0') + header + "\1\2\3\4");
  dcp::State state{.model = {{"w", at::Tensor()}}};
  CHECK(dcp::load(file, state, {.strict = false}).unexpected_keys == std::vector<std::string>{"q"});
  CHECK(std::get<at::Tensor>(state.model["w"])[1].item<int>() == 4);
  state.model["q"] = at::Tensor();
  CHECK_THROWS_AS(dcp::load(file, state), CheckpointError);
  CHECK_THROWS_WITH(dcp::load(file, state), file + ": tensor 'q' has dtype F4, which this library does not know");
}

// What NFS may do to what is open for both: see file_io.cpp.
TEST_CASE("files that ranks write together are not open for reading") {
  const TempFolder folder;
  const auto path = folder.path("file");
  char byte = 'x';
  for (const bool is_new : {true, false}) {
    const auto file = is_new ? dcp::File::create(path, 1) : dcp::File::open_to_write(path);
    file.write(&byte, 1, 0);
    CHECK_THROWS_WITH(file.read(&byte, 1, 0), path + ": cannot be read: Bad file descriptor");
  }
  CHECK(dcp::read_text(path, 1) == "x");
}

}  // namespace tessera::testing
