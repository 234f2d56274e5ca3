// What can be wrong with a checkpoint: a clear error on every rank, and no tensor touched.

#include <ATen/ops/ones.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

#include "base/open_files.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/io/file_io.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "tests/checkpoint/layouts.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr const char* kModelFile = "model-00001-of-00001.safetensors";

/// Saves a small state from 2 ranks: "w" cut, "b" copied.
std::string save_small(const TempFolder& folder) {
  const auto path = folder.path("c");
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    dcp::save(path, {.model = {{"w", distribute_tensor(at::ones({5, 3}), mesh, {Shard(0)})}, {"b", at::ones({4})}},
                     .user = {{"step", int64_t{1}}}});
  });
  return path;
}

/// Loads it on 2 ranks; `message` must be in what every rank throws, and its tensors stay as they were.
template <class Failure>
void expect_refused(const std::string& path, const std::string& message, const dcp::StateDict& extra = {}) {
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    dcp::State state{.model = {{"w", distribute_tensor(at::zeros({5, 3}), mesh, {Shard(0)})}, {"b", at::zeros({4})}},
                     .user = {{"step", int64_t{0}}}};
    for (const auto& [key, value] : extra) {
      state.model[key] = value;
    }
    expect_throws<Failure>([&] { dcp::load(path, state); }, message);
    expect_bit_equal(std::get<at::Tensor>(state.model["w"]), at::zeros({5, 3}));
    if (extra.count("b") == 0) {
      expect_bit_equal(std::get<at::Tensor>(state.model["b"]), at::zeros({4}));
    }
    expect_equal(std::get<int64_t>(state.user["step"]), 0);
  });
}

void flip_byte(const std::string& path, int64_t from_end) {
  auto content =
      read_files(std::filesystem::path(path).parent_path(), std::filesystem::path(path).filename()).begin()->second;
  content[content.size() - static_cast<size_t>(from_end)] ^= 4;
  write_file(path, content);
}

}  // namespace

