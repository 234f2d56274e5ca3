// Files and what lies in them, without ranks.

#include "checkpoint/checkpoint.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/io/file_io.h"
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

namespace {

/// What load() gives for "a" of two floats; the options' `variant`.
double loaded_a(const std::string& path, const std::string& variant = {}) {
  dcp::State state{.model = {{"a", at::zeros({2})}}};
  dcp::load(path, state, {.variant = variant});
  return std::get<at::Tensor>(state.model["a"])[1].item<double>();
}

void export_a(const std::string& path, double value, const dcp::StateDict& more = {},
              at::ScalarType dtype = at::kFloat) {
  dcp::StateDict model{{"a", at::full({2}, value, dtype)}};
  model.insert(more.begin(), more.end());
  dcp::export_safetensors(path, model);
}

}  // namespace

TEST_CASE("an index says which file has a tensor; what else the files have is ignored") {
  for (const std::string name : {"model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json"}) {
    const TempFolder folder;
    const auto index = folder.path(name);
    export_a(folder.path("base.safetensors"), 9, {{"b", at::full({3}, 2.0)}, {"old", at::ones({1})}});
    export_a(folder.path("new.safetensors"), 1, {{"b", at::full({4}, 8, at::kHalf)}});
    write_file(folder.path("other.safetensors"), "not looked at");
    write_file(index, dcp::format_index({{"a", "new.safetensors"}, {"b", "base.safetensors"}}, 1));
    for (const bool strict : {true, false}) {
      dcp::State state{.model = {{"a", at::zeros({2})}, {"b", at::zeros({3})}}};
      const auto result = dcp::load(folder.path(), state, {.strict = strict});
      CHECK(result.unexpected_keys.empty());
      expect_bit_equal(std::get<at::Tensor>(state.model["a"]), at::ones({2}));
      expect_bit_equal(std::get<at::Tensor>(state.model["b"]), at::full({3}, 2.0));
    }
    write_file(index, dcp::format_index({{"a", "new.safetensors"}, {"old", "new.safetensors"}}, 1));
    CHECK_THROWS_WITH(loaded_a(folder.path()), index + ": has tensor 'old' in file 'new.safetensors', which lacks it");
    write_file(index, R"({"weight_map": {}})");
    CHECK_THROWS_WITH(loaded_a(folder.path()), index + ": names no tensor");
  }
}

TEST_CASE("two indexes in one folder are an error, and so are two files with one tensor and no index") {
  const TempFolder folder;
  export_a(folder.path("a.safetensors"), 1);
  const auto index = dcp::format_index({{"a", "a.safetensors"}}, 1);
  write_file(folder.path("model.safetensors.index.json"), index);
  write_file(folder.path("diffusion_pytorch_model.safetensors.index.json"), index);
  CHECK_THROWS_WITH(loaded_a(folder.path()), Catch::Contains("are two indexes of one folder"));
  const TempFolder other;
  export_a(other.path("a.safetensors"), 1);
  export_a(other.path("b.safetensors"), 2);
  CHECK_THROWS_WITH(loaded_a(other.path()), Catch::Contains("tensor 'a' is in another file too"));
}

TEST_CASE("hidden files are no weights") {
  const TempFolder folder;
  export_a(folder.path("model.safetensors"), 1);
  write_file(folder.path("._model.safetensors"), "Mac OS X");
  write_file(folder.path(".safetensors"), "x");
  CHECK(loaded_a(folder.path()) == 1);
}

TEST_CASE("files of a variant are read where it is asked for, and not else") {
  const auto expect_both = [](const std::string& plain, const std::string& half) {
    const TempFolder folder;
    export_a(folder.path(plain), 1);
    export_a(folder.path(half), 2, {}, at::kHalf);
    CAPTURE(plain, half);
    CHECK(loaded_a(folder.path()) == 1);
    CHECK(loaded_a(folder.path(), "fp16") == 2);
    CHECK_THROWS_WITH(
        loaded_a(folder.path(), "bf16"),
        Catch::Contains("no .safetensors file of the variant 'bf16'; the variants that it has: 'fp16', none"));
  };
  expect_both("model.safetensors", "model.fp16.safetensors");
  expect_both("model.safetensors", "model.fp16-00001-of-00001.safetensors");
  expect_both("diffusion_pytorch_model-00001-of-00001.safetensors",
              "diffusion_pytorch_model-00001-of-00001.fp16.safetensors");
  expect_both("of a program.safetensors", "of a program.fp16.safetensors");
  const TempFolder folder;
  export_a(folder.path("model.fp16.safetensors"), 2);
  CHECK_THROWS_WITH(loaded_a(folder.path()), Catch::Contains("no .safetensors file; the variants that it has: 'fp16'"));
  CHECK_THROWS_WITH(loaded_a(folder.path("model.fp16.safetensors"), "fp16"),
                    Catch::Contains("is a file, which has no"));
  const TempFolder dotted;  // names that have dots for other reasons
  export_a(dotted.path("v1.5-00001-of-00002.safetensors"), 1);
  dcp::export_safetensors(dotted.path("v1.5-00002-of-00002.safetensors"), {{"b", at::ones({1})}});
  dcp::State state{.model = {{"a", at::zeros({2})}, {"b", at::zeros({1})}}};
  dcp::load(dotted.path(), state);
  expect_bit_equal(std::get<at::Tensor>(state.model["a"]), at::ones({2}));
}

TEST_CASE("the index of a variant is read where it is asked for, and not else") {
  for (const std::string name : {"model.safetensors.index.fp16.json", "model.safetensors.fp16.index.json"}) {
    const TempFolder folder;
    export_a(folder.path("model-00001-of-00001.safetensors"), 1);
    export_a(folder.path("model.fp16-00001-of-00001.safetensors"), 2, {}, at::kHalf);
    write_file(folder.path("model.safetensors.index.json"),
               dcp::format_index({{"a", "model-00001-of-00001.safetensors"}}, 1));
    write_file(folder.path(name), dcp::format_index({{"a", "model.fp16-00001-of-00001.safetensors"}}, 1));
    CHECK(loaded_a(folder.path()) == 1);
    CHECK(loaded_a(folder.path(), "fp16") == 2);
  }
}

TEST_CASE("a checkpoint of this library has no variants") {
  const TempFolder folder;
  dcp::save(folder.path("c"), {.model = {{"a", at::ones({2})}}});
  CHECK_THROWS_WITH(loaded_a(folder.path("c"), "fp16"),
                    Catch::Contains("c: is a checkpoint of this library, which has no variant 'fp16'"));
}

TEST_CASE("a tensor whose name is empty is loaded") {
  const TempFolder folder;
  const auto file = folder.path("a.safetensors");
  const std::string header = R"({"__metadata__":null,"":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})";
  write_file(file, std::string(1, static_cast<char>(header.size())) + std::string(7, '\0') + header + "\1\2");
  dcp::State state{.model = {{"", at::Tensor()}}};
  dcp::load(file, state);
  CHECK(std::get<at::Tensor>(state.model[""])[1].item<int>() == 2);
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
