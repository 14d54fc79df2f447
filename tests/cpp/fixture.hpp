// Shared by the C++ tests: tiny programs by name. They run step by step on a
// cache, and return logits to compare.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "etkv/executorch.hpp"
#include "examples/common/log.hpp"
#include "examples/common/logits.hpp"

namespace etkv::tests {

using ::executorch::aten::ScalarType;
using ::executorch::extension::from_blob;
using ::executorch::extension::Module;
using ::executorch::runtime::EValue;

using Session = CacheSession<Cache>;
using Ids = std::vector<int64_t>;
/// A change of a cache's config.
using Change = std::function<void(CacheConfig&)>;

/// The programs of cpp_programs.py: 320 ids, at most 64 tokens per step.
inline constexpr int64_t kVocabulary = 320;
inline constexpr int64_t kMaxTokens = 64;

/// Whether the test runs float32 CPU programs instead of MLX programs.
bool on_cpu();

/// Returns the backend of sessions for these programs.
const char* backend();

/// Returns the path of a program. On the CPU, a name that ends with `-f32`
/// stands for `cpu-` and the name.
std::string program_path(std::string name);

std::string contents(const std::string& path);

/// Prints an unexpected error, and ends the test.
[[noreturn]] inline void end_with(const Error& error) {
  std::printf("unexpected error: %s\n", error.message().c_str());
  REQUIRE(false);
  std::abort();
}

/// Returns the value of a Result, or ends the test with the error's message.
template <typename T>
T must(Result<T> result) {
  if (!result.ok()) {
    end_with(result.error());
  }
  return std::move(result.value());
}
void must(Result<void> result);

/// Returns the first `n` tokens of the text of `seed`.
Ids text(int64_t n, uint32_t seed = 1);

/// Returns `n` consecutive positions; the first is `start`.
Ids run(int64_t start, int64_t n);

Ids slice(const Ids& ids, size_t start, size_t n);

Ids joined(Ids ids, const Ids& more);

/// Rows of logits. `==` compares bits.
struct Rows {
  int64_t count = 0;
  int64_t vocabulary = 0;
  std::vector<float> values;

  Rows last() const {
    return row(count - 1);
  }
  Rows tail(int64_t n) const {
    return part(count - n, n);
  }
  void append(const Rows& rows);
  Rows row(int64_t index) const {
    return part(index, 1);
  }
  Rows part(int64_t first, int64_t n) const;
  int64_t best() const;
};

bool operator==(const Rows& a, const Rows& b);

/// Returns the largest difference; infinite if the shapes differ.
double distance(const Rows& a, const Rows& b);

Result<Rows> rows_of(const std::vector<EValue>& outputs);

/// Runs one step of a loaded program. Ids and positions are not checked here.
Result<Rows> run_step(Module& module, Ids ids, Ids positions);

/// A program, not loaded yet.
class Model {
 public:
  explicit Model(const std::string& name);
  ~Model();
  Model(Model&&) noexcept;

  /// Loads the program, bound to the cache with this key.
  Result<void> load(const char* key, Logits rows = Logits::all);

  Result<Rows> step(Ids ids, Ids positions);

  /// Runs the ids, the first at `position`, in a step that must succeed.
  Rows at(int64_t position, const Ids& ids);

  /// Runs a part of the ids at their positions, `chunk` per step. Returns the
  /// rows of all steps.
  Rows
  read(const Ids& ids, size_t chunk, size_t begin = 0, size_t end = SIZE_MAX);

  Module& module() {
    return *module_;
  }
  ModelCacheParams params();

 private:
  std::unique_ptr<Module> module_;
};

/// Returns a session with a float32 cache. Its first allocation has only 4
/// slots, so that the cache grows in tests.
template <typename Face = Cache>
CacheSession<Face> session_for(Model& model, const Change& change = nullptr);

/// A program on a cache of the kind that the face has.
template <typename Face>
struct On {
  explicit On(
      const Change& change = nullptr,
      const std::string& name = "tiny-llama-f32",
      Logits rows = Logits::all);
  ~On();

  Rows at(int64_t position, const Ids& ids) {
    return model.at(position, ids);
  }
  Face& cache() {
    return session.cache();
  }
  Face* operator->() {
    return &session.cache();
  }

  Model model;
  CacheSession<Face> session;
};

/// Returns a change: windows of `n` positions in all layers.
Change windows_of(int32_t n);

/// Returns the rows of `ids` on a contiguous cache. A few ids run per step.
Rows alone(const Ids& ids, const Change& change = nullptr);

/// Compares with a tolerance, because attention with a mask does not sum in the
/// same order as attention without one.
bool close(const Rows& a, const Rows& b);

/// A program on a contiguous cache.
struct Bound : On<Cache> {
  explicit Bound(
      const std::string& name = "tiny-llama-f32",
      int32_t capacity = 64,
      const std::string& format = "f32",
      int32_t min_chunk = 4,
      Logits rows = Logits::all);
};

bool operator==(const Memory& a, const Memory& b);

/// The state of a cache that a runner can see.
struct CacheState {
  explicit CacheState(const Cache& cache);

  bool operator==(const CacheState& other) const {
    return length == other.length && capacity == other.capacity &&
           memory == other.memory;
  }

  int32_t length;
  int32_t capacity;
  Memory memory;
};

/// Checks a refused result: its status, and a message that contains `words`.
template <typename T>
void check_refused(
    const char* file,
    int line,
    const Result<T>& result,
    etkv_status status,
    const char* words) {
  check_holds(file, line, "it is refused", !result.ok());
  if (!result.ok()) {
    check_int(file, line, "status", result.error().status(), status);
    check_has(file, line, "message", result.error().message().c_str(), words);
  }
}
#define CHECK_REFUSED(result, status, words) \
  check_refused(__FILE__, __LINE__, (result), (status), (words))

} // namespace etkv::tests