TEST_CASE("files that are damaged, missing, cut or foreign") {
  const TempFolder folder;
  const auto path = save_small(folder);
  const auto file = path + "/" + kModelFile;
  SECTION("a flipped bit in a tensor that only rank 1 reads") {
    flip_byte(file, 1);
    expect_refused<CheckpointError>(path, file +
                                              ": tensor 'w' is damaged: the checksum of its part [3:5, 0:3] does not "
                                              "hold (met by rank 1)");
  }
  SECTION("in the header") {
    auto content = read_files(path, ".safetensors").begin()->second;
    content.replace(content.find("\"F32\""), 5, "\"I32\"");
    write_file(file, content);
    expect_refused<CheckpointError>(path, file + ": the checksum of its header does not hold");
  }
  SECTION("in the manifest") {
    flip_byte(path + "/tessera.json", 4);
    expect_refused<CheckpointError>(path, path + "/tessera.json: damaged");
  }
  SECTION("blocks of a tensor that overlap and leave a gap, though they have as many elements as it") {
    const auto name = path + "/tessera.json";
    auto manifest = dcp::parse_manifest(read_file(name), name);
    auto& blocks = manifest.files.at(kModelFile).tensors.at("w");
    REQUIRE(blocks[1].slice == dcp::ShardSlice{.offsets = {3, 0}, .sizes = {2, 3}});
    blocks[1].slice.offsets[0] = 2;
    write_file(name, dcp::format_manifest(manifest));
    expect_refused<CheckpointError>(
        path, file + ": the part [0:3, 0:3] of tensor 'w' overlaps the part [2:4, 0:3] in " + file);
  }
  SECTION("a block with fewer offsets than sizes") {
    const auto name = path + "/tessera.json";
    auto manifest = dcp::parse_manifest(read_file(name), name);
    manifest.files.at(kModelFile).tensors.at("w")[0].slice.offsets.clear();
    write_file(name, dcp::format_manifest(manifest));
    expect_refused<CheckpointError>(path, name + ": a block of tensor 'w' has 0 offsets and 2 sizes");
  }
  SECTION("a tensor that two files have") {
    const auto name = path + "/tessera.json";
    auto manifest = dcp::parse_manifest(read_file(name), name);
    manifest.files["other.safetensors"] = manifest.files.at(kModelFile);
    std::filesystem::copy_file(file, path + "/other.safetensors");
    write_file(name, dcp::format_manifest(manifest));
    expect_refused<CheckpointError>(path, "is in " + file + " too");
  }
  SECTION("a value of another type than the one to load into") {
    const auto name = path + "/tessera.json";
    auto manifest = dcp::parse_manifest(read_file(name), name);
    manifest.values[dcp::Section::User]["step"] = std::string("1");
    write_file(name, dcp::format_manifest(manifest));
    expect_refused<CheckpointError>(path, name + ": 'user.step' is a string, the one to load into an int64_t; give");
  }
  SECTION("a value where the state has a tensor, and a tensor where it has a value") {
    expect_refused<CheckpointError>(path, file + ": 'b' is a tensor, the one to load into a double", {{"b", 0.5}});
    const auto name = path + "/tessera.json";
    auto manifest = dcp::parse_manifest(read_file(name), name);
    manifest.values[dcp::Section::Model]["more"] = 0.5;
    write_file(name, dcp::format_manifest(manifest));
    expect_refused<CheckpointError>(path, name + ": 'more' is a double, the one to load into a tensor",
                                    {{"more", at::zeros({1})}});
  }
  SECTION("a file that is too short") {
    std::filesystem::resize_file(file, std::filesystem::file_size(file) - 8);
    expect_refused<CheckpointError>(path, file + ": tensor 'w' ends at byte");
  }
  SECTION("cut within the header") {
    std::filesystem::resize_file(file, 20);
    expect_refused<CheckpointError>(path, "the file is truncated");
  }
  SECTION("a file that is missing") {
    std::filesystem::remove(file);
    expect_refused<CheckpointError>(path, file + ": cannot be opened: No such file or directory");
  }
  SECTION("a folder in its place") {
    std::filesystem::remove(file);
    std::filesystem::create_directory(file);
    expect_refused<CheckpointError>(path, file);
  }
  SECTION("a pipe, which nobody writes to, or a socket or a device in the place of a file") {
    for (const auto& place : {file, path + "/tessera.json"}) {
      std::filesystem::rename(place, folder.path("kept"));
      REQUIRE(mkfifo(place.c_str(), 0600) == 0);
      expect_refused<CheckpointError>(path, place + ": is no regular file");
      std::filesystem::remove(place);
      std::filesystem::create_symlink("/dev/zero", place);
      expect_refused<CheckpointError>(path, place + ": is no regular file");
      std::filesystem::remove(place);
      std::filesystem::rename(folder.path("kept"), place);
    }
    REQUIRE(mkfifo(folder.path("pipe").c_str(), 0600) == 0);
    expect_refused<CheckpointError>(folder.path("pipe"), folder.path("pipe") + ": is no regular file");
    std::filesystem::remove(file);
    const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
    // By a short relative name: a socket's may have 107 characters.
    const auto before = std::filesystem::current_path();
    std::filesystem::current_path(path);
    std::strncpy(address.sun_path, kModelFile, sizeof(address.sun_path) - 1);
    const int bound = ::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
    std::filesystem::current_path(before);
    close(socket);
    REQUIRE(bound == 0);
    expect_refused<CheckpointError>(path, file + ": cannot be opened");
  }
  SECTION("another file in its place") {
    write_file(file, "\x40\0\0\0\0\0\0\0 not a header, whatever its length says, and no tensors here either ....");
    expect_refused<CheckpointError>(path, file);
  }
  SECTION("no checkpoint at all") {
    expect_refused<CheckpointError>(folder.path("none"), folder.path("none") + ": there is no such file or folder");
    std::filesystem::create_directory(folder.path("none"));
    expect_refused<CheckpointError>(folder.path("none"), folder.path("none") + ": is no checkpoint");
  }
}

