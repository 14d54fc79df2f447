// Shared by the C++ tests: tiny programs by name. They run step by step on a
// cache, and return logits to compare.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <numeric>
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
inline bool on_cpu() {
  const char* backend = std::getenv("ETKV_TEST_BACKEND");
  return backend != nullptr && std::strcmp(backend, kCPUBackend) == 0;
}

/// Returns the backend of sessions for these programs.
inline const char* backend() {
  return on_cpu() ? kCPUBackend : kMLXBackend;
}

/// Returns the path of a program. On the CPU, a name that ends with `-f32`
/// stands for `cpu-` and the name.
inline std::string program_path(std::string name) {
  const size_t end = name.rfind("-f32");
  const bool is_f32 = end != std::string::npos && end + 4 == name.size();
  if (on_cpu() && is_f32 && name.rfind("cpu-", 0) != 0) {
    name = "cpu-" + name;
  }
  return std::string(ETKV_TEST_MODELS) + "/" + name + "/model.pte";
}

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Returns the value of a Result, or ends the test with the error's message.
template <typename T>
T must(Result<T> result) {
  if (!result.ok()) {
    std::printf("unexpected error: %s\n", result.error().message().c_str());
  }
  REQUIRE(result.ok());
  return std::move(result.value());
}
inline void must(Result<void> result) {
  if (!result.ok()) {
    std::printf("unexpected error: %s\n", result.error().message().c_str());
  }
  REQUIRE(result.ok());
}

/// Returns the first `n` tokens of the text of `seed`.
inline Ids text(int64_t n, uint32_t seed = 1) {
  Ids ids;
  for (int64_t i = 0; i < n; ++i) {
    seed = seed * 1664525U + 1013904223U;
    ids.push_back((seed >> 8) % static_cast<uint32_t>(kVocabulary));
  }
  return ids;
}

/// Returns `n` consecutive positions; the first is `start`.
inline Ids run(int64_t start, int64_t n) {
  Ids positions(static_cast<size_t>(n));
  std::iota(positions.begin(), positions.end(), start);
  return positions;
}

inline Ids slice(const Ids& ids, size_t start, size_t n) {
  const auto from = ids.begin() + static_cast<std::ptrdiff_t>(start);
  return Ids(from, from + static_cast<std::ptrdiff_t>(n));
}

inline Ids joined(Ids ids, const Ids& more) {
  ids.insert(ids.end(), more.begin(), more.end());
  return ids;
}

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
  void append(const Rows& rows) {
    count += rows.count;
    vocabulary = rows.vocabulary;
    values.insert(values.end(), rows.values.begin(), rows.values.end());
  }
  Rows row(int64_t index) const {
    return part(index, 1);
  }
  Rows part(int64_t first, int64_t n) const {
    const auto* begin = values.data() + first * vocabulary;
    return {n, vocabulary, {begin, begin + n * vocabulary}};
  }
  int64_t best() const {
    const auto row = last().values;
    return std::max_element(row.begin(), row.end()) - row.begin();
  }
};

inline bool operator==(const Rows& a, const Rows& b) {
  return a.count == b.count && a.vocabulary == b.vocabulary &&
         a.values.size() == b.values.size() &&
         std::memcmp(
             a.values.data(),
             b.values.data(),
             a.values.size() * sizeof(float)) == 0;
}

/// Returns the largest difference; infinite if the shapes differ.
inline double distance(const Rows& a, const Rows& b) {
  if (a.count != b.count || a.values.size() != b.values.size()) {
    return HUGE_VAL;
  }
  double most = 0.0;
  for (size_t i = 0; i < a.values.size(); ++i) {
    const double apart = std::abs(double{a.values[i]} - double{b.values[i]});
    // The difference from NaN counts as infinite.
    most = apart <= most ? most : (apart == apart ? apart : HUGE_VAL);
  }
  return most;
}

inline Result<Rows> rows_of(const std::vector<EValue>& outputs) {
  REQUIRE(outputs.size() == 1 && outputs[0].isTensor());
  auto view = examples::view_logits(outputs[0].toTensor());
  if (!view.ok()) {
    return view.error();
  }
  Rows rows{view->rows, view->vocabulary, {}};
  rows.values.resize(static_cast<size_t>(rows.count * rows.vocabulary));
  for (int64_t row = 0; row < rows.count; ++row) {
    examples::copy_row(*view, row, rows.values.data() + row * rows.vocabulary);
  }
  return rows;
}

