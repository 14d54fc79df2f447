// etkv for C++17: the faces of a cache, and the session that a program finds it
// by. Header only, over etkv.h; needs neither exceptions nor RTTI.
//
//   auto session = etkv::make_decode_session("MLXBackend", config);
//   if (!session.ok()) return complain(session.error());
//   load(program, {{"cache_key", session->key()}});
//   while (session->cache().can_extend()) ...
//
// What a runner may do with a cache is the face that it holds: `Cache`,
// `SeqCache` or `TreeCache`. That the cache can do it is found out once, when the
// session is made.
//
// Ownership and threads are as etkv.h says. Objects here own their handles: they
// are moved, not copied, and moving one is for one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "etkv/etkv.h"

namespace etkv {

/// What went wrong: a status of etkv.h, and a sentence for people.
class Error {
 public:
  Error(etkv_status status, std::string message)
      : status_(status), message_(std::move(message)) {}

  /// Takes over an error object of the C interface, and frees it.
  static Error adopt(etkv_status status, etkv_error* error) {
    Error adopted(status, etkv_error_message(error));
    etkv_error_free(error);
    return adopted;
  }

  etkv_status status() const {
    return status_;
  }
  const std::string& message() const {
    return message_;
  }

 private:
  etkv_status status_;
  std::string message_;
};

/// A value or the error that took its place. Ask `ok()` before the rest.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const {
    return state_.index() == 0;
  }
  explicit operator bool() const {
    return ok();
  }
  T& value() {
    return *std::get_if<0>(&state_);
  }
  const T& value() const {
    return *std::get_if<0>(&state_);
  }
  T& operator*() {
    return value();
  }
  T* operator->() {
    return &value();
  }
  const Error& error() const {
    return *std::get_if<1>(&state_);
  }

 private:
  std::variant<T, Error> state_;
};

/// Success, or the error that took its place.
template <>
class [[nodiscard]] Result<void> {
 public:
  Result() : error_(ETKV_OK, "") {}
  Result(Error error) : error_(std::move(error)) {}

  bool ok() const {
    return error_.status() == ETKV_OK;
  }
  explicit operator bool() const {
    return ok();
  }
  const Error& error() const {
    return error_;
  }

 private:
  Error error_;
};

/// Bytes of one layer's buffers.
struct LayerMemory {
  uint64_t k_allocated = 0;
  uint64_t k_used = 0;
  uint64_t v_allocated = 0;
  uint64_t v_used = 0;
};

/// Bytes of a cache's buffers.
struct Memory {
  uint64_t allocated = 0;          ///< held
  uint64_t used = 0;               ///< of these, in use by positions
  uint64_t at_capacity = 0;        ///< the most that it may come to hold
  std::vector<LayerMemory> layers; ///< the same layer by layer
};

/// Names of the formats that rows are stored in.
struct Formats {
  std::string k;
  std::string v;
};

/// Positions from `begin` up to, and without, `end`.
using Range = etkv_range;

/// The end of a range that takes in all positions that follow.
inline constexpr int32_t kAll = INT32_MAX;

namespace detail {
/// A C handle that is freed once.
template <typename T, void (*Free)(T*)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T* raw) : raw_(raw) {}
  Handle(Handle&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    Handle taken(std::move(other));
    std::swap(raw_, taken.raw_);
    return *this;
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    Free(raw_);
  }
  T* get() const {
    return raw_;
  }

 private:
  T* raw_ = nullptr;
};

/// Calls a C function, with where its error goes.
template <typename Call>
Result<void> run(Call call) {
  etkv_error* error = nullptr;
  const etkv_status status = call(&error);
  if (status == ETKV_OK) {
    return {};
  }
  return Error::adopt(status, error);
}

/// Calls a C function that stores a value.
template <typename T, typename Call>
Result<T> ask(Call call) {
  T value{};
  etkv_error* error = nullptr;
  const etkv_status status = call(&value, &error);
  if (status == ETKV_OK) {
    return value;
  }
  return Error::adopt(status, error);
}