TEST_CASE("keys, sizes and dtypes that do not fit") {
  const TempFolder folder;
  const auto path = save_small(folder);
  expect_refused<KeyError>(path, path + ": keys that it lacks: 1 (more); keys that are not to be loaded: 0 ()",
                           {{"more", at::zeros({1})}});
  expect_refused<ValueError>(path, "tensor 'b' has sizes [4], the one to load into has [5]; is it another model?",
                             {{"b", at::zeros({5})}});
  expect_refused<ValueError>(path, "tensor 'b' is Float, the one to load into Long; only floating dtypes are cast",
                             {{"b", at::zeros({4}, at::kLong)}});
  run_ranks(2, [&](int) {
    dcp::State state{.model = {{"b", at::zeros({4})}, {"more", at::zeros({1})}}};
    expect_throws<KeyError>([&] { dcp::load(path, state); },
                            "keys that it lacks: 1 (more); keys that are not to be loaded: 1 (w)");
    const auto result = dcp::load(path, state, {.strict = false});
    expect_equal(result.missing_keys, std::vector<std::string>{"more"});
    expect_equal(result.unexpected_keys, std::vector<std::string>{"w"});
    expect_bit_equal(std::get<at::Tensor>(state.model["b"]), at::ones({4}));
    expect_bit_equal(std::get<at::Tensor>(state.model["more"]), at::zeros({1}));
  });
}

TEST_CASE("a tensor of one rank that cannot be written to is an error of all; values stay as they were") {
  const TempFolder folder;
  const auto path = save_small(folder);
  run_ranks(2, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto b = rank == 1 ? at::zeros({1}).expand({4}) : at::zeros({4});  // one element, four times
    dcp::State state{.model = {{"w", distribute_tensor(at::zeros({5, 3}), mesh, {Shard(0)})}, {"b", b}},
                     .user = {{"step", int64_t{0}}}};
    expect_throws<Error>([&] { dcp::load(path, state); }, "(met by rank 1)");
    expect_equal(std::get<int64_t>(state.user["step"]), 0);
    state.model["b"] = at::zeros({4});
    dcp::load(path, state);
    expect_equal(std::get<int64_t>(state.user["step"]), 1);
  });
}

TEST_CASE("what cannot be saved is an error on every rank, and leaves nothing behind") {
  const TempFolder folder;
  const auto path = save_small(folder);
  write_file(folder.path("file"), "x");
  write_file(folder.path("empty"), "");
  std::filesystem::create_directory(folder.path("folder"));
  std::filesystem::create_symlink(folder.path("folder"), folder.path("link"));
  std::filesystem::create_symlink(folder.path("none"), folder.path("broken"));
  const auto before = names_in(folder.path(""));
  run_ranks(2, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto refused = [&]<class Failure>(std::type_identity<Failure>, const std::string& to, const dcp::State& state,
                                            const std::string& message) {
      expect_throws<Failure>([&] { dcp::save(to, state); }, message);
    };
    const dcp::State good{.model = {{"b", at::ones({4})}}};
    const std::type_identity<CheckpointError> of_files;
    const std::type_identity<ValueError> of_values;
    refused(of_files, path, good, path + ": there is something already; save under a new name");
    for (const char* name : {"file", "empty", "link", "broken"}) {
      refused(of_files, folder.path(name), good, folder.path(name) + ": there is something already");
    }
    refused(of_files, folder.path("file/c"), good, folder.path("file"));
    refused(of_files, "/proc/none/c", good, "/proc/none: cannot be made");
    refused(of_values, folder.path("d"), {.model = {{"b", at::ones({4 + rank})}}},
            "the ranks differ in 'b': rank 0 has F32[4], rank 1 has F32[5]");
    refused(of_values, folder.path("d"), {.user = {{"step", int64_t{rank}}}},
            "save: 'user.step' differs between ranks: rank 0 has");
    refused(of_values, folder.path("d"), {.model = {{"p", from_local(at::ones({2}), mesh, {Partial()})}}},
            "'p' is Float[2] (Partial(Sum))");
    refused(of_values, folder.path("d"), {.model = {{"b", rank == 1 ? at::Tensor() : at::ones({4})}}},
            "save: 'b' is an undefined tensor (met by rank 1)");
    refused(of_values, folder.path("d"), {.model = {{"\xff", at::ones({4})}}}, "UTF-8");
    refused(std::type_identity<NotImplementedError>(), folder.path("d"),
            {.optimizer = {{"z", at::ones({4}, at::kComplexDouble)}}},
            "save: 'optimizer.z': safetensors has no dtype ComplexDouble");
  });
  CHECK(names_in(folder.path("")) == before);
}

