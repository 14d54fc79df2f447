// Programs run on etkv's delegate, whether another MLXBackend registers before
// it, after it, or not at all.
//
// `program OURS OTHER`: the two libraries. Backends cannot be unregistered, so
// each order needs a separate process.

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "../fixture.hpp"

namespace etkv::tests {
namespace {

const Ids kPrompt = {1, 2, 3, 4};

/// Returns the rows of a prompt, from a program that open_module opens.
Rows rows_of_prompt(Module::LoadMode mode) {
  auto module = must(open_module(program_path("tiny-llama-f32"), mode));
  auto params = must(read_kv_cache_metadata(*module));
  CHECK_INT(params.layers.size(), 2);
  auto made = must(make_decode_session_and_options(
      kMLXBackend, make_config(params, 16, "f32")));
  must(load_method(*module, "forward", made.options));
  const Rows rows = must(run_step(*module, kPrompt, run(0, 4)));
  CHECK_INT(*made.session.cache().length(), 4);
  return rows;
}

void load(const char* library) {
  if (dlopen(library, RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    REQUIRE(false);
  }
}

/// Loads the libraries, runs a program and writes its rows to the file `to`.
int in_order(const std::vector<const char*>& libraries, const char* to) {
  CHECK(delegate_backend_id() == nullptr);
  CHECK_REFUSED(
      open_module(program_path("tiny-llama-f32")),
      ETKV_ERROR_UNSUPPORTED,
      "link etkv::mlx_backend");
  for (const char* library : libraries) {
    load(library);
  }
  const bool other_first = std::strstr(libraries[0], "other") != nullptr;
  REQUIRE(delegate_backend_id() != nullptr);
  CHECK(
      delegate_backend_id() ==
      std::string(other_first ? kEtkvBackend : kMLXBackend));

  // Opened without open_module, the program runs, or the error says what to do.
  Module plain(program_path("tiny-llama-f32"));
  auto params = must(read_kv_cache_metadata(plain));
  auto made = must(make_decode_session_and_options(
      kMLXBackend, make_config(params, 16, "f32")));
  auto loaded = load_method(plain, "forward", made.options);
  CHECK(loaded.ok() == !other_first);
  if (other_first) {
    CHECK_REFUSED(loaded, ETKV_ERROR_UNSUPPORTED, "etkv::open_module");
  }

  const Rows rows = rows_of_prompt(Module::LoadMode::Mmap);
  for (const auto mode :
       {Module::LoadMode::File, Module::LoadMode::MmapUseMlockIgnoreErrors}) {
    CHECK(rows_of_prompt(mode) == rows);
  }
  // With ExecuTorch's loader, a Module fails only at its first use.
  if (other_first) {
    CHECK_REFUSED(
        open_module("/nowhere/model.pte"), ETKV_ERROR_PROGRAM, "cannot open");
  }

  std::ofstream file(to, std::ios::binary);
  file.write(
      reinterpret_cast<const char*>(rows.values.data()),
      static_cast<std::streamsize>(rows.values.size() * sizeof(float)));
  return check_report();
}

/// Only strings that equal the id, and have its length, are renamed.
void what_is_renamed() {
  const std::string counted("\x0a\0\0\0MLXBackend\0", 15);
  const std::string other("\x0b\0\0\0MLXBackend2\0", 16);
  std::string tables = counted + other + "MLXBackend" + counted;
  const std::size_t size = tables.size();
  detail::rename_backend(tables.data(), size);
  const std::string renamed("\x0a\0\0\0EtkvForMLX\0", 15);
  CHECK(tables == renamed + other + "MLXBackend" + renamed);
  // A string that ends after the tables is not renamed.
  std::string cut = counted;
  detail::rename_backend(cut.data(), cut.size() - 1);
  CHECK(cut == counted);
}

} // namespace
} // namespace etkv::tests

int main(int argc, char** argv) {
  using namespace etkv::tests;
  if (argc > 3) {
    return in_order({argv + 2, argv + argc}, argv[1]);
  }
  REQUIRE(argc == 3);
  what_is_renamed();
  const char *ours = argv[1], *other = argv[2];
  const std::string base = std::string(argv[0]) + ".rows.";
  const std::vector<std::vector<const char*>> orders = {
      {ours, other}, {other, ours}};
  for (std::size_t i = 0; i < orders.size(); ++i) {
    const std::string to = base + std::to_string(i);
    const pid_t child = fork();
    if (child == 0) {
      execl(argv[0], argv[0], to.c_str(), orders[i][0], orders[i][1], nullptr);
      _exit(127);
    }
    int ended = 0;
    CHECK(child > 0 && waitpid(child, &ended, 0) == child);
    CHECK(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
  }
  CHECK(!contents(base + "0").empty());
  CHECK(contents(base + "0") == contents(base + "1"));
  return check_report();
}