/// Calls a C function that fills an array: how much there is may change between
/// the question and the answer.
template <typename T, typename Call>
Result<std::vector<T>> ask_list(Call call) {
  std::vector<T> list;
  for (;;) {
    size_t n = 0;
    if (auto counted = run([&](etkv_error** error) {
          return call(nullptr, size_t{0}, &n, error);
        });
        !counted.ok()) {
      return counted.error();
    }
    list.resize(n);
    size_t found = 0;
    auto filled = run([&](etkv_error** error) {
      return call(list.data(), n, &found, error);
    });
    if (filled.ok() && found <= n) {
      list.resize(found);
      return list;
    }
    // Refused for another reason than that there are more of them now.
    size_t now = 0;
    if (!filled.ok() &&
        (call(nullptr, size_t{0}, &now, nullptr) != ETKV_OK || now <= n)) {
      return filled.error();
    }
  }
}

/// Calls a C function that fills an etkv_memory for `n_layers` layers.
template <typename Call>
Result<Memory> ask_memory(size_t n_layers, Call call) {
  std::vector<etkv_layer_memory> layers(n_layers);
  etkv_memory raw{};
  raw.struct_size = sizeof(raw);
  if (!layers.empty()) {
    layers[0].struct_size = sizeof(layers[0]);
    raw.layers = layers.data();
    raw.n_layers = layers.size();
  }
  if (auto filled = run([&](etkv_error** error) { return call(&raw, error); });
      !filled.ok()) {
    return filled.error();
  }
  Memory memory{raw.allocated, raw.used, raw.at_capacity, {}};
  memory.layers.reserve(n_layers);
  for (const auto& layer : layers) {
    memory.layers.push_back(
        {layer.k_allocated, layer.k_used, layer.v_allocated, layer.v_used});
  }
  return memory;
}
} // namespace detail

/// The face that every cache has: admission, length, rollback, memory.
///
/// What is returned as it is and not as a Result is zero, empty or false for a face
/// that was moved from, and where the cache is poisoned: the next change or
/// step says so.
class Cache {
 public:
  /// The kind that carries this face and no other.
  static constexpr const char* kKind = "contiguous";

  /// Takes over a handle of the C interface.
  explicit Cache(etkv_cache* raw) : handle_(raw) {}
  /// The same, for every face alike: refused where the cache cannot do what the
  /// face is for.
  static Result<Cache> adopt(etkv_cache* raw) {
    return Cache(raw);
  }

  /// Whether `n` more positions fit; false if `n` is negative.
  bool can_extend(int32_t n = 1) const {
    bool fits = false;
    etkv_cache_can_extend(raw(), n, &fits, nullptr);
    return fits;
  }
  /// The most positions that it holds.
  int32_t capacity() const {
    int32_t capacity = 0;
    etkv_cache_capacity(raw(), &capacity, nullptr);
    return capacity;
  }
  /// The positions that it holds now; one that several sequences share counts
  /// once.
  int32_t length() const {
    int32_t length = 0;
    etkv_cache_length(raw(), &length, nullptr);
    return length;
  }
  size_t n_layers() const {
    size_t n_layers = 0;
    etkv_cache_n_layers(raw(), &n_layers, nullptr);
    return n_layers;
  }
  /// The name of its kind; empty for a face that was moved from.
  std::string kind() const {
    const char* kind = "";
    etkv_cache_kind(raw(), &kind, nullptr);
    return kind;
  }
  /// The formats that its rows have now.
  Formats formats() const {
    const char* k = "";
    const char* v = "";
    etkv_cache_formats(raw(), &k, &v, nullptr);
    return {k, v};
  }
  /// Stores what is there, and what comes, in other formats, until it is cleared.
  Result<void> convert(
      const std::string& k_format,
      const std::string& v_format) {
    return detail::run([&](etkv_error** error) {
      return etkv_cache_convert(
          raw(), k_format.c_str(), v_format.c_str(), error);
    });
  }
  /// Forgets every position, and gives the buffers back if `release`.
  Result<void> clear(bool release = false) {
    return detail::run([&](etkv_error** error) {
      return etkv_cache_clear(raw(), release, error);
    });
  }
  /// Forgets the positions from `length` on, of the one sequence that there is.
  Result<void> rewind(int32_t length) {
    return detail::run([&](etkv_error** error) {
      return etkv_cache_rewind(raw(), length, error);
    });
  }
  /// The least length, apart from 0, that it can be rewound to now.
  Result<int32_t> rewindable_to() const {
    return detail::ask<int32_t>([&](int32_t* length, etkv_error** error) {
      return etkv_cache_rewindable_to(raw(), length, error);
    });
  }
  /// Nothing for a face that was moved from.
  Memory memory() const {
    auto memory = detail::ask_memory(
        n_layers(), [&](etkv_memory* raw_memory, auto error) {
          return etkv_cache_memory(raw(), raw_memory, error);
        });
    return memory.ok() ? std::move(memory.value()) : Memory{};
  }