TEST_CASE("ranks that disagree are an error on all of them before anything is written") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto w = distribute_tensor(at::ones({8}), mesh, {Shard(0)});
    bool has_written = false;
    const auto refused = [&](const std::string& path, dcp::StateDict user, int64_t max_file_bytes,
                             const std::string& message) {
      const dcp::SaveOptions options{.max_file_bytes = max_file_bytes,
                                     .progress = [&](const dcp::Progress&) { has_written = true; }};
      expect_throws<ValueError>(
          [&] {
            dcp::save(path, {.model = {{"v", w}, {"w", w}}, .user = std::move(user)}, options);
          },
          message);
    };
    const auto path = folder.path("c");
    refused(path, {{"step", int64_t{rank}}}, 64, "save: 'user.step' differs between ranks: rank 0 has");
    refused(path, {{"lr", rank == 0 ? 0.0 : -0.0}}, 64, "save: 'user.lr' differs between ranks: rank 0 has");
    refused(path, {{"name", std::string(rank == 0 ? "a" : "\xff")}}, 64, "must be UTF-8");
    refused(folder.path(fmt::format("c{}", rank)), {}, 64,
            fmt::format("the ranks differ in the path (or step): rank 0 has '{0}0', rank 1 has '{0}1'", path));
    refused(path, {}, 64 - 32 * rank, "the ranks differ in max_file_bytes: rank 0 has 64, rank 1 has 32");
    TESSERA_EXPECT(!has_written);
    const double nan = std::nan("");
    dcp::save(path + std::string(static_cast<size_t>(rank), '/'), {.user = {{"loss", rank == 0 ? nan : -nan}}});
  });
  CHECK(names_in(folder.path()) == std::vector<std::string>{"c"});
}

TEST_CASE("what the file system refuses is a CheckpointError that names the path, on every rank") {
  const TempFolder folder;
  const auto loop = folder.path("run/step-00000001"), too_long = folder.path(std::string(300, 'x'));
  std::filesystem::create_directory(folder.path("run"));
  std::filesystem::create_symlink(loop, loop);  // no permissions: tests may run as root
  run_ranks(2, [&](int) {
    expect_throws<CheckpointError>([&] { dcp::latest(folder.path("run")); },
                                   loop + "/tessera.json: Too many levels of symbolic links");
    dcp::State state{.model = {{"b", at::ones({4})}}};
    expect_throws<CheckpointError>([&] { dcp::load(loop, state); }, loop + ": Too many levels of symbolic links");
    expect_throws<CheckpointError>([&] { dcp::load(too_long, state); }, too_long + ": File name too long");
    expect_throws<CheckpointError>([&] { dcp::save(too_long, state); }, too_long + ": File name too long");
  });
}