/// Runs one step of a loaded program. Ids and positions are not checked here.
inline Result<Rows> run_step(Module& module, Ids ids, Ids positions) {
  const auto ids_tensor = from_blob(
      ids.data(), {1, static_cast<int32_t>(ids.size())}, ScalarType::Long);
  const auto positions_tensor = from_blob(
      positions.data(),
      {static_cast<int32_t>(positions.size())},
      ScalarType::Long);
  auto outputs = execute(
      module, "forward", {EValue(*ids_tensor), EValue(*positions_tensor)});
  return outputs.ok() ? rows_of(*outputs) : outputs.error();
}

/// A program, not loaded yet.
class Model {
 public:
  explicit Model(const std::string& name)
      : module_(
            std::make_unique<Module>(
                program_path(name),
                Module::LoadMode::Mmap)) {}

  /// Loads the program, bound to the cache with this key.
  Result<void> load(const char* key, Logits rows = Logits::all) {
    LoadOptions options(key);
    options.logits(rows);
    return load_method(*module_, "forward", options);
  }

  Result<Rows> step(Ids ids, Ids positions) {
    return run_step(*module_, std::move(ids), std::move(positions));
  }

  /// Runs the ids, the first at `position`, in a step that must succeed.
  Rows at(int64_t position, const Ids& ids) {
    return must(step(ids, run(position, static_cast<int64_t>(ids.size()))));
  }

  /// Runs a part of the ids at their positions, `chunk` per step. Returns the
  /// rows of all steps.
  Rows
  read(const Ids& ids, size_t chunk, size_t begin = 0, size_t end = SIZE_MAX) {
    Rows all;
    end = std::min(end, ids.size());
    for (size_t i = begin; i < end; i += chunk) {
      const Ids some = slice(ids, i, std::min(chunk, end - i));
      all.append(at(static_cast<int64_t>(i), some));
    }
    return all;
  }

  Module& module() {
    return *module_;
  }
  ModelCacheParams params() {
    return must(read_kv_cache_metadata(*module_));
  }

 private:
  std::unique_ptr<Module> module_;
};

/// Returns a session with a float32 cache. Its first allocation has only 4
/// slots, so that the cache grows in tests.
template <typename Face = Cache>
CacheSession<Face> session_for(Model& model, const Change& change = nullptr) {
  const auto params = model.params();
  auto config = make_config(params, 64, "f32", 4);
  if (change) {
    change(config);
  }
  return must(CacheSession<Face>::make(params.backend_id, config));
}

/// A program on a cache of the kind that the face has.
template <typename Face>
struct On {
  explicit On(
      const Change& change = nullptr,
      const std::string& name = "tiny-llama-f32",
      Logits rows = Logits::all)
      : model(name), session(session_for<Face>(model, change)) {
    must(model.load(session.key(), rows));
  }

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
inline Change windows_of(int32_t n) {
  return [n](CacheConfig& config) {
    for (auto& layer : config.layers) {
      layer.window = n;
    }
  };
}

/// Returns the rows of `ids` on a contiguous cache. A few ids run per step.
inline Rows alone(const Ids& ids, const Change& change = nullptr) {
  return On<Cache>(change).model.read(ids, 5);
}

/// Compares with a tolerance, because attention with a mask does not sum in the
/// same order as attention without one.
inline bool close(const Rows& a, const Rows& b) {
  return distance(a, b) < 1e-4;
}

/// A program on a contiguous cache.
struct Bound : On<Cache> {
  explicit Bound(
      const std::string& name = "tiny-llama-f32",
      int32_t capacity = 64,
      const std::string& format = "f32",
      int32_t min_chunk = 4,
      Logits rows = Logits::all)
      : On(
            [&](CacheConfig& config) {
              config.capacity = capacity;
              config.k_format = config.v_format = format;
              config.min_chunk = min_chunk;
            },
            name,
            rows) {}
};

inline bool operator==(const Memory& a, const Memory& b) {
  return a.allocated == b.allocated && a.used == b.used &&
         a.at_capacity == b.at_capacity;
}

/// The state of a cache that a runner can see.
struct CacheState {
  explicit CacheState(const Cache& cache)
      : length(*cache.length()),
        capacity(cache.capacity()),
        memory(*cache.memory()) {}

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