  /// Another face on the same cache, for another owner.
  Result<Cache> share() const {
    auto shared =
        detail::ask<etkv_cache*>([&](etkv_cache** made, etkv_error** error) {
          return etkv_cache_share(raw(), made, error);
        });
    if (!shared.ok()) {
      return shared.error();
    }
    return Cache(*shared);
  }

  /// The handle of the C interface, which stays this object's.
  etkv_cache* raw() const {
    return handle_.get();
  }

 private:
  detail::Handle<etkv_cache, etkv_cache_free> handle_;
};

/// The face of a cache that many sequences share; see etkv_seq_cache. Sequences
/// have numbers from 0 to 255. Ranges of positions have `kAll` as their end where
/// they take in all that follow.
class SeqCache : public Cache {
 public:
  static constexpr const char* kKind = "seq";

  static Result<SeqCache> adopt(etkv_cache* raw) {
    Cache cache(raw);
    auto sequences = detail::ask<etkv_seq_cache*>(
        [&](etkv_seq_cache** sequences, etkv_error** error) {
          return etkv_cache_as_seq(raw, sequences, error);
        });
    if (!sequences.ok()) {
      return sequences.error();
    }
    return SeqCache(std::move(cache), *sequences);
  }

  /// Says which sequence each token of the next step belongs to.
  Result<void> begin_step(const int32_t* sequences, size_t n_tokens) {
    return detail::run([&](etkv_error** error) {
      return etkv_seq_cache_begin_step(
          raw_sequences(), sequences, n_tokens, error);
    });
  }
  Result<void> begin_step(const std::vector<int32_t>& sequences) {
    return begin_step(sequences.data(), sequences.size());
  }
  /// The same for tokens that belong to several sequences each.
  Result<void> begin_step_shared(
      const std::vector<std::vector<int32_t>>& sequences) {
    std::vector<int32_t> all;
    std::vector<int32_t> counts;
    for (const auto& members : sequences) {
      all.insert(all.end(), members.begin(), members.end());
      counts.push_back(static_cast<int32_t>(members.size()));
    }
    return detail::run([&](etkv_error** error) {
      return etkv_seq_cache_begin_step_shared(
          raw_sequences(),
          all.data(),
          all.size(),
          counts.data(),
          counts.size(),
          error);
    });
  }
  /// Withdraws what begin_step() or begin_step_shared() said, for a step that does
  /// not come.
  Result<void> cancel_step() {
    return detail::run([&](etkv_error** error) {
      return etkv_seq_cache_cancel_step(raw_sequences(), error);
    });
  }
  /// Lets `target` have `source`'s positions as well, in the same cells.
  Result<void> seq_cp(
      int32_t source,
      int32_t target,
      int32_t begin = 0,
      int32_t end = kAll) {
    return detail::run([&](etkv_error** error) {
      return etkv_seq_cache_cp(
          raw_sequences(), source, target, begin, end, error);
    });
  }
  /// Takes positions from a sequence.
  Result<void> seq_rm(int32_t sequence, int32_t begin = 0, int32_t end = kAll) {
    return detail::run([&](etkv_error** error) {
      return etkv_seq_cache_rm(raw_sequences(), sequence, begin, end, error);
    });
  }
  /// Removes every sequence but one.
  Result<void> seq_keep(int32_t sequence) {
    return detail::run([&](etkv_error** error) {
      return etkv_seq_cache_keep(raw_sequences(), sequence, error);
    });
  }
  /// How many positions a sequence holds.
  Result<int32_t> seq_len(int32_t sequence) const {
    return detail::ask<int32_t>([&](int32_t* length, etkv_error** error) {
      return etkv_seq_cache_len(raw_sequences(), sequence, length, error);
    });
  }
  /// The position of a sequence's next token.
  Result<int32_t> seq_next(int32_t sequence) const {
    return detail::ask<int32_t>([&](int32_t* position, etkv_error** error) {
      return etkv_seq_cache_next(raw_sequences(), sequence, position, error);
    });
  }
  /// The positions that a sequence holds, as ranges in order.
  Result<std::vector<Range>> seq_positions(int32_t sequence) const {
    return detail::ask_list<Range>(
        [&](Range* ranges, size_t room, size_t* n, etkv_error** error) {
          return etkv_seq_cache_positions(
              raw_sequences(), sequence, ranges, room, n, error);
        });
  }
  /// As `rewindable_to`, for one of several sequences.
  Result<int32_t> seq_rewindable_to(int32_t sequence) const {
    return detail::ask<int32_t>([&](int32_t* length, etkv_error** error) {
      return etkv_seq_cache_rewindable_to(
          raw_sequences(), sequence, length, error);
    });
  }
  /// The sequences that hold positions or carry trees, in order.
  Result<std::vector<int32_t>> sequences() const {
    return detail::ask_list<int32_t>(
        [&](int32_t* numbers, size_t room, size_t* n, etkv_error** error) {
          return etkv_seq_cache_sequences(
              raw_sequences(), numbers, room, n, error);
        });
  }
  /// Makes each sequence one run of cells as far as what they share lets it.
  Result<void> compact() {
    return detail::run([&](etkv_error** error) {
      return etkv_seq_cache_compact(raw_sequences(), error);
    });
  }