/// This process may have so many files open as there are, and `more`, for as long as it lives.
class OpenFilesLimit {
 public:
  explicit OpenFilesLimit(int more) {
    TESSERA_EXPECT(getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const int next = open("/dev/null", O_RDONLY);
    TESSERA_EXPECT(next >= 0);
    close(next);
    rlimit small = before_;
    small.rlim_cur = static_cast<rlim_t>(next + more);
    TESSERA_EXPECT(setrlimit(RLIMIT_NOFILE, &small) == 0);
  }
  ~OpenFilesLimit() { setrlimit(RLIMIT_NOFILE, &before_); }
  OpenFilesLimit(const OpenFilesLimit&) = delete;
  OpenFilesLimit& operator=(const OpenFilesLimit&) = delete;

 private:
  rlimit before_{};
};

TEST_CASE("files of a checkpoint are closed in the programs that a process starts, and none stays open") {
  const TempFolder folder;
  const auto before = open_files();
  const auto count_open = [&] {
    int count = 0;
    for (const auto& [number, what] : opened_since(before)) {
      if (what.starts_with(folder.path())) {
        INFO(what);
        CHECK((fcntl(number, F_GETFD) & FD_CLOEXEC) != 0);
        ++count;
      }
    }
    return count;
  };
  {
    const auto created = dcp::File::create(folder.path("new"), 8);
    const auto read = dcp::File::open(folder.path("new")), written = dcp::File::open_to_write(folder.path("new"));
    CHECK(count_open() == 3);
  }
  dcp::State state{.model = {{"w", at::ones({1000})}}};
  dcp::save(folder.path("c"), state);
  dcp::load(folder.path("c"), state);
  CHECK(count_open() == 0);
}

TEST_CASE("a checkpoint may have more files than a process may open") {
  const TempFolder folder;
  constexpr int kFiles = 200;
  run_ranks(2, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto make = [&](double value) {
      dcp::State state;
      for (int i = 0; i < kFiles; ++i) {
        state.model[fmt::format("w{:03}", i)] = distribute_tensor(at::full({4}, value), mesh, {Shard(0)});
      }
      return state;
    };
    const auto saved = make(1);
    auto loaded = make(0);
    barrier(default_group());
    std::optional<OpenFilesLimit> limit;
    if (rank == 0) {
      limit.emplace(60);
    }
    barrier(default_group());
    dcp::save(folder.path("c"), saved, {.max_file_bytes = 1});
    dcp::load(folder.path("c"), loaded);
    barrier(default_group());
    limit.reset();
    for (const auto& [key, value] : loaded.model) {
      expect_bit_equal(std::get<at::Tensor>(value), at::ones({4}));
    }
  });
  CHECK(names_in(folder.path("c")).size() == size_t{kFiles + 2});
}

/// Files of this process may have so many bytes, for as long as it lives. What writes more has SIGXFSZ, too.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    REQUIRE(getrlimit(RLIMIT_FSIZE, &before_) == 0);
    rlimit small = before_;
    small.rlim_cur = bytes;
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  }
  ~FileSizeLimit() { setrlimit(RLIMIT_FSIZE, &before_); }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
};

TEST_CASE("files that may not be so long are an error that names them, and leave nothing behind") {
  const TempFolder folder;
  {
    const FileSizeLimit limit(100000);
    run_ranks(2, [&](int) {
      expect_throws<CheckpointError>(
          [&] {
            dcp::save(folder.path("c"), {.model = {{"w", at::ones({100000})}}});
          },
          "model-00001-of-00001.safetensors: cannot get its size: files of this process may have 100000 bytes "
          "(ulimit -f), and 400");
    });
  }
  CHECK(names_in(folder.path("")).empty());
  const dcp::File file = dcp::File::create(folder.path("file"), 0);
  const FileSizeLimit limit(10);
  CHECK_NOTHROW(file.write("12345", 5, 5));
  CHECK_THROWS_WITH(file.write("12345", 5, 6), Catch::Contains("cannot be written: files of this process may have 10"));
}

