#include "fixture.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <numeric>
#include <utility>

#include "examples/common/log.hpp"
#include "examples/common/logits.hpp"

namespace etkv::tests {

bool on_cpu() {
  const char* backend = std::getenv("ETKV_TEST_BACKEND");
  return backend != nullptr && std::strcmp(backend, kCPUBackend) == 0;
}

const char* backend() {
  return on_cpu() ? kCPUBackend : kMLXBackend;
}

std::string program_path(std::string name) {
  const size_t end = name.rfind("-f32");
  const bool is_f32 = end != std::string::npos && end + 4 == name.size();
  if (on_cpu() && is_f32 && name.rfind("cpu-", 0) != 0) {
    name = "cpu-" + name;
  }
  return std::string(ETKV_TEST_MODELS) + "/" + name + "/model.pte";
}

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void must(Result<void> result) {
  if (!result.ok()) {
    end_with(result.error());
  }
}

Ids text(int64_t n, uint32_t seed) {
  Ids ids;
  for (int64_t i = 0; i < n; ++i) {
    seed = seed * 1664525U + 1013904223U;
    ids.push_back((seed >> 8) % static_cast<uint32_t>(kVocabulary));
  }
  return ids;
}

Ids run(int64_t start, int64_t n) {
  Ids positions(static_cast<size_t>(n));
  std::iota(positions.begin(), positions.end(), start);
  return positions;
}

Ids slice(const Ids& ids, size_t start, size_t n) {
  const auto from = ids.begin() + static_cast<std::ptrdiff_t>(start);
  return Ids(from, from + static_cast<std::ptrdiff_t>(n));
}

Ids joined(Ids ids, const Ids& more) {
  ids.insert(ids.end(), more.begin(), more.end());
  return ids;
}

void Rows::append(const Rows& rows) {
  count += rows.count;
  vocabulary = rows.vocabulary;
  values.insert(values.end(), rows.values.begin(), rows.values.end());
}

Rows Rows::part(int64_t first, int64_t n) const {
  const auto* begin = values.data() + first * vocabulary;
  return {n, vocabulary, {begin, begin + n * vocabulary}};
}

int64_t Rows::best() const {
  const auto row = last().values;
  return std::max_element(row.begin(), row.end()) - row.begin();
}

bool operator==(const Rows& a, const Rows& b) {
  return a.count == b.count && a.vocabulary == b.vocabulary &&
         a.values.size() == b.values.size() &&
         std::memcmp(
             a.values.data(),
             b.values.data(),
             a.values.size() * sizeof(float)) == 0;
}

double distance(const Rows& a, const Rows& b) {
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

bool close(const Rows& a, const Rows& b) {
  return distance(a, b) < 1e-4;
}

Result<Rows> rows_of(const std::vector<EValue>& outputs) {
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

Result<Rows> run_step(Module& module, Ids ids, Ids positions) {
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

Model::Model(const std::string& name)
    : module_(
          std::make_unique<Module>(
              program_path(name),
              Module::LoadMode::Mmap)) {}

Model::~Model() = default;
Model::Model(Model&&) noexcept = default;

Result<void> Model::load(const char* key, Logits rows) {
  LoadOptions options(key);
  options.logits(rows);
  return load_method(*module_, "forward", options);
}

Result<Rows> Model::step(Ids ids, Ids positions) {
  return run_step(*module_, std::move(ids), std::move(positions));
}

Rows Model::at(int64_t position, const Ids& ids) {
  return must(step(ids, run(position, static_cast<int64_t>(ids.size()))));
}

Rows Model::read(const Ids& ids, size_t chunk, size_t begin, size_t end) {
  Rows all;
  end = std::min(end, ids.size());
  for (size_t i = begin; i < end; i += chunk) {
    const Ids some = slice(ids, i, std::min(chunk, end - i));
    all.append(at(static_cast<int64_t>(i), some));
  }
  return all;
}

ModelCacheParams Model::params() {
  return must(read_kv_cache_metadata(*module_));
}

template <typename Face>
CacheSession<Face> session_for(Model& model, const Change& change) {
  const auto params = model.params();
  auto config = make_config(params, 64, "f32", 4);
  if (change) {
    change(config);
  }
  return must(CacheSession<Face>::make(params.backend_id, config));
}

template <typename Face>
On<Face>::On(const Change& change, const std::string& name, Logits rows)
    : model(name), session(session_for<Face>(model, change)) {
  must(model.load(session.key(), rows));
}

template <typename Face>
On<Face>::~On() = default;

template CacheSession<Cache> session_for(Model&, const Change&);
template CacheSession<SeqCache> session_for(Model&, const Change&);
template CacheSession<TreeCache> session_for(Model&, const Change&);
template struct On<Cache>;
template struct On<SeqCache>;
template struct On<TreeCache>;

Change windows_of(int32_t n) {
  return [n](CacheConfig& config) {
    for (auto& layer : config.layers) {
      layer.window = n;
    }
  };
}

Rows alone(const Ids& ids, const Change& change) {
  return On<Cache>(change).model.read(ids, 5);
}

Bound::Bound(
    const std::string& name,
    int32_t capacity,
    const std::string& format,
    int32_t min_chunk,
    Logits rows)
    : On(
          [&](CacheConfig& config) {
            config.capacity = capacity;
            config.k_format = config.v_format = format;
            config.min_chunk = min_chunk;
          },
          name,
          rows) {}

bool operator==(const Memory& a, const Memory& b) {
  return a.allocated == b.allocated && a.used == b.used &&
         a.at_capacity == b.at_capacity;
}

CacheState::CacheState(const Cache& cache)
    : length(*cache.length()),
      capacity(cache.capacity()),
      memory(*cache.memory()) {}

} // namespace etkv::tests
