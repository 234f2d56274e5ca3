#include "base/close_names.h"
#include "parallel/path_pattern.h"
#include "third_party/catch2/catch.h"

namespace tessera {

TEST_CASE("edit distance", "[parallel]") {
  CHECK(edit_distance("", "") == 0);
  CHECK(edit_distance("wq", "") == 2);
  CHECK(edit_distance("", "wq") == 2);
  CHECK(edit_distance("wq", "wk") == 1);
  CHECK(edit_distance("wq", "qw") == 1);
  CHECK(edit_distance("layers.0.wq", "layer.0.wq") == 1);
  CHECK(edit_distance("kitten", "sitting") == 3);
  CHECK(edit_distance("ca", "abc") == 3);  // a swap may not be edited again
}

TEST_CASE("close names, the closest first", "[parallel]") {
  using Names = std::vector<std::string>;
  CHECK(close_names("wq", {"wk", "norm", "wq1", "wk"}) == Names{"wk", "wq1"});
  CHECK(close_names("layers.0.wp", {"layers.1.wk", "layers.0.wk", "embed"}) == Names{"layers.0.wk", "layers.1.wk"});
  CHECK(close_names("a", {"b", "c", "d", "e"}, 2) == Names{"b", "c"});
  CHECK(close_names("embedding", {"norm", "wq"}).empty());
}

TEST_CASE("paths and their components", "[parallel]") {
  using Names = std::vector<std::string>;
  CHECK(path_components("").empty());
  CHECK(path_components("layers.0.wq") == Names{"layers", "0", "wq"});
  CHECK(path_components("a..b.") == Names{"a", "", "b", ""});
}

TEST_CASE("patterns match component by component", "[parallel]") {
  struct Example {
    const char *pattern, *path;
    bool matches;
  };
  for (const auto& [pattern, path, matches] : std::vector<Example>{
           {"", "", true},
           {"", "wq", false},
           {"*", "", false},
           {"*", "wq", true},
           {"*", "layers.0", false},
           {"layers.*", "layers.12", true},
           {"layers.*", "layers", false},
           {"layers.*", "layers.12.wq", false},
           {"layers.*.wq", "layers.12.wq", true},
           {"layers.*.w*", "layers.12.wq", true},
           {"*.*.*", "layers.12.wq", true},
           {"layers.1*2.wq", "layers.12.wq", true},
           {"layers.?.wq", "layers.12.wq", false},
           {"layers.??.wq", "layers.12.wq", true},
           {"layers.[0-3].w[qk]", "layers.2.wk", true},
           {"layers.[0-3].w[qk]", "layers.4.wk", false},
           {"layers.[!0-3].w[!v]", "layers.4.wk", true},
           {"layers.[!0-3].wk", "layers.3.wk", false},
           {"w[]q]", "w]", true},
           {"w[q", "w[q", true},
           {"a.", "a", false},
           {"**", "a.b", false},
       }) {
    INFO(pattern << " and " << path);
    CHECK(matches_path(pattern, path) == matches);
  }
}

TEST_CASE("a path takes the pattern's components where they match", "[parallel]") {
  CHECK(generalized_path("layers.*.wqq", "layers.0.wq") == "layers.*.wq");
  CHECK(generalized_path("layers.*", "layers.0.wq") == "layers.0.wq");
  CHECK(generalized_path("l*.7", "layers.0") == "l*.0");
}

}  // namespace tessera