// full_disk_test.sh mounts the disk and runs this.
TEST_CASE("a full disk: an error on every rank, what was saved stays, and there is room again", "[.full_disk]") {
  const char* const disk = std::getenv("TESSERA_SMALL_DISK");  // 1 MiB
  REQUIRE(disk != nullptr);
  const auto path = [&](const char* name) { return std::string(disk) + "/" + name; };
  const auto full = [&](const auto& save, const at::Tensor& large) {
    expect_throws<CheckpointError>(
        [&] {
          save(dcp::State{.model = {{"w", large}}});
        },
        "cannot be written: No space left on device");
    if (get_rank() == 0) {  // which has removed what there was
      expect_equal(names_in(disk), std::vector<std::string>{"small"});
    }
  };
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto small = distribute_tensor(at::ones({100, 1000}), mesh, {Shard(0)});
    const auto large = distribute_tensor(at::ones({400, 1000}), mesh, {Shard(0)});
    dcp::save(path("small"), {.model = {{"w", small}}});
    full([&](const dcp::State& state) { dcp::save(path("large"), state); }, large);
    dcp::Checkpointer checkpointer(disk);
    full(
        [&](const dcp::State& state) {
          checkpointer.async_save(1, state);
          checkpointer.wait();
        },
        large);
    dcp::State state{.model = {{"w", at::zeros_like(small)}}};
    dcp::load(path("small"), state);
    expect_bit_equal(std::get<at::Tensor>(state.model["w"]), small);
    dcp::save(path("small2"), {.model = {{"w", small}}});
    dcp::Checkpointer in_memory(path("run"), {.memory_folder = disk});
    in_memory.save_in_memory(1, {.user = {{"step", int64_t{1}}}});
    expect_throws<CheckpointError>(
        [&] {
          in_memory.save_in_memory(2, {.model = {{"w", large}}});
        },
        "cannot be written: No space left on device");
    TESSERA_EXPECT(in_memory.latest_valid()->ends_with("step-00000001"));
  });
}

TEST_CASE("what a killed save left is removed by the next one of that name") {
  const TempFolder folder;
  std::filesystem::create_directories(folder.path("c.incomplete-12345678"));
  write_file(folder.path("c.incomplete-12345678/model-00001-of-00001.safetensors"), "half");
  std::filesystem::create_directories(folder.path("c2.incomplete-12345678"));
  save_small(folder);
  CHECK(names_in(folder.path("")) == std::vector<std::string>{"c", "c2.incomplete-12345678"});
  CHECK(names_in(folder.path("c")) ==
        std::vector<std::string>{kModelFile, "model.safetensors.index.json", "tessera.json"});
}

TEST_CASE("folders of other tools: an index, files alone, and what is wrong with them") {
  const TempFolder folder;
  const auto path = save_small(folder);
  std::filesystem::remove(path + "/tessera.json");
  const auto load_both = [&] {
    dcp::State state{.model = {{"w", at::zeros({5, 3})}, {"b", at::zeros({4})}}};
    dcp::load(path, state);
    expect_bit_equal(std::get<at::Tensor>(state.model["w"]), at::ones({5, 3}));
    expect_bit_equal(std::get<at::Tensor>(state.model["b"]), at::ones({4}));
  };
  load_both();
  const auto index = path + "/model.safetensors.index.json";
  write_file(index, dcp::format_index({{"w", "../c/" + std::string(kModelFile)}}, 1));
  CHECK_THROWS_WITH(load_both(), Catch::Contains("only names of files in the same folder are allowed"));
  write_file(index, dcp::format_index({{"w", kModelFile}, {"x", kModelFile}}, 1));
  CHECK_THROWS_WITH(load_both(), Catch::Contains(index + ": has tensor 'x' in file"));
  write_file(index, dcp::format_index({{"w", "other.safetensors"}}, 1));
  CHECK_THROWS_WITH(load_both(), Catch::Contains("other.safetensors: cannot be opened"));
  write_file(index, "{}");
  CHECK_THROWS_WITH(load_both(), Catch::Contains(index + ": not of the form"));
  std::filesystem::remove(index);
  load_both();
}

}  // namespace tessera::testing