  /// The handle of the C interface, which stays this object's.
  etkv_seq_cache* raw_sequences() const {
    return sequences_.get();
  }

 private:
  SeqCache(Cache cache, etkv_seq_cache* sequences)
      : Cache(std::move(cache)), sequences_(sequences) {}

  detail::Handle<etkv_seq_cache, etkv_seq_cache_free> sequences_;
};

/// The face of a cache whose sequences carry trees of candidates; see
/// etkv_tree_cache. Without a number, sequence 0 is meant.
class TreeCache : public SeqCache {
 public:
  static constexpr const char* kKind = "tree";

  static Result<TreeCache> adopt(etkv_cache* raw) {
    // First: what is refused here is named by what it lacks.
    auto trees = detail::ask<etkv_tree_cache*>(
        [&](etkv_tree_cache** trees, etkv_error** error) {
          return etkv_cache_as_tree(raw, trees, error);
        });
    auto sequences = SeqCache::adopt(raw);
    if (!trees.ok()) {
      return trees.error();
    }
    detail::Handle<etkv_tree_cache, etkv_tree_cache_free> handle(*trees);
    if (!sequences.ok()) {
      return sequences.error();
    }
    return TreeCache(std::move(sequences.value()), std::move(handle));
  }

  /// Appends a frontier of candidates: queries of the next step. A parent is the
  /// number of an earlier node, or -1 for the sequence itself.
  Result<void>
  propose(const int32_t* parents, size_t n_nodes, int32_t sequence = 0) {
    return detail::run([&](etkv_error** error) {
      return etkv_tree_cache_propose(
          raw_trees(), sequence, parents, n_nodes, error);
    });
  }
  Result<void> propose(
      const std::vector<int32_t>& parents,
      int32_t sequence = 0) {
    return propose(parents.data(), parents.size(), sequence);
  }
  // Or `{0}` might be a pointer.
  Result<void> propose(
      std::initializer_list<int32_t> parents,
      int32_t sequence = 0) {
    return propose(std::vector<int32_t>(parents), sequence);
  }
  /// Makes a chain of candidates part of the sequence, and forgets the rest.
  Result<void>
  commit(const int32_t* accepted, size_t n_nodes, int32_t sequence = 0) {
    return detail::run([&](etkv_error** error) {
      return etkv_tree_cache_commit(
          raw_trees(), sequence, accepted, n_nodes, error);
    });
  }
  Result<void> commit(
      const std::vector<int32_t>& accepted,
      int32_t sequence = 0) {
    return commit(accepted.data(), accepted.size(), sequence);
  }
  Result<void> commit(
      std::initializer_list<int32_t> accepted,
      int32_t sequence = 0) {
    return commit(std::vector<int32_t>(accepted), sequence);
  }
  /// Nodes of the tree behind a sequence.
  Result<size_t> tree_len(int32_t sequence = 0) const {
    return detail::ask<size_t>([&](size_t* n_nodes, etkv_error** error) {
      return etkv_tree_cache_len(raw_trees(), sequence, n_nodes, error);
    });
  }

  /// The handle of the C interface, which stays this object's.
  etkv_tree_cache* raw_trees() const {
    return trees_.get();
  }

 private:
  using Trees = detail::Handle<etkv_tree_cache, etkv_tree_cache_free>;

  TreeCache(SeqCache sequences, Trees trees)
      : SeqCache(std::move(sequences)), trees_(std::move(trees)) {}

  Trees trees_;
};

/// What one attention layer stores; see etkv_layer_config.
struct LayerConfig {
  int32_t n_kv_heads = 0;
  int32_t k_head_dim = 0;
  int32_t v_head_dim = 0;
  int32_t window = 0;
  int32_t sinks = 0;
};

/// How buffers grow; see etkv_growth.
enum class Growth : etkv_growth {
  doubling = ETKV_GROWTH_DOUBLING,
  step = ETKV_GROWTH_STEP,
  exact = ETKV_GROWTH_EXACT,
  upfront = ETKV_GROWTH_UPFRONT,
};

/// What a cache is to be; see etkv_cache_config. Zeros and empty names have
/// their defaults.
struct CacheConfig {
  std::vector<LayerConfig> layers;
  int32_t capacity = 0;
  int32_t max_step_tokens = 0;
  Growth growth = Growth::doubling;
  int32_t min_chunk = 0;
  std::string k_format = {};
  std::string v_format = {};
  int32_t quantized_kv_start = 0;
  std::string float_format = {};
};

namespace detail {
/// The config as C has it; valid while `config` is.
class RawConfig {
 public:
  explicit RawConfig(const CacheConfig& config) {
    layers_.reserve(config.layers.size());
    for (const auto& layer : config.layers) {
      etkv_layer_config raw{};
      raw.struct_size = sizeof(raw);
      raw.n_kv_heads = layer.n_kv_heads;
      raw.k_head_dim = layer.k_head_dim;
      raw.v_head_dim = layer.v_head_dim;
      raw.window = layer.window;
      raw.sinks = layer.sinks;
      layers_.push_back(raw);
    }
    const auto name = [](const std::string& format) {
      return format.empty() ? nullptr : format.c_str();
    };
    raw_.struct_size = sizeof(raw_);
    raw_.layers = layers_.data();
    raw_.n_layers = layers_.size();
    raw_.k_format = name(config.k_format);
    raw_.v_format = name(config.v_format);
    raw_.float_format = name(config.float_format);
    raw_.capacity = config.capacity;
    raw_.max_step_tokens = config.max_step_tokens;
    raw_.growth = static_cast<etkv_growth>(config.growth);
    raw_.min_chunk = config.min_chunk;
    raw_.quantized_kv_start = config.quantized_kv_start;
  }
  RawConfig(const RawConfig&) = delete;
  RawConfig& operator=(const RawConfig&) = delete;

  const etkv_cache_config* get() const {
    return &raw_;
  }

 private:
  std::vector<etkv_layer_config> layers_;
  etkv_cache_config raw_{};
};
} // namespace detail

/// What a cache of this config will hold when one sequence has grown to `length`
/// positions, to the byte, before any is made.
inline Result<Memory> estimate(const CacheConfig& config, int32_t length) {
  const detail::RawConfig raw(config);
  return detail::ask_memory(
      config.layers.size(), [&](etkv_memory* memory, etkv_error** error) {
        return etkv_cache_config_estimate(raw.get(), length, memory, error);
      });
}

/// A kind of cache, and the backend that it is for.
struct Kind {
  std::string backend_id;
  std::string name;
};

/// The kinds that caches can be made of, in order.
inline std::vector<Kind> kinds() {
  std::vector<Kind> found;
  etkv_kinds(
      [](void* context, const char* backend_id, const char* kind) {
        static_cast<std::vector<Kind>*>(context)->push_back({backend_id, kind});
      },
      &found,
      nullptr);
  return found;
}

/// A cache that no key leads to yet.
template <typename Face>
Result<Face> make_cache(
    const std::string& backend_id,
    const std::string& kind,
    const CacheConfig& config) {
  const detail::RawConfig raw(config);
  auto made =
      detail::ask<etkv_cache*>([&](etkv_cache** cache, etkv_error** error) {
        return etkv_cache_new(
            backend_id.c_str(), kind.c_str(), raw.get(), cache, error);
      });
  if (!made.ok()) {
    return made.error();
  }
  return Face::adopt(*made);
}

/// Caches by key, for the whole process: where programs find theirs. Sessions
/// use it; it is here for hosts that name keys themselves.
struct CacheRegistry {
  /// Makes a cache known under a key, until it is erased.
  static Result<void> install(
      const std::string& key,
      const std::string& backend_id,
      const Cache& cache) {
    return detail::run([&](etkv_error** error) {
      return etkv_registry_install(
          key.c_str(), backend_id.c_str(), cache.raw(), error);
    });
  }
  /// The cache under a key, as this face.
  template <typename Face = Cache>
  static Result<Face> get(const std::string& key) {
    auto found =
        detail::ask<etkv_cache*>([&](etkv_cache** cache, etkv_error** error) {
          return etkv_registry_get(key.c_str(), cache, error);
        });
    if (!found.ok()) {
      return found.error();
    }
    return Face::adopt(*found);
  }
  /// Forgets a key; who shares its cache keeps it.
  static Result<void> erase(const std::string& key) {
    return detail::run([&](etkv_error** error) {
      return etkv_registry_erase(key.c_str(), error);
    });
  }
};

/// Kinds of caches by backend and name.
struct BuilderRegistry {
  /// Makes a kind of the host's own out of one that is there; see
  /// etkv_builder_register. `context` and what `vtable` points to live as long as
  /// the process.
  static Result<void> add(
      const std::string& backend_id,
      const std::string& kind,
      const std::string& base,
      const etkv_cache_vtable& vtable,
      void* context = nullptr) {
    return detail::run([&](etkv_error** error) {
      return etkv_builder_register(
          backend_id.c_str(),
          kind.c_str(),
          base.c_str(),
          &vtable,
          context,
          error);
    });
  }
};

/// A cache of one's own, in the registry for as long as this lives.
///
/// `Face` is what the runner may do with it: `Cache`, `SeqCache` or `TreeCache`.
template <typename Face>
class CacheSession {
 public:
  /// A cache of the kind that the face is named after.
  static Result<CacheSession> make(
      const std::string& backend_id,
      const CacheConfig& config) {
    return make(backend_id, Face::kKind, config);
  }
  /// A cache of any kind that has the face; ETKV_ERROR_KIND where it has not.
  static Result<CacheSession> make(
      const std::string& backend_id,
      const std::string& kind,
      const CacheConfig& config) {
    const detail::RawConfig raw(config);
    auto made = detail::ask<etkv_session*>(
        [&](etkv_session** session, etkv_error** error) {
          return etkv_session_new(
              backend_id.c_str(), kind.c_str(), raw.get(), session, error);
        });
    if (!made.ok()) {
      return made.error();
    }
    Raw session(*made);
    auto cache =
        detail::ask<etkv_cache*>([&](etkv_cache** cache, etkv_error** error) {
          return etkv_session_cache(session.get(), cache, error);
        });
    if (!cache.ok()) {
      return cache.error();
    }
    auto face = Face::adopt(*cache);
    if (!face.ok()) {
      return face.error();
    }
    return CacheSession(std::move(session), std::move(face.value()));
  }

  /// What a program is loaded with, as the backend option `cache_key`.
  const char* key() const {
    return etkv_session_key(handle_.get());
  }
  Face& cache() {
    return face_;
  }
  const Face& cache() const {
    return face_;
  }
  Face* operator->() {
    return &face_;
  }
  const Face* operator->() const {
    return &face_;
  }

 private:
  using Raw = detail::Handle<etkv_session, etkv_session_free>;

  CacheSession(Raw handle, Face face)
      : handle_(std::move(handle)), face_(std::move(face)) {}

  Raw handle_;
  Face face_;
};

/// One growing sequence, decoded a token a step.
inline Result<CacheSession<Cache>> make_decode_session(
    const std::string& backend_id,
    const CacheConfig& config) {
  return CacheSession<Cache>::make(backend_id, config);
}

/// Several sequences that share cells: batches, forks, removal.
inline Result<CacheSession<SeqCache>> make_seq_session(
    const std::string& backend_id,
    const CacheConfig& config) {
  return CacheSession<SeqCache>::make(backend_id, config);
}

/// Sequences that carry trees of candidates: speculative decoding.
inline Result<CacheSession<TreeCache>> make_tree_session(
    const std::string& backend_id,
    const CacheConfig& config) {
  return CacheSession<TreeCache>::make(backend_id, config);
}

} // namespace etkv

#include "etkv/log.hpp"
#include "etkv/report.hpp"
